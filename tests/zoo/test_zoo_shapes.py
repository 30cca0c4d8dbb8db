"""The shapes: is every question well-posed, does the evidence decide it, and do the models that learned it use it?"""

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
TURNED = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "below": (1, -1)}


def answer(question: str, scene: shapes.Scenes) -> str:
    """The slow twin: reads the question word by word and looks at the objects one by one."""
    words = question.removesuffix("?").split()
    things = [
        {"shape": shapes.SHAPES[s], "colour": shapes.COLOURS[c], "at": (x, y)}
        for s, c, x, y, present in zip(scene.shape, scene.colour, scene.x, scene.y, scene.present, strict=True)
        if present
    ]

    def called(name: str) -> list[dict[str, Any]]:
        singular = dict(zip(shapes.PLURALS, shapes.SHAPES, strict=True)).get(name, name)
        return [thing for thing in things if singular in (thing["shape"], thing["colour"])]

    if words[:2] == ["how", "many"]:
        return str(len(called(words[2])))
    if words[:2] == ["is", "there"]:
        return "yes" if any(thing in called(words[4]) for thing in called(words[3])) else "no"
    asked, name = words[1], words[4]
    found = called(name)
    for relation, (axis, sign) in TURNED.items():
        if f" {relation} " in question:
            (anchor,) = called(question.split(f" {relation} the ")[1].removesuffix("?").split()[0])
            found = [thing for thing in found if sign * thing["at"][axis] < sign * anchor["at"][axis]]
    (thing,) = found
    return str(thing[asked])


@pytest.fixture(scope="module")
def asked() -> shapes.QuestionBatch:
    return shapes.sample_question_batch(make_generator(3, "held-out"), 1500)


# -- the questions


def test_every_question_has_the_one_answer_that_is_given(asked: shapes.QuestionBatch) -> None:
    for row in range(len(asked)):
        question = shapes.list_questions()[asked.question[row]]
        assert answer(question.text, asked.scenes[row]) == shapes.ANSWERS[asked.answer[row]], question.text


def test_the_evidence_decides_and_nothing_else_does(asked: shapes.QuestionBatch) -> None:
    rng = make_generator(0, "held-out")
    alone = asked.scenes.remove_objects(~asked.evidence)
    without, others = (
        asked.scenes.remove_objects(asked.evidence),
        asked.scenes.remove_objects(asked.sample_other_objects(rng)),
    )
    for row in range(len(asked)):
        question, label = shapes.list_questions()[asked.question[row]], shapes.ANSWERS[asked.answer[row]]
        assert answer(question.text, alone[row]) == answer(question.text, others[row]) == label
        if question.family == "relation":
            # without the relation there would be two of that name, and another answer
            scene, (referent, anchor) = asked.scenes[row], (asked.referent[row], asked.anchor[row])
            by_colour = label in shapes.SHAPES
            name, told = (scene.colour, scene.shape) if by_colour else (scene.shape, scene.colour)
            namesakes = np.flatnonzero((name == name[referent]) & scene.present)
            assert len(namesakes) == 2 and len(set(told[namesakes])) == 2
            assert set(np.flatnonzero(asked.evidence[row])) == {referent, anchor}
        if question.family in ("count", "exist") and asked.evidence[row].any():
            assert answer(question.text, without[row]) in ("0", "no")
        elif question.family in ("colour", "shape"):
            with pytest.raises(ValueError, match="not enough values to unpack"):
                answer(question.text, without[row])
        assert asked.evidence[row].any() == (label not in ("0", "no"))


def test_others_are_as_many_and_no_evidence(asked: shapes.QuestionBatch) -> None:
    others = asked.sample_other_objects(make_generator(0, "held-out"))
    free = asked.scenes.present & ~asked.evidence
    assert not (others & ~free).any()
    assert (others.sum(1) == np.minimum(asked.evidence.sum(1), free.sum(1))).all()


def test_answer_follows_the_paint(asked: shapes.QuestionBatch) -> None:
    turned = asked.recolour_referents(make_generator(0, "held-out"))
    assert len(turned) > 300
    for row in range(len(turned)):
        question = shapes.list_questions()[turned.question[row]]
        assert answer(question.text, turned.scenes[row]) == shapes.ANSWERS[turned.answer[row]]


