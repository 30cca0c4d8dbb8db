"""Perturbation equals its slow replica, and every distinct altered input goes through the model once."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench import make_protocol
from clearhead.bench.chunk_explanations import explain_examples
from clearhead.bench.data import Example
from clearhead.bench.output_cache import OutputCache
from clearhead.bench.protocols.base import argsort_descending
from clearhead.bench.protocols.curves import compute_removed_counts
from clearhead.bench.protocols.perturbation import PerturbationProtocol
from clearhead.bench.protocols.perturbation_modalities import ImagePerturbation, RegionPerturbation, TextPerturbation
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.protocols.unit_removal import inpaint
from clearhead.errors import InputError
from clearhead.methods.base import Method
from tests import joint_models
from tests.bench.replicas import perturbation as replica
from tests.models import explainer, inputs

METHODS = [Method("saliency"), Method("input-x-gradient")]


def of_texts(kind: str = "bert/classify") -> tuple[Any, list[Example]]:
    return explainer(kind), [Example(str(i), text, i % 2) for i, text in enumerate(inputs(kind))]


def measured(
    ex: Any, examples: list[Example], how: PerturbationProtocol
) -> tuple[list[Any], OutputCache, dict[str, list[Any]]]:
    explanations = explain_examples(ex, examples, METHODS, how).by_method
    made, looks = how.measure_with_cache(ex, examples, explanations)
    return made, looks, explanations


@pytest.mark.parametrize("fill", ["delete", "mask", "pad", "attention", "pad+attention"])
def test_texts_equal_the_replica(fill: str) -> None:
    ex, examples = of_texts()
    how = TextPerturbation(
        fills=(fill,), judged="gold", fractions=(0.2, 0.5, 0.9, 1.0), directions=("positive", "negative")
    )
    made, _, explanations = measured(ex, examples, how)
    tokenizer = ex.adapter.processor
    tokens = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
    assert len(made) == len(examples) * 2 * len(METHODS)
    for one in made:
        place, direction = int(one.example), one.part.split("/")[2]
        ids = tokenizer(examples[place].input)["input_ids"]
        part = explanations[one.method][place]
        inner = [i for i in range(len(ids)) if ids[i] not in tokenizer.all_special_ids]
        counts = [int(fraction * len(inner)) for fraction in how.fractions]
        removed = replica.nested_removals([part.scores[i] for i in inner], counts, direction)
        logits = [
            replica.text_logits(ex.adapter.model, ids, {inner[i] for i in gone}, fill, tokens)
            for gone in [set(), *removed]
        ]
        expected = replica.figures(logits, how.fractions, examples[place].label)  # type: ignore[arg-type]
        correct = float(logits[0].index(max(logits[0])) == examples[place].label)
        assert one.figures == pytest.approx({**expected, "correct": correct}, abs=1e-9)
        assert one.curves["logit"] == pytest.approx([row[examples[place].label] for row in logits])  # type: ignore[index]


def of_pairs() -> tuple[Any, list[Example]]:
    """Two texts in one input have a separator in the middle, which is neither the first token nor the last."""
    pairs = [("so good", "I like it"), ("boring", "she hates the movie")]
    return explainer("bert/classify"), [Example(str(i), pair, i) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("given", [of_texts, of_pairs])
def test_interpretdl_pads_one_token_after_the_other_but_the_first_and_the_last(given: Any) -> None:
    ex, examples = given()
    made, _, explanations = measured(ex, examples, PROTOCOL_PRESETS["idl-text"])
    tokenizer = ex.adapter.processor
    assert len(made) == len(examples) * 2 * len(METHODS)
    for one in made:
        place, (stream, fill, direction) = int(one.example), one.part.split("/")
        text = examples[place].input
        encoded = tokenizer(*text) if isinstance(text, tuple) else tokenizer(text)
        ids, scores = list(encoded["input_ids"]), explanations[one.method][place].scores
        order = sorted(range(1, len(ids) - 1), key=lambda i, scores=scores: -scores[i])  # type: ignore[misc]
        probabilities = []
        for gone in [None, *(order if direction == "positive" else reversed(order))]:
            if gone is not None:
                ids[gone] = tokenizer.pad_token_id
            altered = {**encoded, "input_ids": ids}  # the attention mask is that of the whole text
            with torch.no_grad():
                logits = ex.adapter.model(**{name: torch.tensor([own]) for name, own in altered.items()}).logits[0]
            if gone is None:
                followed = int(logits.argmax())
            probabilities.append(float(logits.softmax(0)[followed]))
        assert one.curves["probability"] == pytest.approx(probabilities, abs=1e-9)
        assert one.figures["probability idl"] == pytest.approx(sum(probabilities) / len(probabilities), abs=1e-9)
        assert one.curves["fraction"] == pytest.approx([i / len(order) for i in range(len(order) + 1)])
        assert (stream, fill) == ("text", "pad")


def test_a_text_of_which_nothing_may_go_has_no_curve_of_single_steps() -> None:
    ex, _ = of_texts()
    with pytest.raises(InputError, match="no removable units"):
        measured(ex, [Example("x", "good")], TextPerturbation(fractions=(), fills=("pad",), protect=(9, 9)))


@pytest.mark.parametrize("ranked", ["pixel", "patch"])
def test_pictures_equal_the_replica(ranked: str) -> None:
    ex = explainer("vit/image")
    examples = [Example(str(i), picture) for i, picture in enumerate(inputs("vit/image")[:2])]
    how = ImagePerturbation(fills=("black",), ranked=ranked, fractions=(0.3, 0.7))
    made, _, explanations = measured(ex, examples, how)
    mean, std = ex.adapter.processor.image_mean, ex.adapter.processor.image_std
    assert len(made) == 2 * 2 * len(METHODS)
    for one in made:
        place, direction = int(one.example), one.part.split("/")[2]
        (sample,) = ex.adapter.make_samples(examples[place].input, _how())
        pixels = sample.inputs["pixel_values"].double().numpy()
        high, wide = pixels.shape[1:]
        heat = explanations[one.method][place].heat_map()
        if ranked == "pixel":
            flat = replica.bilinear(heat, (high, wide)).flatten()
            flat = np.round(flat / np.abs(flat).max(), 12)
        else:
            flat = heat.flatten()
        counts = [int(len(flat) * fraction) for fraction in how.fractions]
        masks = [np.zeros((high, wide), dtype=bool)]
        ties = argsort_descending(
            np.zeros(len(flat)), 0, one.example, "image"
        )  # a map scaled up is flat at its corners
        for gone in replica.nested_removals(flat.tolist(), counts, direction, ties.tolist()):
            mask = np.zeros(len(flat), dtype=bool)
            mask[list(gone)] = True
            side = high // heat.shape[0]
            grid = (
                mask.reshape(high, wide)
                if ranked == "pixel"
                else np.kron(mask.reshape(heat.shape), np.ones((side, side)))
            )
            masks.append(grid.astype(bool))
        logits = [
            replica.picture_logits(ex.adapter.model, pixels, mask, lambda channel: -mean[channel] / std[channel])
            for mask in masks
        ]
        judged = logits[0].index(max(logits[0]))
        expected = replica.figures(logits, how.fractions, judged)
        assert {name: one.figures[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def _how() -> Any:
    from clearhead.adapters.base import InputOptions

    return InputOptions()


def test_every_distinct_altered_input_goes_through_the_model_once() -> None:
    ex, examples = of_texts()
    how = TextPerturbation(fills=("delete", "mask"), fractions=(0.5, 1.0))
    explanations = explain_examples(ex, examples, METHODS, how).by_method
    seen: list[bytes] = []

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        seen.extend(row[kept.bool()].numpy().tobytes() for row, kept in zip(kwargs["input_ids"], mask, strict=True))

    handle = ex.adapter.model.register_forward_pre_hook(watch, with_kwargs=True)
    _, looks = how.measure_with_cache(ex, examples, explanations)
    handle.remove()
    assert len(seen) == len(set(seen)) == looks.num_forwarded
    # at 1.0 all methods and directions meet: one input for each fill and example
    assert looks.num_requested == 3 + 3 * 2 * 2 * 2 * 2 and looks.num_forwarded < looks.num_requested - 3 * 2 * 3


def test_figures_do_not_depend_on_what_is_measured_together() -> None:
    ex, examples = of_texts()
    how = TextPerturbation(fills=("mask",), fractions=(0.4, 0.8))
    together, _, explanations = measured(ex, examples, how)
    alone = [
        one
        for place, example in enumerate(examples)
        for one in how.measure(ex, [example], {name: [own[place]] for name, own in explanations.items()})
    ]
    by_key = {(one.example, one.method, one.part): one.figures for one in alone}
    assert len(by_key) == len(together)
    for one in together:
        assert one.figures == pytest.approx(by_key[one.example, one.method, one.part], abs=1e-9)


def test_special_tokens_stay_unless_the_authors_remove_them() -> None:
    ex, examples = of_texts()
    seen: list[list[int]] = []
    handle = ex.adapter.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    first, last = ex.adapter.processor.cls_token_id, ex.adapter.processor.sep_token_id
    measured(ex, examples[:1], TextPerturbation(fills=("mask",), fractions=(1.0,)))
    assert all(row[0] == first and row[-1] == last for row in seen)
    seen.clear()
    measured(ex, examples[:1], TextPerturbation(fills=("pad",), fractions=(1.0,), protect=False))
    assert any(set(row) == {ex.adapter.processor.pad_token_id} for row in seen)
    handle.remove()


def test_pads_compete_in_the_newsgroups_grid() -> None:
    """Positive: words go first; negative: the pads do, so that the first steps are free."""
    ex, examples = of_texts()
    made, _, explanations = measured(ex, examples[:1], PROTOCOL_PRESETS["bi-newsgroups"])
    length = len(next(iter(explanations.values()))[0])
    for one in made:
        moved = [value != one.curves["logit"][0] for value in one.curves["logit"]]
        if one.part.endswith("negative"):
            free = sum(
                count <= 512 - length
                for count in compute_removed_counts(PROTOCOL_PRESETS["bi-newsgroups"].fractions, 512)
            )
            zero = int((explanations[one.method][0].scores <= 0).sum())
            assert zero or not any(moved[: free + 1])
        else:
            assert moved[1]


def test_which_examples_and_which_class_are_part_of_the_protocol() -> None:
    ex, examples = of_texts()
    every = {
        name: TextPerturbation(fills=("mask",), fractions=(0.5,), examples=name) for name in ("all", "correct", "wrong")
    }
    found = {name: {one.example for one in measured(ex, examples, how)[0]} for name, how in every.items()}
    assert (
        found["correct"] | found["wrong"] == found["all"] == {"0", "1", "2"} and not found["correct"] & found["wrong"]
    )
    assert len({how.hash for how in every.values()}) == 3
    gold = TextPerturbation(explained="gold")
    assert [gold.select_target(example) for example in examples] == [0, 1, 0] and TextPerturbation().select_target(
        examples[0]
    ) is None
    assert TextPerturbation(explained=1).select_target(examples[0]) == 1
    with pytest.raises(InputError, match="no single true class"):
        gold.select_target(Example("x", "text"))
    with pytest.raises(InputError, match="class to explain"):
        TextPerturbation(explained="nine").select_target(Example("x", "text", target="positive"))
    with pytest.raises(InputError, match="judged='predicted'"):
        measured(ex, [Example("x", "so good")], TextPerturbation(judged="gold"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fills": ("noise",)}, "pad\\+attention"),
        ({"directions": ("up",)}, "negative"),
        ({"judged": "best"}, "explained"),
        ({"examples": "few"}, "wrong"),
        ({"fractions": (0.5, 0.2)}, "ascending"),
        ({"fractions": (0.0, 0.2)}, "clean input"),
        ({"of": "words"}, "removable"),
        ({"protect": (1, 2, 3)}, "two numbers"),
        ({"protect": (-1, 2)}, "two numbers"),
    ],
)
def test_settings_that_cannot_be_are_told(settings: dict[str, Any], said: str) -> None:
    ex, examples = of_texts()
    with pytest.raises(InputError, match=said):
        measured(ex, examples[:1], make_protocol("perturb-text", **settings))  # type: ignore[arg-type]


def test_a_picture_has_no_words_and_a_text_no_patches() -> None:
    ex, examples = of_texts()
    for how in (ImagePerturbation(), RegionPerturbation()):
        with pytest.raises(InputError, match="the streams are text"):
            measured(ex, examples[:1], how)


def test_a_model_that_measures_has_no_classes_to_follow() -> None:
    ex = explainer("bert/classify", num_labels=1)
    with pytest.raises(InputError, match="no classes"):
        measured(ex, [Example("x", "so good")], TextPerturbation())


def test_sufficiency_keeps_the_highest_scores() -> None:
    ex, examples = of_texts()
    how = TextPerturbation(fills=("delete",), fractions=(0.5,), directions=("keep", "negative"), rounding="removed")
    made, _, explanations = measured(ex, examples[:1], how)
    inner = len(explanations["saliency"][0].units.content_indices())
    if inner % 2 == 0:  # keeping the upper half is removing the lower half
        by_part = {(one.method, one.part.split("/")[2]): one.figures["aopc"] for one in made}
        for method in map(str, METHODS):
            assert by_part[method, "keep"] == pytest.approx(by_part[method, "negative"])
    assert not any("accuracy te" in one.figures for one in made if one.part.endswith("keep"))


def test_smaller_or_larger_is_better_by_figure_and_direction() -> None:
    how = TextPerturbation()
    assert how.is_smaller_better("accuracy te", "text/mask/positive") and not how.is_smaller_better(
        "accuracy te", "text/mask/negative"
    )
    assert not how.is_smaller_better("aopc", "text/mask/positive") and how.is_smaller_better("aopc", "text/mask/keep")
    assert how.is_smaller_better("log-odds", "text/mask/positive") and not how.is_smaller_better(
        "log-odds", "text/mask/negative"
    )


def test_inpainted_pixels_are_the_mean_of_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    picture, gone = rng.random((2, 7, 9)), rng.random((7, 9)) < 0.5
    filled = inpaint(picture, gone)
    assert np.array_equal(filled[:, ~gone], picture[:, ~gone])
    for row, column in zip(*np.nonzero(gone), strict=True):
        total, weights = np.zeros(2), 0.0
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                r, c = row + down, column + right
                if (down or right) and 0 <= r < 7 and 0 <= c < 9:
                    weight = 2 if 0 in (down, right) else 1
                    total += weight * filled[:, r, c]
                    weights += weight
        assert filled[:, row, column] == pytest.approx(total / weights)
    assert np.allclose(inpaint(picture, np.ones((7, 9), bool)), picture.mean((1, 2), keepdims=True))
    assert inpaint(picture, np.zeros((7, 9), bool)) is picture


def test_the_model_is_as_it_was() -> None:
    ex, examples = of_texts()
    before = {name: part.clone() for name, part in ex.adapter.model.state_dict().items()}
    attention = ex.adapter.model.config._attn_implementation
    measured(ex, examples, TextPerturbation())
    assert ex.adapter.model.config._attn_implementation == attention and not ex.adapter.model.training
    assert all(torch.equal(before[name], part) for name, part in ex.adapter.model.state_dict().items())


def test_regions_equal_the_replica() -> None:
    """LXMERT: features and boxes of what goes are deleted, one question at a time."""
    pytest.importorskip("clearhead_zoo")
    import clearhead
    from clearhead.bench.data import load_benchmark_dataset

    ex = clearhead.load("zoo:shapes-vqa")
    examples = list(load_benchmark_dataset("known", task="shapes-vqa", count=2))
    how = RegionPerturbation(judged="gold", fractions=(0.25, 0.75))
    explanations = explain_examples(ex, examples, METHODS[:1], how).by_method
    made = how.measure(ex, examples, explanations)
    assert len(made) == 4
    for one in made:
        place = [example.id for example in examples].index(one.example)
        example, scores = examples[place], explanations["saliency"][place]["regions"].scores
        features, boxes = example.input["regions"]
        kept_counts = [int((1 - fraction) * 8) for fraction in how.fractions]
        direction = one.part.split("/")[2]
        logits = []
        for gone in [set(), *replica.nested_removals(scores.tolist(), [8 - kept for kept in kept_counts], direction)]:
            kept = [i for i in range(8) if i not in gone]
            words = ex.adapter.tokenizer_wrapper.tokenizer(example.input["text"], return_tensors="pt")
            with torch.no_grad():
                output = ex.adapter.model(
                    input_ids=words["input_ids"],
                    attention_mask=words["attention_mask"],
                    visual_feats=torch.tensor(features[kept])[None],
                    visual_pos=torch.tensor(boxes[kept])[None],
                )
            logits.append(output.question_answering_score[0].tolist())
        expected = replica.figures(logits, how.fractions, example.label)  # type: ignore[arg-type]
        assert {name: one.figures[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def without_regions(fill: str, gone: set[int], inputs: dict[str, Any]) -> dict[str, Any]:
    features = inputs["visual_embeds"]
    seen = torch.ones(1, features.shape[1], dtype=torch.long)
    if fill == "delete":
        kept = [i for i in range(features.shape[1]) if i not in gone]
        return {**inputs, "visual_embeds": features[:, kept], "visual_attention_mask": seen[:, kept]}
    features, mean = features.clone(), features.mean(1)
    for place in gone:
        if fill == "mean":
            features[:, place] = mean
        else:
            seen[:, place] = 0
    return {**inputs, "visual_embeds": features, "visual_attention_mask": seen}


def without_words(fill: str, gone: set[int], inputs: dict[str, Any]) -> dict[str, Any]:
    kept = [i for i in range(inputs["input_ids"].shape[1]) if i not in gone]
    along = ("input_ids", "attention_mask", "token_type_ids")
    return {name: part[:, kept] if name in along else part for name, part in inputs.items()}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(
            ("visual_bert", RegionPerturbation(judged="gold", fractions=(0.25, 0.5), fills=(f,)))
            for f in ("delete", "attention")
        ),
        ("visual_bert", RegionPerturbation(judged="gold", fractions=(0.25, 0.5), fills=("mean",))),
        *(
            (name, TextPerturbation(judged="gold", stream="text", fractions=(0.5,), fills=("delete",)))
            for name in ("visual_bert", "vilt")
        ),
    ],
)
def test_one_sequence_equals_the_replica(name: str, how: Any) -> None:
    """Words and regions of models that read them as one sequence: what is left moves up."""
    ex = joint_models.explainer(name)
    examples = [Example(f"x{i}", given, i) for i, given in enumerate(joint_models.inputs(name))]
    stream = "text" if isinstance(how, TextPerturbation) else "regions"
    explanations = explain_examples(ex, examples, METHODS[:1], how).by_method
    made = how.measure(ex, examples, explanations)
    assert {one.example for one in made} == {"x0", "x1", "x2"}
    model, remove = ex.adapter.model, without_words if stream == "text" else without_regions
    for one in made:
        place = int(one.example[1:])
        e, given = explanations["saliency"][place][stream], joint_models.model_inputs(name, examples[place].input)
        movable = [i for i, special in enumerate(e.units.special) if not special]
        count = len(movable)
        counts = [int(f * count) if stream == "text" else count - int((1 - f) * count) for f in how.fractions]
        steps = replica.nested_removals([float(e.scores[i]) for i in movable], counts, one.part.split("/")[2])
        logits = []
        for gone in [set(), *steps]:
            with torch.no_grad():
                logits.append(model(**remove(how.fills[0], {movable[i] for i in gone}, given)).logits[0].tolist())
        assert one.curves["logit"] == pytest.approx([row[place] for row in logits], abs=1e-9)


def test_visualberts_question_keeps_its_last_two_tokens() -> None:
    """Removed are positions 1 … m−3: the question mark answers there, as CLS does elsewhere, and stays."""
    ex = joint_models.explainer("visual_bert")
    examples = [Example(f"x{i}", given, i) for i, given in enumerate(joint_models.inputs("visual_bert"))]
    how = PROTOCOL_PRESETS["visualbert-text"]
    explanations = explain_examples(ex, examples, METHODS[:1], how).by_method
    made = how.measure(ex, examples, explanations)
    assert len(made) == 2 * len(examples)
    for one in made:
        place = int(one.example[1:])
        scores = explanations["saliency"][place]["text"].scores
        given = joint_models.model_inputs("visual_bert", examples[place].input)
        m = given["input_ids"].shape[1]
        sign = -1.0 if one.part.endswith("positive") else 1.0
        expected = []
        for step in (0, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1):
            inner = list(range(1, m - 2))
            inner.sort(key=lambda i, scores=scores, sign=sign: -sign * scores[i])  # type: ignore[misc]
            kept = {0, m - 2, m - 1, *inner[: int((1 - step) * len(inner))]}
            with torch.no_grad():
                gone = set(range(m)) - kept
                expected.append(float(ex.adapter.model(**without_words("delete", gone, given)).logits[0, place]))
        assert one.part.split("/")[:2] == ["text", "delete"]
        assert one.curves["logit"] == pytest.approx(expected, abs=1e-9)
