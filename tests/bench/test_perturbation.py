"""Perturbation protocols equal reference implementations, and run each distinct altered input once."""

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


def text_examples(kind: str = "bert/classify") -> tuple[Any, list[Example]]:
    return explainer(kind), [Example(str(i), text, i % 2) for i, text in enumerate(inputs(kind))]


def measure_with_cache(
    ex: Any, examples: list[Example], protocol: PerturbationProtocol
) -> tuple[list[Any], OutputCache, dict[str, list[Any]]]:
    explanations = explain_examples(ex, examples, METHODS, protocol).by_method
    measurements, cache = protocol.measure_with_cache(ex, examples, explanations)
    return measurements, cache, explanations


@pytest.mark.parametrize("fill", ["delete", "mask", "pad", "attention", "pad+attention"])
def test_text_perturbation_equals_reference(fill: str) -> None:
    ex, examples = text_examples()
    protocol = TextPerturbation(
        fills=(fill,), judged="gold", fractions=(0.2, 0.5, 0.9, 1.0), directions=("positive", "negative")
    )
    measurements, _, explanations = measure_with_cache(ex, examples, protocol)
    tokenizer = ex.adapter.processor
    tokens = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
    assert len(measurements) == len(examples) * 2 * len(METHODS)
    for measurement in measurements:
        index, direction = int(measurement.example), measurement.part.split("/")[2]
        ids = tokenizer(examples[index].input)["input_ids"]
        explanation = explanations[measurement.method][index]
        inner = [i for i in range(len(ids)) if ids[i] not in tokenizer.all_special_ids]
        counts = [int(fraction * len(inner)) for fraction in protocol.fractions]
        removed = replica.nested_removals([explanation.scores[i] for i in inner], counts, direction)
        logits = [
            replica.text_logits(ex.adapter.model, ids, {inner[i] for i in step}, fill, tokens)
            for step in [set(), *removed]
        ]
        expected = replica.figures(logits, protocol.fractions, examples[index].label)  # type: ignore[arg-type]
        correct = float(logits[0].index(max(logits[0])) == examples[index].label)
        assert measurement.figures == pytest.approx({**expected, "correct": correct}, abs=1e-9)
        assert measurement.curves["logit"] == pytest.approx([row[examples[index].label] for row in logits])  # type: ignore[index]