def test_guessing_is_poor(asked: shapes.QuestionBatch) -> None:
    families = [shapes.list_questions()[number].family for number in asked.question]
    assert set(Counter(families).values()) == {300}
    ceiling = {"colour": 0.25, "shape": 0.28, "count": 0.34, "exist": 0.57, "relation": 0.2}
    for family, most in ceiling.items():
        answers = [asked.answer[row] for row, name in enumerate(families) if name == family]
        assert max(Counter(answers).values()) / len(answers) < most, family
    # what looks for a red ring must look at both words: in most scenes without one there is something red, and a ring
    for row in np.flatnonzero(asked.answer == shapes.NO_ANSWER)[:50]:
        colour, shape = (words := shapes.list_questions()[asked.question[row]].words)[3], words[4]
        scene = asked.scenes[row]
        near = (scene.colour == shapes.COLOURS.index(colour)) | (scene.shape == shapes.SHAPES.index(shape))
        assert not (
            (scene.colour == shapes.COLOURS.index(colour)) & (scene.shape == shapes.SHAPES.index(shape)) & scene.present
        ).any()
        assert near.any() or row % 10


def test_words_and_tokens_say_the_same() -> None:
    ids, content = shapes.build_token_table()
    words = np.array(shapes.build_vocabulary())
    assert len(set(shapes.build_vocabulary())) == len(words)
    assert len({question.text for question in shapes.list_questions()}) == len(shapes.list_questions())
    for row, question in enumerate(shapes.list_questions()):
        assert " ".join(question.words) + "?" == question.text
        told = [word for word in words[ids[row]] if word != shapes.PAD_TOKEN]
        assert told == [shapes.CLS_TOKEN, *question.words, "?", shapes.SEP_TOKEN]
        assert [question.words[place] for place in question.content_positions] == list(words[ids[row]][content[row]])


# -- the pictures


def slow_mask(shape: str, x: float, y: float, radius: float, size: int) -> Any:
    mask = np.zeros((size, size), dtype=bool)
    for row, column in itertools.product(range(size), range(size)):
        right, down = column + 0.5 - x, row + 0.5 - y
        far = np.hypot(right, down)
        arm = np.floor(radius * 4 * 3 / 8) / 4
        side = np.floor(radius * 4 * 7 / 8) / 4
        hole = np.floor(radius * 4 * 9 / 16) / 4
        mask[row, column] = {
            "circle": far <= radius,
            "square": max(abs(right), abs(down)) <= side,
            "triangle": -radius <= down <= radius and abs(right) <= (down + radius) / 2,
            "cross": min(abs(right), abs(down)) <= arm and max(abs(right), abs(down)) <= radius,
            "ring": hole <= far <= radius,
        }[shape]
    return mask


def test_masks_are_the_shapes_and_boxes_are_theirs() -> None:
    scenes = shapes.sample_scenes(make_generator(1, "held-out"), 6, 64)
    _, masks = shapes.render(scenes)
    boxes = np.stack(shapes.compute_boxes(masks), axis=2)
    for row, place in zip(*np.nonzero(scenes.present), strict=True):
        at = (values[row, place] / shapes.SUBPIXELS_PER_PIXEL for values in (scenes.x, scenes.y, scenes.radius))
        expected = slow_mask(shapes.SHAPES[scenes.shape[row, place]], *at, 64)
        assert np.array_equal(masks[row, place], expected)
        down, right = np.nonzero(expected)
        assert boxes[row, place].tolist() == [right.min(), down.min(), right.max() + 1, down.max() + 1]
    assert not masks[~scenes.present].any()
    assert masks.sum(1).max() == 1, "objects do not touch"


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([64, 96]))
def test_numpy_and_torch_render_the_same_bytes(seed: int, size: int) -> None:
    torch = pytest.importorskip("torch")
    scenes = shapes.sample_scenes(make_generator(seed, "held-out"), 3, size)
    for one, other in zip(
        shapes.render(scenes),
        shapes.render(scenes, lambda a: torch.from_numpy(np.ascontiguousarray(a))),
        strict=True,
    ):
        assert np.array_equal(one, other.numpy())


def test_taking_away_leaves_the_rest_as_it_is() -> None:
    scenes = shapes.sample_scenes(make_generator(2, "held-out"), 20, 64)
    gone = np.zeros_like(scenes.present)
    gone[:, 0] = True
    (before, masks), (after, _) = shapes.render(scenes), shapes.render(scenes.remove_objects(gone))
    changed = (before != after).any(1)
    assert not (changed & ~masks[:, 0]).any()
    assert changed.sum() > 0.95 * masks[:, 0].sum()


