"""Agreement, leave-one-out, subset and class protocols equal reference implementations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.adapters.base import InputOptions
from clearhead.bench.chunk_explanations import add_controls, explain_examples
from clearhead.bench.data import Example
from clearhead.bench.protocols.agreement import ClassSensitivity, MethodAgreement
from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.protocols.sensitivity import (
    RandomSubsetSensitivity,
    compute_pearson_correlation,
    compute_square_starts,
)
from clearhead.errors import InputError
from tests.bench.replicas import agreement as replica
from tests.bench.replicas.perturbation import bilinear, image_logits, text_logits
from tests.models import explainer, inputs


def measure_texts(protocol: BenchmarkProtocol) -> tuple[Any, list[Example], dict[str, list[Any]], list[Any]]:
    ex = explainer("bert/classify")
    examples = [Example(str(i), text, i % 2) for i, text in enumerate(inputs("bert/classify"))]
    explanations = explain_examples(ex, examples, add_controls(["saliency"]), protocol).by_method
    return ex, examples, explanations, list(protocol.measure(ex, examples, explanations))


def logit_drop(ex: Any, text: str, removed: set[int]) -> float:
    tokenizer = ex.adapter.processor
    ids, tokens = tokenizer(text)["input_ids"], {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
    clean = text_logits(ex.adapter.model, ids, set(), "mask", tokens)
    explained_class = clean.index(max(clean))
    return clean[explained_class] - text_logits(ex.adapter.model, ids, removed, "mask", tokens)[explained_class]


def test_agreement_and_leave_one_out_equal_reference() -> None:
    ex, examples, explanations, measurements = measure_texts(MethodAgreement(top=3))
    assert len(measurements) == 3 * 3 * 3  # examples × methods × the two others and leave-one-out
    for measurement in measurements:
        index, other = int(measurement.example), measurement.part.split("/")[1]
        explanation = explanations[measurement.method][index]
        kept = explanation.units.content_indices()
        a = [float(explanation.scores[i]) for i in kept]
        if other == "leave-one-out":
            b = [logit_drop(ex, examples[index].input, {int(i)}) for i in kept]
        else:
            b = [float(explanations[other][index].scores[i]) for i in kept]
        assert measurement.figures["tau"] == pytest.approx(replica.tau_b(a, b), abs=1e-9)
        assert measurement.figures["rho"] == pytest.approx(replica.rho(a, b), abs=1e-9)
        first, second = (set(sorted(range(len(a)), key=lambda i, values=values: -values[i])[:3]) for values in (a, b))  # type: ignore[misc]
        if len(set(a)) == len(a) and len(set(b)) == len(b):
            assert measurement.figures["top 3"] == pytest.approx(len(first & second) / 3)
        assert measurement.figures["top 3 by chance"] == pytest.approx(3 / len(a))


@pytest.mark.parametrize("top", [1, 2, 4, 5, 9])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], [5, 4, 3, 2, 1]),
        ([3, 1, 1, 1, 0], [1, 1, 2, 0, 0]),
        ([2, 2, 1, 1, 1], [1, 2, 2, 1, 1]),
    ],
)
def test_top_k_overlap_averages_over_ties(a: list[int], b: list[int], top: int) -> None:
    """If ties were broken the same way on both sides, two constant maps would agree completely."""
    agreement = MethodAgreement(top=top).compute_rank_agreement(np.array(a, dtype=float), np.array(b, dtype=float))
    assert agreement[f"top {top}"] == pytest.approx(replica.mean_top_overlap(a, b, min(top, 5)))
    if not any(a):
        assert agreement[f"top {top}"] == pytest.approx(agreement[f"top {top} by chance"])


def test_random_subset_sensitivity_equals_reference() -> None:
    protocol = RandomSubsetSensitivity(shares=(0.25, 0.5), draws=4)
    ex, examples, explanations, measurements = measure_texts(protocol)
    for measurement in measurements:
        index = int(measurement.example)
        explanation = explanations[measurement.method][index]
        masks = protocol.draw_subsets(explanation.units, measurement.example, "text")
        sums, drops = [], []
        for share, share_masks in zip(protocol.shares, masks, strict=True):
            subsets = [{int(i) for i in np.flatnonzero(row)} for row in share_masks]
            assert not any(explanation.units.special[i] for row in subsets for i in row)
            subset_sums = [sum(float(explanation.scores[i]) for i in row) for row in subsets]
            subset_drops = [logit_drop(ex, examples[index].input, row) for row in subsets]
            assert measurement.figures[f"sensitivity {share:g}"] == pytest.approx(
                replica.pearson(subset_sums, subset_drops), abs=1e-6
            )
            sums += subset_sums
            drops += subset_drops
        raw = sum((s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
        beta = sum(s * d for s, d in zip(sums, drops, strict=True)) / sum(s * s for s in sums)
        scaled = sum((beta * s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
        assert measurement.figures["infidelity"] == pytest.approx(raw) and measurement.figures["beta"] == pytest.approx(
            beta
        )
        assert measurement.figures["scaled infidelity"] == pytest.approx(scaled) and scaled <= raw + 1e-12


def test_random_subsets_depend_only_on_example_and_seed() -> None:
    ex, examples, explanations, measurements = measure_texts(RandomSubsetSensitivity(draws=4))
    repeated = RandomSubsetSensitivity(draws=4).measure(ex, examples, explanations)
    assert [measurement.figures for measurement in repeated] == [measurement.figures for measurement in measurements]
    units = explanations["saliency"][0].units
    assert not np.array_equal(
        RandomSubsetSensitivity().draw_subsets(units, "0")[0],
        RandomSubsetSensitivity(seed=1).draw_subsets(units, "0")[0],
    )
    with pytest.raises(InputError, match="at least 3"):
        RandomSubsetSensitivity(draws=2).measure(ex, examples, explanations)
    for shares in ((), (0.1, 0.1)):
        with pytest.raises(InputError, match="without duplicates"):
            RandomSubsetSensitivity(shares=shares).measure(ex, examples, explanations)


def measure_images(
    protocol: BenchmarkProtocol, count: int = 2
) -> tuple[Any, list[Example], dict[str, list[Any]], list[Any]]:
    ex = explainer("vit/image")
    examples = [Example(str(i), image) for i, image in enumerate(inputs("vit/image")[:count])]
    explanations = explain_examples(ex, examples, add_controls(["saliency"]), protocol).by_method
    return ex, examples, explanations, list(protocol.measure(ex, examples, explanations))


def test_interpretdl_infidelity_equals_reference() -> None:
    """Grey squares at every stride-th pixel that lie inside the image; the map is upscaled bilinearly."""
    protocol = replace(PROTOCOL_PRESETS["idl-infidelity"], sides=(6, 8, 20), stride=5)
    ex, examples, explanations, measurements = measure_images(protocol)
    assert len(measurements) == 2 * 3
    mean, std = ex.adapter.processor.image_mean, ex.adapter.processor.image_std
    for index, example in enumerate(examples):
        (sample,) = ex.adapter.make_samples(example.input, InputOptions())
        pixels = sample.inputs["pixel_values"].double().numpy()
        squares = replica.squares(16, 16, (6, 8, 20), 5)
        assert [len(side_squares) for side_squares in squares] == [9, 4, 0]  # the third does not fit

        def logits(inside: set[tuple[int, int]], pixels: Any = pixels) -> list[float]:
            removed = np.array([[(i, j) in inside for j in range(16)] for i in range(16)])
            grey = [(127 / 255 - centre) / spread for centre, spread in zip(mean, std, strict=True)]
            return image_logits(ex.adapter.model, pixels, removed, lambda channel: grey[channel])

        clean = logits(set())
        top = clean.index(max(clean))
        drops = [clean[top] - logits(inside)[top] for side_squares in squares for inside in side_squares]
        for measurement in (measurement for measurement in measurements if measurement.example == example.id):
            upscaled = bilinear(explanations[measurement.method][index].heat_map(), (16, 16))
            sums = [
                sum(upscaled[i, j] for i, j in inside) / 16 for side_squares in squares for inside in side_squares
            ]  # 4 × 4 pixels
            raw = sum((s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
            beta = sum(s * d for s, d in zip(sums, drops, strict=True)) / sum(s * s for s in sums)
            scaled = sum((beta * s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
            expected = {"infidelity": raw, "scaled infidelity": scaled, "beta": beta}
            expected |= {
                "sensitivity 6": replica.pearson(sums[:9], drops[:9]),
                "sensitivity 8": replica.pearson(sums[9:], drops[9:]),
            }
            assert measurement.figures == pytest.approx(expected, abs=1e-6)


def test_interpretdl_preset_has_original_squares() -> None:
    protocol = PROTOCOL_PRESETS["idl-infidelity"]
    assert (protocol.sides, protocol.stride, protocol.fill) == ((32, 64, 128), 8, "grey")
    counts = [len(compute_square_starts(224, side, 8)) ** 2 for side in protocol.sides]
    assert (
        counts
        == [25**2, 21**2, 13**2]
        == [len(side_squares) for side_squares in replica.squares(224, 224, protocol.sides, 8)]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "16 × 16 pixels.*sides="),
        ({"sides": (4, 4)}, "without duplicates"),
        ({"sides": (0, 4)}, "at least 1"),
        ({"sides": (4,), "stride": 0}, "at least 1"),
    ],
)
def test_invalid_squares_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_images(replace(PROTOCOL_PRESETS["idl-infidelity"], **settings), 1)


def test_squares_on_text_raise() -> None:
    with pytest.raises(InputError, match="the streams are text"):
        measure_texts(PROTOCOL_PRESETS["idl-infidelity"])


def test_pearson_correlation_of_constant_is_zero() -> None:
    assert compute_pearson_correlation(np.ones(4), np.arange(4.0)) == 0
    assert compute_pearson_correlation(np.arange(4.0), 2 * np.arange(4.0) + 1) == pytest.approx(1)


def test_class_sensitivity_compares_with_explanation_of_other_class() -> None:
    ex, examples, explanations, measurements = measure_texts(ClassSensitivity())
    others = ex.explain(
        [example.input for example in examples],
        "saliency",
        [(example.label + 1) % len(ex.labels) for example in examples],
    )
    for measurement in (measurement for measurement in measurements if measurement.method == "saliency"):
        explanation, other = explanations["saliency"][int(measurement.example)], others[int(measurement.example)]
        kept = explanation.units.content_indices()
        assert measurement.figures["tau"] == pytest.approx(
            replica.tau_b(explanation.scores[kept].tolist(), other.scores[kept].tolist())
        )
    control = [measurement.figures["rho"] for measurement in measurements if measurement.method == "random"]
    assert control == pytest.approx([1.0] * 3)  # random scores do not depend on the class
    second = ClassSensitivity(other="second").measure(ex, examples, explanations)
    assert len(second) == len(measurements)
    with pytest.raises(InputError, match="second"):
        ClassSensitivity(other="last").measure(ex, examples, explanations)


def test_agreement_leaves_model_unchanged() -> None:
    ex, examples, explanations, _ = measure_texts(MethodAgreement())
    before = [parameter.clone() for parameter in ex.adapter.model.parameters()]
    MethodAgreement().measure(ex, examples, explanations)
    assert all(torch.equal(a, b) for a, b in zip(before, ex.adapter.model.parameters(), strict=True))