def pair_examples() -> tuple[Any, list[Example]]:
    """Text pairs: their middle separator is neither the first token nor the last."""
    pairs = [("so good", "I like it"), ("boring", "she hates the movie")]
    return explainer("bert/classify"), [Example(str(i), pair, i) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("make_examples", [text_examples, pair_examples])
def test_interpretdl_text_preset_pads_inner_tokens_one_by_one(make_examples: Any) -> None:
    ex, examples = make_examples()
    measurements, _, explanations = measure_with_cache(ex, examples, PROTOCOL_PRESETS["idl-text"])
    tokenizer = ex.adapter.processor
    assert len(measurements) == len(examples) * 2 * len(METHODS)
    for measurement in measurements:
        index, (stream, fill, direction) = int(measurement.example), measurement.part.split("/")
        text = examples[index].input
        encoded = tokenizer(*text) if isinstance(text, tuple) else tokenizer(text)
        ids, scores = list(encoded["input_ids"]), explanations[measurement.method][index].scores
        order = sorted(range(1, len(ids) - 1), key=lambda i, scores=scores: -scores[i])  # type: ignore[misc]
        probabilities = []
        for removed in [None, *(order if direction == "positive" else reversed(order))]:
            if removed is not None:
                ids[removed] = tokenizer.pad_token_id
            altered = {**encoded, "input_ids": ids}  # the attention mask is that of the full text
            with torch.no_grad():
                logits = ex.adapter.model(**{name: torch.tensor([value]) for name, value in altered.items()}).logits[0]
            if removed is None:
                label = int(logits.argmax())
            probabilities.append(float(logits.softmax(0)[label]))
        assert measurement.curves["probability"] == pytest.approx(probabilities, abs=1e-9)
        assert measurement.figures["probability idl"] == pytest.approx(
            sum(probabilities) / len(probabilities), abs=1e-9
        )
        assert measurement.curves["fraction"] == pytest.approx([i / len(order) for i in range(len(order) + 1)])
        assert (stream, fill) == ("text", "pad")


def test_text_without_removable_units_raises() -> None:
    ex, _ = text_examples()
    with pytest.raises(InputError, match="no removable units"):
        measure_with_cache(ex, [Example("x", "good")], TextPerturbation(fractions=(), fills=("pad",), protect=(9, 9)))


@pytest.mark.parametrize("ranked", ["pixel", "patch"])
def test_image_perturbation_equals_reference(ranked: str) -> None:
    ex = explainer("vit/image")
    examples = [Example(str(i), image) for i, image in enumerate(inputs("vit/image")[:2])]
    protocol = ImagePerturbation(fills=("black",), ranked=ranked, fractions=(0.3, 0.7))
    measurements, _, explanations = measure_with_cache(ex, examples, protocol)
    mean, std = ex.adapter.processor.image_mean, ex.adapter.processor.image_std
    assert len(measurements) == 2 * 2 * len(METHODS)
    for measurement in measurements:
        index, direction = int(measurement.example), measurement.part.split("/")[2]
        (sample,) = ex.adapter.make_samples(examples[index].input, _input_options())
        pixels = sample.inputs["pixel_values"].double().numpy()
        height, width = pixels.shape[1:]
        heat = explanations[measurement.method][index].heat_map()
        if ranked == "pixel":
            flat = replica.bilinear(heat, (height, width)).flatten()
            flat = np.round(flat / np.abs(flat).max(), 12)
        else:
            flat = heat.flatten()
        counts = [int(len(flat) * fraction) for fraction in protocol.fractions]
        masks = [np.zeros((height, width), dtype=bool)]
        ties = argsort_descending(
            np.zeros(len(flat)), 0, measurement.example, "image"
        )  # an upscaled map is constant at its corners
        for removed in replica.nested_removals(flat.tolist(), counts, direction, ties.tolist()):
            mask = np.zeros(len(flat), dtype=bool)
            mask[list(removed)] = True
            side = height // heat.shape[0]
            grid = (
                mask.reshape(height, width)
                if ranked == "pixel"
                else np.kron(mask.reshape(heat.shape), np.ones((side, side)))
            )
            masks.append(grid.astype(bool))
        logits = [
            replica.image_logits(ex.adapter.model, pixels, mask, lambda channel: -mean[channel] / std[channel])
            for mask in masks
        ]
        judged = logits[0].index(max(logits[0]))
        expected = replica.figures(logits, protocol.fractions, judged)
        assert {name: measurement.figures[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def _input_options() -> Any:
    from clearhead.adapters.base import InputOptions

    return InputOptions()


def test_each_distinct_altered_text_runs_once() -> None:
    ex, examples = text_examples()
    protocol = TextPerturbation(fills=("delete", "mask"), fractions=(0.5, 1.0))
    explanations = explain_examples(ex, examples, METHODS, protocol).by_method
    forwarded: list[bytes] = []

    def record_inputs(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        forwarded.extend(
            row[kept.bool()].numpy().tobytes() for row, kept in zip(kwargs["input_ids"], mask, strict=True)
        )

    handle = ex.adapter.model.register_forward_pre_hook(record_inputs, with_kwargs=True)
    _, cache = protocol.measure_with_cache(ex, examples, explanations)
    handle.remove()
    assert len(forwarded) == len(set(forwarded)) == cache.num_forwarded
    # at 1.0 all methods and directions are equal: one input for each fill and example
    assert cache.num_requested == 3 + 3 * 2 * 2 * 2 * 2 and cache.num_forwarded < cache.num_requested - 3 * 2 * 3


def test_metrics_do_not_depend_on_batched_examples() -> None:
    ex, examples = text_examples()
    protocol = TextPerturbation(fills=("mask",), fractions=(0.4, 0.8))
    batched, _, explanations = measure_with_cache(ex, examples, protocol)
    single = [
        measurement
        for index, example in enumerate(examples)
        for measurement in protocol.measure(
            ex, [example], {name: [explained[index]] for name, explained in explanations.items()}
        )
    ]
    by_key = {
        (measurement.example, measurement.method, measurement.part): measurement.figures for measurement in single
    }
    assert len(by_key) == len(batched)
    for measurement in batched:
        assert measurement.figures == pytest.approx(
            by_key[measurement.example, measurement.method, measurement.part], abs=1e-9
        )


def test_special_tokens_are_kept_unless_protect_is_false() -> None:
    ex, examples = text_examples()
    forwarded: list[list[int]] = []
    handle = ex.adapter.model.register_forward_pre_hook(
        lambda module, args, kwargs: forwarded.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    first, last = ex.adapter.processor.cls_token_id, ex.adapter.processor.sep_token_id
    measure_with_cache(ex, examples[:1], TextPerturbation(fills=("mask",), fractions=(1.0,)))
    assert all(row[0] == first and row[-1] == last for row in forwarded)
    forwarded.clear()
    measure_with_cache(ex, examples[:1], TextPerturbation(fills=("pad",), fractions=(1.0,), protect=False))
    assert any(set(row) == {ex.adapter.processor.pad_token_id} for row in forwarded)
    handle.remove()


def test_newsgroups_preset_ranks_pads_with_tokens() -> None:
    """Positive: tokens are removed first; negative: pads are, so the first steps change nothing."""
    ex, examples = text_examples()
    measurements, _, explanations = measure_with_cache(ex, examples[:1], PROTOCOL_PRESETS["bi-newsgroups"])
    length = len(next(iter(explanations.values()))[0])
    for measurement in measurements:
        changed = [value != measurement.curves["logit"][0] for value in measurement.curves["logit"]]
        if measurement.part.endswith("negative"):
            num_pads_only = sum(
                count <= 512 - length
                for count in compute_removed_counts(PROTOCOL_PRESETS["bi-newsgroups"].fractions, 512)
            )
            has_non_positive = int((explanations[measurement.method][0].scores <= 0).sum())
            assert has_non_positive or not any(changed[: num_pads_only + 1])
        else:
            assert changed[1]


def test_protocol_selects_examples_and_explained_class() -> None:
    ex, examples = text_examples()
    protocols = {
        name: TextPerturbation(fills=("mask",), fractions=(0.5,), examples=name) for name in ("all", "correct", "wrong")
    }
    measured_ids = {
        name: {measurement.example for measurement in measure_with_cache(ex, examples, protocol)[0]}
        for name, protocol in protocols.items()
    }
    assert (
        measured_ids["correct"] | measured_ids["wrong"] == measured_ids["all"] == {"0", "1", "2"}
        and not measured_ids["correct"] & measured_ids["wrong"]
    )
    assert len({protocol.hash for protocol in protocols.values()}) == 3
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
        measure_with_cache(ex, [Example("x", "so good")], TextPerturbation(judged="gold"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fills": ("noise",)}, "pad\\+attention"),
        ({"directions": ("up",)}, "negative"),
        ({"judged": "best"}, "explained"),
        ({"examples": "few"}, "wrong"),
        ({"fractions": (0.5, 0.2)}, "ascending"),
        ({"fractions": (0.0, 0.2)}, "clean input"),
        ({"of": "words"}, "removable"),
        ({"protect": (1, 2, 3)}, "number of tokens to protect"),
        ({"protect": (-1, 2)}, "number of tokens to protect"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    ex, examples = text_examples()
    with pytest.raises(InputError, match=message):
        measure_with_cache(ex, examples[:1], make_protocol("perturb-text", **settings))  # type: ignore[arg-type]


def test_image_and_region_protocols_on_text_raise() -> None:
    ex, examples = text_examples()
    for protocol in (ImagePerturbation(), RegionPerturbation()):
        with pytest.raises(InputError, match="the streams are text"):
            measure_with_cache(ex, examples[:1], protocol)


def test_regression_model_raises() -> None:
    ex = explainer("bert/classify", num_labels=1)
    with pytest.raises(InputError, match="no classes"):
        measure_with_cache(ex, [Example("x", "so good")], TextPerturbation())


def test_keep_direction_keeps_the_highest_scores() -> None:
    ex, examples = text_examples()
    protocol = TextPerturbation(
        fills=("delete",), fractions=(0.5,), directions=("keep", "negative"), rounding="removed"
    )
    measurements, _, explanations = measure_with_cache(ex, examples[:1], protocol)
    inner = len(explanations["saliency"][0].units.content_indices())
    if inner % 2 == 0:  # keeping the upper half removes the lower half
        by_part = {
            (measurement.method, measurement.part.split("/")[2]): measurement.figures["aopc"]
            for measurement in measurements
        }
        for method in map(str, METHODS):
            assert by_part[method, "keep"] == pytest.approx(by_part[method, "negative"])
    assert not any(
        "accuracy te" in measurement.figures for measurement in measurements if measurement.part.endswith("keep")
    )


def test_is_smaller_better_depends_on_metric_and_direction() -> None:
    protocol = TextPerturbation()
    assert protocol.is_smaller_better("accuracy te", "text/mask/positive") and not protocol.is_smaller_better(
        "accuracy te", "text/mask/negative"
    )
    assert not protocol.is_smaller_better("aopc", "text/mask/positive") and protocol.is_smaller_better(
        "aopc", "text/mask/keep"
    )
    assert protocol.is_smaller_better("log-odds", "text/mask/positive") and not protocol.is_smaller_better(
        "log-odds", "text/mask/negative"
    )


def test_inpainted_pixels_are_weighted_means_of_neighbours() -> None:
    rng = np.random.default_rng(0)
    image, removed = rng.random((2, 7, 9)), rng.random((7, 9)) < 0.5
    filled = inpaint(image, removed)
    assert np.array_equal(filled[:, ~removed], image[:, ~removed])
    for row, column in zip(*np.nonzero(removed), strict=True):
        total, weights = np.zeros(2), 0.0
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                r, c = row + down, column + right
                if (down or right) and 0 <= r < 7 and 0 <= c < 9:
                    weight = 2 if 0 in (down, right) else 1
                    total += weight * filled[:, r, c]
                    weights += weight
        assert filled[:, row, column] == pytest.approx(total / weights)
    assert np.allclose(inpaint(image, np.ones((7, 9), bool)), image.mean((1, 2), keepdims=True))
    assert inpaint(image, np.zeros((7, 9), bool)) is image


def test_perturbation_leaves_model_unchanged() -> None:
    ex, examples = text_examples()
    before = {name: tensor.clone() for name, tensor in ex.adapter.model.state_dict().items()}
    attention = ex.adapter.model.config._attn_implementation
    measure_with_cache(ex, examples, TextPerturbation())
    assert ex.adapter.model.config._attn_implementation == attention and not ex.adapter.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in ex.adapter.model.state_dict().items())


def test_region_perturbation_equals_reference() -> None:
    """LXMERT: features and boxes of removed regions are deleted, one question at a time."""
    pytest.importorskip("clearhead_zoo")
    import clearhead
    from clearhead.bench.data import load_benchmark_dataset

    ex = clearhead.load("zoo:shapes-vqa")
    examples = list(load_benchmark_dataset("known", task="shapes-vqa", count=2))
    protocol = RegionPerturbation(judged="gold", fractions=(0.25, 0.75))
    explanations = explain_examples(ex, examples, METHODS[:1], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    assert len(measurements) == 4
    for measurement in measurements:
        index = [example.id for example in examples].index(measurement.example)
        example, scores = examples[index], explanations["saliency"][index]["regions"].scores
        features, boxes = example.input["regions"]
        kept_counts = [int((1 - fraction) * 8) for fraction in protocol.fractions]
        direction = measurement.part.split("/")[2]
        logits = []
        for removed in [
            set(),
            *replica.nested_removals(scores.tolist(), [8 - kept for kept in kept_counts], direction),
        ]:
            kept = [i for i in range(8) if i not in removed]
            tokens = ex.adapter.tokenizer_wrapper.tokenizer(example.input["text"], return_tensors="pt")
            with torch.no_grad():
                output = ex.adapter.model(
                    input_ids=tokens["input_ids"],
                    attention_mask=tokens["attention_mask"],
                    visual_feats=torch.tensor(features[kept])[None],
                    visual_pos=torch.tensor(boxes[kept])[None],
                )
            logits.append(output.question_answering_score[0].tolist())
        expected = replica.figures(logits, protocol.fractions, example.label)  # type: ignore[arg-type]
        assert {name: measurement.figures[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def without_regions(fill: str, removed: set[int], inputs: dict[str, Any]) -> dict[str, Any]:
    features = inputs["visual_embeds"]
    mask = torch.ones(1, features.shape[1], dtype=torch.long)
    if fill == "delete":
        kept = [i for i in range(features.shape[1]) if i not in removed]
        return {**inputs, "visual_embeds": features[:, kept], "visual_attention_mask": mask[:, kept]}
    features, mean = features.clone(), features.mean(1)
    for index in removed:
        if fill == "mean":
            features[:, index] = mean
        else:
            mask[:, index] = 0
    return {**inputs, "visual_embeds": features, "visual_attention_mask": mask}


def without_tokens(fill: str, removed: set[int], inputs: dict[str, Any]) -> dict[str, Any]:
    kept = [i for i in range(inputs["input_ids"].shape[1]) if i not in removed]
    token_inputs = ("input_ids", "attention_mask", "token_type_ids")
    return {name: tensor[:, kept] if name in token_inputs else tensor for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    ("name", "protocol"),
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
def test_joint_sequence_perturbation_equals_reference(name: str, protocol: Any) -> None:
    """Joint-sequence models: after removal of tokens or regions the rest moves up."""
    ex = joint_models.explainer(name)
    examples = [Example(f"x{i}", model_inputs, i) for i, model_inputs in enumerate(joint_models.inputs(name))]
    stream = "text" if isinstance(protocol, TextPerturbation) else "regions"
    explanations = explain_examples(ex, examples, METHODS[:1], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    assert {measurement.example for measurement in measurements} == {"x0", "x1", "x2"}
    model, remove = ex.adapter.model, without_tokens if stream == "text" else without_regions
    for measurement in measurements:
        index = int(measurement.example[1:])
        explanation, model_inputs = (
            explanations["saliency"][index][stream],
            joint_models.model_inputs(name, examples[index].input),
        )
        movable = [i for i, special in enumerate(explanation.units.special) if not special]
        count = len(movable)
        counts = [int(f * count) if stream == "text" else count - int((1 - f) * count) for f in protocol.fractions]
        steps = replica.nested_removals(
            [float(explanation.scores[i]) for i in movable], counts, measurement.part.split("/")[2]
        )
        logits = []
        for removed in [set(), *steps]:
            with torch.no_grad():
                logits.append(
                    model(**remove(protocol.fills[0], {movable[i] for i in removed}, model_inputs)).logits[0].tolist()
                )
        assert measurement.curves["logit"] == pytest.approx([row[index] for row in logits], abs=1e-9)


def test_visualbert_preset_keeps_last_two_question_tokens() -> None:
    """Positions 1 … m−3 are removed: the question mark is the read-out position, like CLS elsewhere, and is kept."""
    ex = joint_models.explainer("visual_bert")
    examples = [Example(f"x{i}", model_inputs, i) for i, model_inputs in enumerate(joint_models.inputs("visual_bert"))]
    protocol = PROTOCOL_PRESETS["visualbert-text"]
    explanations = explain_examples(ex, examples, METHODS[:1], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    assert len(measurements) == 2 * len(examples)
    for measurement in measurements:
        index = int(measurement.example[1:])
        scores = explanations["saliency"][index]["text"].scores
        model_inputs = joint_models.model_inputs("visual_bert", examples[index].input)
        m = model_inputs["input_ids"].shape[1]
        sign = -1.0 if measurement.part.endswith("positive") else 1.0
        expected = []
        for step in (0, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1):
            inner = list(range(1, m - 2))
            inner.sort(key=lambda i, scores=scores, sign=sign: -sign * scores[i])  # type: ignore[misc]
            kept = {0, m - 2, m - 1, *inner[: int((1 - step) * len(inner))]}
            with torch.no_grad():
                removed = set(range(m)) - kept
                expected.append(
                    float(ex.adapter.model(**without_tokens("delete", removed, model_inputs)).logits[0, index])
                )
        assert measurement.part.split("/")[:2] == ["text", "delete"]
        assert measurement.curves["logit"] == pytest.approx(expected, abs=1e-9)