def test_regions_show_the_objects_and_the_ground() -> None:
    scenes = shapes.sample_scenes(make_generator(4, "held-out"), 150, 64)
    features, boxes, places = shapes.make_regions(make_generator(5, "held-out"), scenes)
    assert features.shape == (150, shapes.NUM_REGIONS, shapes.FEATURE_SIZE) and features.dtype == np.float32
    assert boxes.min() >= 0 and boxes.max() <= 1 and (boxes[..., 2:] > boxes[..., :2]).all()
    exact = np.stack(shapes.compute_boxes(shapes.render(scenes)[1]), axis=2) / 64
    own = np.take_along_axis(boxes, places[:, :, None], axis=1)
    assert np.abs(own - exact)[scenes.present].max() < 1.5 / 64
    # a nearest-code reader finds colour and shape in nearly every region, although no two are alike
    codes = shapes._make_feature_codes()
    kinds = list(itertools.product(range(len(shapes.COLOURS)), range(len(shapes.SHAPES)), range(2)))
    table = np.array([codes[c] + codes[6 + s] + codes[11 + z] for c, s, z in kinds])
    seen = np.take_along_axis(features, places[:, :, None], axis=1)[scenes.present]
    nearest = np.linalg.norm(seen[:, None] - table, axis=2).argmin(1)
    truth = zip(scenes.colour[scenes.present], scenes.shape[scenes.present], strict=True)
    right = [kinds[found][:2] == pair for found, pair in zip(nearest, truth, strict=True)]
    assert np.mean(right) > 0.995


# -- single examples


def test_examples_are_a_function_of_seed_and_split() -> None:
    one, same, other = (
        shapes.make_examples(3, seed, split) for seed, split in ((1, "held-out"), (1, "held-out"), (1, "train"))
    )
    for first, second, third in zip(one, same, other, strict=True):
        assert first.text == second.text and np.array_equal(first.pixels, second.pixels)
        assert np.array_equal(first.features, second.features)
        assert not np.array_equal(first.pixels, third.pixels)


def test_example_says_the_same_in_all_its_parts() -> None:
    for example in shapes.make_examples(60, seed=9):
        assert len(example.names) == len(example.masks) == len(example.boxes) == len(example.regions)
        assert example.pixels.dtype == np.uint8 and example.image.size == (64, 64)
        assert [example.text[start:end] for start, end in example.evidence_spans] == [
            example.words[place] for place in example.evidence
        ]
        pixels = example.evidence_mask
        assert pixels.any() == bool(example.objects)
        patches = shapes.find_covered_patches(pixels, 8)
        assert patches.shape == (8, 8) and patches.any() == pixels.any()
        assert not pixels[~np.kron(patches, np.ones((8, 8), dtype=bool))].any()
        assert set(example.evidence_regions) == {example.regions[place] for place in example.objects}
        if example.family in ("colour", "relation") and example.referent is not None and " colour " in example.text:
            assert f" {example.label} " in example.names[example.referent]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no questions are called size; there are: colour, shape, count, exist, relation"
    ):
        shapes.make_example(family="size")


def test_task_needs_no_torch() -> None:
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


def test_matching_is_the_cheapest(detr_script: Any) -> None:
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
    # the same object found twice: the second is wrong, but comes after all that is right
    twice = tuple(
        np.concatenate([part, second], axis=1)
        for part, second in zip(perfect, (perfect[0] * 0.5, *perfect[1:]), strict=True)
    )
    assert detr_script.compute_average_precision(scenes, twice)[0] == 1.0
    # boxes half a width off overlap by a third
    off = truth + (truth[..., [2]] - truth[..., [0]]) / 2 * np.array([1, 0, 1, 0], dtype=np.float32)
    assert detr_script.compute_average_precision(scenes, (perfect[0], perfect[1], off))[0] == 0.0
    # two detections of one class, the surer one wrong: precision 1/2 at full recall
    one = scenes[[0]]
    rest = one.remove_objects(np.arange(shapes.MAX_OBJECTS)[None] > 0)
    wrong = np.array([[[0, 0, 1, 1]]], dtype=np.float32)
    found = (
        np.array([[0.9, 0.8]]),
        np.repeat(one.shape[:, :1], 2, axis=1),
        np.concatenate([wrong, truth[:1, :1]], axis=1),
    )
    assert detr_script.compute_average_precision(rest, found)[0] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shapes-vqa", "shapes-vilt", "shapes-detr"])
def test_training_script_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = SCRIPTS / f"{name.replace('-', '_')}.py"
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    subprocess.run([sys.executable, str(script), "--smoke", "--device", "cpu", *folders], check=True, cwd=ROOT)
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["name"] == name and card["figures"]
    assert_opens(tmp_path / "out", name)


