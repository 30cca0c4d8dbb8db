"""The shapes task: questions are well-posed, the evidence decides them, and the trained models use it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")

from clearhead_zoo.tasks import make_generator, shapes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"
RELATION_AXES = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "below": (1, -1)}


def answer_by_definition(question: str, scene: shapes.Scenes) -> str:
    """Reference: parse the question word by word and examine the objects one by one."""
    words = question.removesuffix("?").split()
    items = [
        {"shape": shapes.SHAPES[s], "colour": shapes.COLOURS[c], "at": (x, y)}
        for s, c, x, y, present in zip(scene.shape, scene.colour, scene.x, scene.y, scene.present, strict=True)
        if present
    ]

    def find_objects(name: str) -> list[dict[str, Any]]:
        singular = dict(zip(shapes.PLURALS, shapes.SHAPES, strict=True)).get(name, name)
        return [item for item in items if singular in (item["shape"], item["colour"])]

    if words[:2] == ["how", "many"]:
        return str(len(find_objects(words[2])))
    if words[:2] == ["is", "there"]:
        return "yes" if any(item in find_objects(words[4]) for item in find_objects(words[3])) else "no"
    attribute, name = words[1], words[4]
    matching = find_objects(name)
    for relation, (axis, sign) in RELATION_AXES.items():
        if f" {relation} " in question:
            (anchor,) = find_objects(question.split(f" {relation} the ")[1].removesuffix("?").split()[0])
            matching = [item for item in matching if sign * item["at"][axis] < sign * anchor["at"][axis]]
    (item,) = matching
    return str(item[attribute])


@pytest.fixture(scope="module")
def questions() -> shapes.QuestionBatch:
    return shapes.sample_question_batch(make_generator(3, "held-out"), 1500)


# -- the questions


def test_answers_equal_the_reference(questions: shapes.QuestionBatch) -> None:
    for row in range(len(questions)):
        question = shapes.list_questions()[questions.question[row]]
        assert answer_by_definition(question.text, questions.scenes[row]) == shapes.ANSWERS[questions.answer[row]], (
            question.text
        )


def test_only_the_evidence_decides_the_answer(questions: shapes.QuestionBatch) -> None:
    rng = make_generator(0, "held-out")
    alone = questions.scenes.remove_objects(~questions.evidence)
    without, others = (
        questions.scenes.remove_objects(questions.evidence),
        questions.scenes.remove_objects(questions.sample_other_objects(rng)),
    )
    for row in range(len(questions)):
        question, label = shapes.list_questions()[questions.question[row]], shapes.ANSWERS[questions.answer[row]]
        assert (
            answer_by_definition(question.text, alone[row]) == answer_by_definition(question.text, others[row]) == label
        )
        if question.family == "relation":
            # without the relation, two objects have that name, with different answers
            scene, (referent, anchor) = questions.scenes[row], (questions.referent[row], questions.anchor[row])
            by_colour = label in shapes.SHAPES
            name, asked_values = (scene.colour, scene.shape) if by_colour else (scene.shape, scene.colour)
            namesakes = np.flatnonzero((name == name[referent]) & scene.present)
            assert len(namesakes) == 2 and len(set(asked_values[namesakes])) == 2
            assert set(np.flatnonzero(questions.evidence[row])) == {referent, anchor}
        if question.family in ("count", "exist") and questions.evidence[row].any():
            assert answer_by_definition(question.text, without[row]) in ("0", "no")
        elif question.family in ("colour", "shape"):
            with pytest.raises(ValueError, match="not enough values to unpack"):
                answer_by_definition(question.text, without[row])
        assert questions.evidence[row].any() == (label not in ("0", "no"))


def test_control_objects_are_as_many_and_exclude_the_evidence(questions: shapes.QuestionBatch) -> None:
    others = questions.sample_other_objects(make_generator(0, "held-out"))
    available = questions.scenes.present & ~questions.evidence
    assert not (others & ~available).any()
    assert (others.sum(1) == np.minimum(questions.evidence.sum(1), available.sum(1))).all()


def test_answers_after_recolouring_equal_the_reference(questions: shapes.QuestionBatch) -> None:
    recoloured = questions.recolour_referents(make_generator(0, "held-out"))
    assert len(recoloured) > 300
    for row in range(len(recoloured)):
        question = shapes.list_questions()[recoloured.question[row]]
        assert answer_by_definition(question.text, recoloured.scenes[row]) == shapes.ANSWERS[recoloured.answer[row]]


def test_most_frequent_answer_has_low_accuracy(questions: shapes.QuestionBatch) -> None:
    families = [shapes.list_questions()[number].family for number in questions.question]
    assert set(Counter(families).values()) == {300}
    ceiling = {"colour": 0.25, "shape": 0.28, "count": 0.34, "exist": 0.57, "relation": 0.2}
    for family, limit in ceiling.items():
        answers = [questions.answer[row] for row, name in enumerate(families) if name == family]
        assert max(Counter(answers).values()) / len(answers) < limit, family
    # both words matter: most scenes without a red ring contain something red, or a ring
    for row in np.flatnonzero(questions.answer == shapes.NO_ANSWER)[:50]:
        colour, shape = (words := shapes.list_questions()[questions.question[row]].words)[3], words[4]
        scene = questions.scenes[row]
        is_similar = (scene.colour == shapes.COLOURS.index(colour)) | (scene.shape == shapes.SHAPES.index(shape))
        assert not (
            (scene.colour == shapes.COLOURS.index(colour)) & (scene.shape == shapes.SHAPES.index(shape)) & scene.present
        ).any()
        assert is_similar.any() or row % 10


def test_token_table_equals_the_question_words() -> None:
    ids, content = shapes.build_token_table()
    words = np.array(shapes.build_vocabulary())
    assert len(set(shapes.build_vocabulary())) == len(words)
    assert len({question.text for question in shapes.list_questions()}) == len(shapes.list_questions())
    for row, question in enumerate(shapes.list_questions()):
        assert " ".join(question.words) + "?" == question.text
        tokens = [word for word in words[ids[row]] if word != shapes.PAD_TOKEN]
        assert tokens == [shapes.CLS_TOKEN, *question.words, "?", shapes.SEP_TOKEN]
        assert [question.words[position] for position in question.content_positions] == list(
            words[ids[row]][content[row]]
        )


# -- the images


def draw_mask_by_definition(shape: str, x: float, y: float, radius: float, size: int) -> Any:
    mask = np.zeros((size, size), dtype=bool)
    for row, column in itertools.product(range(size), range(size)):
        dx, dy = column + 0.5 - x, row + 0.5 - y
        distance = np.hypot(dx, dy)
        arm_width = np.floor(radius * 4 * 3 / 8) / 4
        side = np.floor(radius * 4 * 7 / 8) / 4
        hole = np.floor(radius * 4 * 9 / 16) / 4
        mask[row, column] = {
            "circle": distance <= radius,
            "square": max(abs(dx), abs(dy)) <= side,
            "triangle": -radius <= dy <= radius and abs(dx) <= (dy + radius) / 2,
            "cross": min(abs(dx), abs(dy)) <= arm_width and max(abs(dx), abs(dy)) <= radius,
            "ring": hole <= distance <= radius,
        }[shape]
    return mask


def test_masks_and_boxes_equal_the_reference() -> None:
    scenes = shapes.sample_scenes(make_generator(1, "held-out"), 6, 64)
    _, masks = shapes.render(scenes)
    boxes = np.stack(shapes.compute_boxes(masks), axis=2)
    for row, index in zip(*np.nonzero(scenes.present), strict=True):
        geometry = (values[row, index] / shapes.SUBPIXELS_PER_PIXEL for values in (scenes.x, scenes.y, scenes.radius))
        expected = draw_mask_by_definition(shapes.SHAPES[scenes.shape[row, index]], *geometry, 64)
        assert np.array_equal(masks[row, index], expected)
        rows, columns = np.nonzero(expected)
        assert boxes[row, index].tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert not masks[~scenes.present].any()
    assert masks.sum(1).max() == 1, "objects do not touch"


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([64, 96]))
def test_numpy_and_torch_render_the_same_bytes(seed: int, size: int) -> None:
    torch = pytest.importorskip("torch")
    scenes = shapes.sample_scenes(make_generator(seed, "held-out"), 3, size)
    for array, tensor in zip(
        shapes.render(scenes),
        shapes.render(scenes, lambda a: torch.from_numpy(np.ascontiguousarray(a))),
        strict=True,
    ):
        assert np.array_equal(array, tensor.numpy())


def test_removing_an_object_changes_only_its_pixels() -> None:
    scenes = shapes.sample_scenes(make_generator(2, "held-out"), 20, 64)
    is_removed = np.zeros_like(scenes.present)
    is_removed[:, 0] = True
    (before, masks), (after, _) = shapes.render(scenes), shapes.render(scenes.remove_objects(is_removed))
    changed = (before != after).any(1)
    assert not (changed & ~masks[:, 0]).any()
    assert changed.sum() > 0.95 * masks[:, 0].sum()


def test_region_features_and_boxes_match_the_objects() -> None:
    scenes = shapes.sample_scenes(make_generator(4, "held-out"), 150, 64)
    features, boxes, region_indices = shapes.make_regions(make_generator(5, "held-out"), scenes)
    assert features.shape == (150, shapes.NUM_REGIONS, shapes.FEATURE_SIZE) and features.dtype == np.float32
    assert boxes.min() >= 0 and boxes.max() <= 1 and (boxes[..., 2:] > boxes[..., :2]).all()
    exact = np.stack(shapes.compute_boxes(shapes.render(scenes)[1]), axis=2) / 64
    object_boxes = np.take_along_axis(boxes, region_indices[:, :, None], axis=1)
    assert np.abs(object_boxes - exact)[scenes.present].max() < 1.5 / 64
    # the nearest code gives colour and shape of nearly every region, although no two are equal
    codes = shapes._make_feature_codes()
    kinds = list(itertools.product(range(len(shapes.COLOURS)), range(len(shapes.SHAPES)), range(2)))
    table = np.array([codes[c] + codes[6 + s] + codes[11 + z] for c, s, z in kinds])
    object_features = np.take_along_axis(features, region_indices[:, :, None], axis=1)[scenes.present]
    nearest = np.linalg.norm(object_features[:, None] - table, axis=2).argmin(1)
    truth = zip(scenes.colour[scenes.present], scenes.shape[scenes.present], strict=True)
    is_correct = [kinds[index][:2] == pair for index, pair in zip(nearest, truth, strict=True)]
    assert np.mean(is_correct) > 0.995


# -- single examples


def test_examples_are_deterministic_and_splits_differ() -> None:
    examples, repeated, other_split = (
        shapes.make_examples(3, seed, split) for seed, split in ((1, "held-out"), (1, "held-out"), (1, "train"))
    )
    for first, second, third in zip(examples, repeated, other_split, strict=True):
        assert first.text == second.text and np.array_equal(first.pixels, second.pixels)
        assert np.array_equal(first.features, second.features)
        assert not np.array_equal(first.pixels, third.pixels)


def test_fields_of_an_example_are_consistent() -> None:
    for example in shapes.make_examples(60, seed=9):
        assert len(example.names) == len(example.masks) == len(example.boxes) == len(example.regions)
        assert example.pixels.dtype == np.uint8 and example.image.size == (64, 64)
        assert [example.text[start:end] for start, end in example.evidence_spans] == [
            example.words[position] for position in example.evidence
        ]
        pixels = example.evidence_mask
        assert pixels.any() == bool(example.objects)
        patches = shapes.find_covered_patches(pixels, 8)
        assert patches.shape == (8, 8) and patches.any() == pixels.any()
        assert not pixels[~np.kron(patches, np.ones((8, 8), dtype=bool))].any()
        assert set(example.evidence_regions) == {example.regions[position] for position in example.objects}
        if example.family in ("colour", "relation") and example.referent is not None and " colour " in example.text:
            assert f" {example.label} " in example.names[example.referent]


def test_unknown_family_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"there are no questions named size; there are: colour, shape, count, exist, relation"
    ):
        shapes.make_example(family="size")


def test_task_does_not_import_torch() -> None:
    code = (
        "import sys; from clearhead_zoo.tasks import shapes; shapes.make_example(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the training code


@pytest.fixture(scope="module")
def detr_script() -> Any:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(SCRIPTS))
    try:
        import shapes_detr
    finally:
        sys.path.remove(str(SCRIPTS))
    return shapes_detr


def test_query_matching_equals_scipy_assignment(detr_script: Any) -> None:
    torch = pytest.importorskip("torch")
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    cost = rng.normal(size=(40, 9, 6))
    present = rng.random((40, 6)) < 0.7
    owner = detr_script.match_queries(torch.from_numpy(cost), torch.from_numpy(present)).numpy()
    for row in range(40):
        objects = np.flatnonzero(present[row])
        queries = np.flatnonzero(owner[row] >= 0)
        assert sorted(owner[row, queries]) == objects.tolist()
        best = optimize.linear_sum_assignment(cost[row][:, objects])
        assert cost[row, queries, owner[row, queries]].sum() == pytest.approx(cost[row][:, objects][best].sum())


def test_average_precision_of_known_detections(detr_script: Any) -> None:
    scenes = shapes.sample_scenes(make_generator(0, "held-out"), 30, 96)
    truth = detr_script.compute_true_boxes(scenes).astype(np.float32)
    perfect = scenes.present * 0.9, scenes.shape, truth
    assert detr_script.compute_average_precision(scenes, perfect)[0] == 1.0
    # a duplicate detection is wrong, but ranks after all correct ones
    duplicates = tuple(
        np.concatenate([first, second], axis=1)
        for first, second in zip(perfect, (perfect[0] * 0.5, *perfect[1:]), strict=True)
    )
    assert detr_script.compute_average_precision(scenes, duplicates)[0] == 1.0
    # boxes half a width off overlap by a third
    shifted = truth + (truth[..., [2]] - truth[..., [0]]) / 2 * np.array([1, 0, 1, 0], dtype=np.float32)
    assert detr_script.compute_average_precision(scenes, (perfect[0], perfect[1], shifted))[0] == 0.0
    # two detections of one class, the more confident one wrong: precision 1/2 at full recall
    scene = scenes[[0]]
    single = scene.remove_objects(np.arange(shapes.MAX_OBJECTS)[None] > 0)
    wrong = np.array([[[0, 0, 1, 1]]], dtype=np.float32)
    detections = (
        np.array([[0.9, 0.8]]),
        np.repeat(scene.shape[:, :1], 2, axis=1),
        np.concatenate([wrong, truth[:1, :1]], axis=1),
    )
    assert detr_script.compute_average_precision(single, detections)[0] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shapes-vqa", "shapes-vilt", "shapes-detr"])
def test_training_script_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = SCRIPTS / f"{name.replace('-', '_')}.py"
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    subprocess.run([sys.executable, str(script), "--smoke", "--device", "cpu", *folders], check=True, cwd=ROOT)
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["name"] == name and card["figures"]
    load_and_check_model(tmp_path / "out", name)


# -- the trained models


def load_and_check_model(folder: Path, name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    model_classes = {
        "shapes-vqa": transformers.LxmertForQuestionAnswering,
        "shapes-vilt": transformers.ViltForQuestionAnswering,
        "shapes-detr": transformers.DetrForObjectDetection,
    }
    model, report = model_classes[name].from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if name != "shapes-detr":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = [question.text for question in shapes.list_questions()]
        ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
        assert np.array_equal(ids, shapes.build_token_table()[0])
    if name != "shapes-vqa":
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(folder)
        except ImportError:  # older transformers open image processors with torchvision only
            return model.eval()
        size = 64 if name == "shapes-vilt" else 96
        example = shapes.make_example(0, size=size)
        pixels = processor(example.image, return_tensors="np")["pixel_values"]
        assert pixels.shape == (1, 3, size, size)
        assert np.abs(pixels[0].transpose(1, 2, 0) - (example.pixels / 127.5 - 1)).max() < 1e-5
    return model.eval()


def load_zoo_model(name: str) -> Any:
    if name not in clearhead_zoo.names():
        pytest.skip(f"models/{name} is not trained yet: run packages/zoo/train/{name.replace('-', '_')}.py")
    return load_and_check_model(clearhead_zoo.path(name), name)


def predict_from_regions(model: Any, questions: shapes.QuestionBatch, is_removed: Any) -> Any:
    import torch

    rng = make_generator(11, "held-out")
    features, boxes, region_indices = shapes.make_regions(rng, questions.scenes)
    is_blank = np.zeros(features.shape[:2], dtype=bool)
    np.put_along_axis(is_blank, region_indices, is_removed, axis=1)
    features = np.where(is_blank[:, :, None], shapes.sample_background_features(rng, *is_blank.shape), features)
    ids = torch.from_numpy(shapes.build_token_table()[0][questions.question])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=(ids != 0).float(),
            visual_feats=torch.from_numpy(features),
            visual_pos=torch.from_numpy(boxes),
        ).question_answering_score
    return logits.argmax(-1).numpy()


def predict_from_pixels(model: Any, questions: shapes.QuestionBatch, is_removed: Any) -> Any:
    import torch

    ids = torch.from_numpy(shapes.build_token_table()[0][questions.question])
    images = torch.from_numpy(shapes.render(questions.scenes.remove_objects(is_removed))[0]).float() / 127.5 - 1
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=images).logits.argmax(-1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "predict", "count"), [("shapes-vqa", predict_from_regions, 600), ("shapes-vilt", predict_from_pixels, 200)]
)
def test_vqa_accuracy_equals_card_and_depends_on_the_evidence(name: str, predict: Any, count: int) -> None:
    model = load_zoo_model(name)
    questions = shapes.sample_question_batch(make_generator(77, "held-out"), count)
    no_objects = np.zeros_like(questions.evidence)
    is_correct = predict(model, questions, no_objects) == questions.answer
    stated = clearhead_zoo.card(name)["figures"]["accuracy"]
    assert stated >= 0.97
    assert is_correct.mean() >= stated - 3 * np.sqrt(stated * (1 - stated) / count) - 0.005
    with_evidence = questions[np.flatnonzero(questions.evidence.any(1))]
    without_evidence = predict(model, with_evidence, with_evidence.evidence) == with_evidence.answer
    without_controls = (
        predict(model, with_evidence, with_evidence.sample_other_objects(make_generator(0, "held-out")))
        == with_evidence.answer
    )
    assert without_evidence.mean() < 0.35 and without_controls.mean() > 0.93


def test_vilt_logits_are_repeatable() -> None:
    """Transformers shuffles the patches at every call: sums have another order, but no patch is dropped."""
    import torch

    model = load_zoo_model("shapes-vilt")
    questions = shapes.sample_question_batch(make_generator(78, "held-out"), 4)
    ids = torch.from_numpy(shapes.build_token_table()[0][questions.question])
    images = torch.from_numpy(shapes.render(questions.scenes)[0]).float() / 127.5 - 1

    def compute_logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=images).logits

    torch.testing.assert_close(compute_logits(), compute_logits(), atol=1e-4, rtol=1e-4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = compute_logits()
        torch.manual_seed(0)
        assert torch.equal(first, compute_logits())


@pytest.mark.slow
def test_detr_precision_equals_card_and_depends_on_the_object(detr_script: Any) -> None:
    import torch

    model, device = load_zoo_model("shapes-detr"), torch.device("cpu")
    scenes = shapes.sample_scenes(make_generator(77, "held-out"), 80, 96)
    stated = clearhead_zoo.card("shapes-detr")["figures"]["AP at IoU 0.5"]
    assert stated >= 0.95
    detections = detr_script.predict_detections(model, scenes, device)
    assert detr_script.compute_average_precision(scenes, detections)[0] >= stated - 0.04
    is_first = np.zeros_like(scenes.present)
    is_first[:, 0] = True
    box, shape = detr_script.compute_true_boxes(scenes)[:, 0], scenes.shape[:, 0]
    without_object = detr_script.find_detected(
        detr_script.predict_detections(model, scenes.remove_objects(is_first), device), box
    )
    object_only = detr_script.find_detected(
        detr_script.predict_detections(model, scenes.remove_objects(~is_first), device), box, shape
    )
    assert without_object.mean() < 0.05 and object_only.mean() > 0.9