# -- what they made


def assert_opens(folder: Path, name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kinds = {
        "shapes-vqa": transformers.LxmertForQuestionAnswering,
        "shapes-vilt": transformers.ViltForQuestionAnswering,
        "shapes-detr": transformers.DetrForObjectDetection,
    }
    model, report = kinds[name].from_pretrained(folder, dtype="float32", output_loading_info=True)
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


def opened(name: str) -> Any:
    if name not in clearhead_zoo.names():
        pytest.skip(f"models/{name} is not trained yet: run packages/zoo/train/{name.replace('-', '_')}.py")
    return assert_opens(clearhead_zoo.path(name), name)


def answers_from_regions(model: Any, asked: shapes.QuestionBatch, gone: Any) -> Any:
    import torch

    rng = make_generator(11, "held-out")
    features, boxes, places = shapes.make_regions(rng, asked.scenes)
    blank = np.zeros(features.shape[:2], dtype=bool)
    np.put_along_axis(blank, places, gone, axis=1)
    features = np.where(blank[:, :, None], shapes.sample_background_features(rng, *blank.shape), features)
    ids = torch.from_numpy(shapes.build_token_table()[0][asked.question])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=(ids != 0).float(),
            visual_feats=torch.from_numpy(features),
            visual_pos=torch.from_numpy(boxes),
        ).question_answering_score
    return logits.argmax(-1).numpy()


def answers_from_pixels(model: Any, asked: shapes.QuestionBatch, gone: Any) -> Any:
    import torch

    ids = torch.from_numpy(shapes.build_token_table()[0][asked.question])
    pictures = torch.from_numpy(shapes.render(asked.scenes.remove_objects(gone))[0]).float() / 127.5 - 1
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pictures).logits.argmax(-1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answers", "count"), [("shapes-vqa", answers_from_regions, 600), ("shapes-vilt", answers_from_pixels, 200)]
)
def test_model_answers_and_uses_the_evidence(name: str, answers: Any, count: int) -> None:
    model = opened(name)
    asked = shapes.sample_question_batch(make_generator(77, "held-out"), count)
    nothing = np.zeros_like(asked.evidence)
    right = answers(model, asked, nothing) == asked.answer
    stated = clearhead_zoo.card(name)["figures"]["accuracy"]
    assert stated >= 0.97
    assert right.mean() >= stated - 3 * np.sqrt(stated * (1 - stated) / count) - 0.005
    evident = asked[np.flatnonzero(asked.evidence.any(1))]
    without = answers(model, evident, evident.evidence) == evident.answer
    others = answers(model, evident, evident.sample_other_objects(make_generator(0, "held-out"))) == evident.answer
    assert without.mean() < 0.35 and others.mean() > 0.93


def test_vilt_gives_the_same_logits_twice() -> None:
    """transformers shuffles the patches at every call: sums come in another order, but nothing is left out."""
    import torch

    model = opened("shapes-vilt")
    asked = shapes.sample_question_batch(make_generator(78, "held-out"), 4)
    ids = torch.from_numpy(shapes.build_token_table()[0][asked.question])
    pictures = torch.from_numpy(shapes.render(asked.scenes)[0]).float() / 127.5 - 1

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pictures).logits

    torch.testing.assert_close(logits(), logits(), atol=1e-4, rtol=1e-4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = logits()
        torch.manual_seed(0)
        assert torch.equal(first, logits())


@pytest.mark.slow
def test_detr_finds_shapes_and_sees_the_object(detr_script: Any) -> None:
    import torch

    model, device = opened("shapes-detr"), torch.device("cpu")
    scenes = shapes.sample_scenes(make_generator(77, "held-out"), 80, 96)
    stated = clearhead_zoo.card("shapes-detr")["figures"]["AP at IoU 0.5"]
    assert stated >= 0.95
    found = detr_script.predict_detections(model, scenes, device)
    assert detr_script.compute_average_precision(scenes, found)[0] >= stated - 0.04
    first = np.zeros_like(scenes.present)
    first[:, 0] = True
    box, shape = detr_script.compute_true_boxes(scenes)[:, 0], scenes.shape[:, 0]
    gone = detr_script.find_detected(detr_script.predict_detections(model, scenes.remove_objects(first), device), box)
    alone = detr_script.find_detected(
        detr_script.predict_detections(model, scenes.remove_objects(~first), device), box, shape
    )
    assert gone.mean() < 0.05 and alone.mean() > 0.9
