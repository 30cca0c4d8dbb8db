"""Agreement, leave-one-out, subsets and classes equal what is computed one input at a time."""

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
from tests.bench.replicas.perturbation import bilinear, picture_logits, text_logits
from tests.models import explainer, inputs


def on_texts(how: BenchmarkProtocol) -> tuple[Any, list[Example], dict[str, list[Any]], list[Any]]:
    ex = explainer("bert/classify")
    examples = [Example(str(i), text, i % 2) for i, text in enumerate(inputs("bert/classify"))]
    explanations = explain_examples(ex, examples, add_controls(["saliency"]), how).by_method
    return ex, examples, explanations, list(how.measure(ex, examples, explanations))


def drop(ex: Any, text: str, removed: set[int]) -> float:
    tokenizer = ex.adapter.processor
    ids, tokens = tokenizer(text)["input_ids"], {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
    clean = text_logits(ex.adapter.model, ids, set(), "mask", tokens)
    explained_class = clean.index(max(clean))
    return clean[explained_class] - text_logits(ex.adapter.model, ids, removed, "mask", tokens)[explained_class]


def test_agreement_equals_the_replica_also_with_leave_one_out() -> None:
    ex, examples, explanations, made = on_texts(MethodAgreement(top=3))
    assert len(made) == 3 * 3 * 3  # examples × methods × the two others and leave-one-out
    for one in made:
        place, other = int(one.example), one.part.split("/")[1]
        part = explanations[one.method][place]
        kept = part.units.content_indices()
        a = [float(part.scores[i]) for i in kept]
        if other == "leave-one-out":
            b = [drop(ex, examples[place].input, {int(i)}) for i in kept]
        else:
            b = [float(explanations[other][place].scores[i]) for i in kept]
        assert one.figures["tau"] == pytest.approx(replica.tau_b(a, b), abs=1e-9)
        assert one.figures["rho"] == pytest.approx(replica.rho(a, b), abs=1e-9)
        first, second = (set(sorted(range(len(a)), key=lambda i, own=own: -own[i])[:3]) for own in (a, b))  # type: ignore[misc]
        if len(set(a)) == len(a) and len(set(b)) == len(b):
            assert one.figures["top 3"] == pytest.approx(len(first & second) / 3)
        assert one.figures["top 3 by chance"] == pytest.approx(3 / len(a))


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
def test_ties_at_the_last_place_agree_no_more_than_chance(a: list[int], b: list[int], top: int) -> None:
    """Broken the same way on both sides, they would make two flat maps agree wholly."""
    found = MethodAgreement(top=top).compute_rank_agreement(np.array(a, dtype=float), np.array(b, dtype=float))
    assert found[f"top {top}"] == pytest.approx(replica.in_common(a, b, min(top, 5)))
    if not any(a):
        assert found[f"top {top}"] == pytest.approx(found[f"top {top} by chance"])


def test_subsets_equal_the_replica() -> None:
    how = RandomSubsetSensitivity(shares=(0.25, 0.5), draws=4)
    ex, examples, explanations, made = on_texts(how)
    for one in made:
        place = int(one.example)
        part = explanations[one.method][place]
        masks = how.draw_subsets(part.units, one.example, "text")
        sums, drops = [], []
        for share, own in zip(how.shares, masks, strict=True):
            chosen = [{int(i) for i in np.flatnonzero(row)} for row in own]
            assert not any(part.units.special[i] for row in chosen for i in row)
            here = [sum(float(part.scores[i]) for i in row) for row in chosen]
            fell = [drop(ex, examples[place].input, row) for row in chosen]
            assert one.figures[f"sensitivity {share:g}"] == pytest.approx(replica.pearson(here, fell), abs=1e-6)
            sums += here
            drops += fell
        raw = sum((s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
        beta = sum(s * d for s, d in zip(sums, drops, strict=True)) / sum(s * s for s in sums)
        scaled = sum((beta * s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
        assert one.figures["infidelity"] == pytest.approx(raw) and one.figures["beta"] == pytest.approx(beta)
        assert one.figures["scaled infidelity"] == pytest.approx(scaled) and scaled <= raw + 1e-12


def test_subsets_are_those_of_the_example_for_every_method_and_run() -> None:
    ex, examples, explanations, made = on_texts(RandomSubsetSensitivity(draws=4))
    again = RandomSubsetSensitivity(draws=4).measure(ex, examples, explanations)
    assert [one.figures for one in again] == [one.figures for one in made]
    units = explanations["saliency"][0].units
    assert not np.array_equal(
        RandomSubsetSensitivity().draw_subsets(units, "0")[0],
        RandomSubsetSensitivity(seed=1).draw_subsets(units, "0")[0],
    )
    with pytest.raises(InputError, match="at least 3"):
        RandomSubsetSensitivity(draws=2).measure(ex, examples, explanations)
    for shares in ((), (0.1, 0.1)):
        with pytest.raises(InputError, match="none twice"):
            RandomSubsetSensitivity(shares=shares).measure(ex, examples, explanations)


def on_pictures(how: BenchmarkProtocol, count: int = 2) -> tuple[Any, list[Example], dict[str, list[Any]], list[Any]]:
    ex = explainer("vit/image")
    examples = [Example(str(i), picture) for i, picture in enumerate(inputs("vit/image")[:count])]
    explanations = explain_examples(ex, examples, add_controls(["saliency"]), how).by_method
    return ex, examples, explanations, list(how.measure(ex, examples, explanations))


def test_interpretdls_infidelity_equals_the_replica() -> None:
    """Grey squares at every stride-th pixel, as far as they lie inside; the map is scaled up bilinearly."""
    how = replace(PROTOCOL_PRESETS["idl-infidelity"], sides=(6, 8, 20), stride=5)
    ex, examples, explanations, made = on_pictures(how)
    assert len(made) == 2 * 3
    mean, std = ex.adapter.processor.image_mean, ex.adapter.processor.image_std
    for place, example in enumerate(examples):
        (sample,) = ex.adapter.make_samples(example.input, InputOptions())
        pixels = sample.inputs["pixel_values"].double().numpy()
        squares = replica.squares(16, 16, (6, 8, 20), 5)
        assert [len(own) for own in squares] == [9, 4, 0]  # the third does not fit

        def logits(inside: set[tuple[int, int]], pixels: Any = pixels) -> list[float]:
            gone = np.array([[(i, j) in inside for j in range(16)] for i in range(16)])
            grey = [(127 / 255 - own) / spread for own, spread in zip(mean, std, strict=True)]
            return picture_logits(ex.adapter.model, pixels, gone, lambda channel: grey[channel])

        clean = logits(set())
        top = clean.index(max(clean))
        drops = [clean[top] - logits(inside)[top] for own in squares for inside in own]
        for one in (one for one in made if one.example == example.id):
            large = bilinear(explanations[one.method][place].heat_map(), (16, 16))
            sums = [sum(large[i, j] for i, j in inside) / 16 for own in squares for inside in own]  # 4 × 4 pixels
            raw = sum((s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
            beta = sum(s * d for s, d in zip(sums, drops, strict=True)) / sum(s * s for s in sums)
            scaled = sum((beta * s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / len(sums)
            expected = {"infidelity": raw, "scaled infidelity": scaled, "beta": beta}
            expected |= {
                "sensitivity 6": replica.pearson(sums[:9], drops[:9]),
                "sensitivity 8": replica.pearson(sums[9:], drops[9:]),
            }
            assert one.figures == pytest.approx(expected, abs=1e-6)


def test_interpretdls_squares_are_those_of_its_code() -> None:
    how = PROTOCOL_PRESETS["idl-infidelity"]
    assert (how.sides, how.stride, how.fill) == ((32, 64, 128), 8, "grey")
    counts = [len(compute_square_starts(224, side, 8)) ** 2 for side in how.sides]
    assert counts == [25**2, 21**2, 13**2] == [len(own) for own in replica.squares(224, 224, how.sides, 8)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "16 × 16 pixels.*sides="),
        ({"sides": (4, 4)}, "none twice"),
        ({"sides": (0, 4)}, "at least 1"),
        ({"sides": (4,), "stride": 0}, "at least 1"),
    ],
)
def test_squares_that_cannot_be_are_told(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        on_pictures(replace(PROTOCOL_PRESETS["idl-infidelity"], **settings), 1)


def test_squares_are_for_pictures() -> None:
    with pytest.raises(InputError, match="the streams are text"):
        on_texts(PROTOCOL_PRESETS["idl-infidelity"])


def test_what_does_not_move_is_not_correlated() -> None:
    assert compute_pearson_correlation(np.ones(4), np.arange(4.0)) == 0
    assert compute_pearson_correlation(np.arange(4.0), 2 * np.arange(4.0) + 1) == pytest.approx(1)


def test_classes_compares_with_the_explanation_of_another_class() -> None:
    ex, examples, explanations, made = on_texts(ClassSensitivity())
    others = ex.explain(
        [example.input for example in examples],
        "saliency",
        [(example.label + 1) % len(ex.labels) for example in examples],
    )
    for one in (one for one in made if one.method == "saliency"):
        part, other = explanations["saliency"][int(one.example)], others[int(one.example)]
        kept = part.units.content_indices()
        assert one.figures["tau"] == pytest.approx(
            replica.tau_b(part.scores[kept].tolist(), other.scores[kept].tolist())
        )
    control = [one.figures["rho"] for one in made if one.method == "random"]
    assert control == pytest.approx([1.0] * 3)  # it explains nothing, so no class either
    second = ClassSensitivity(other="second").measure(ex, examples, explanations)
    assert len(second) == len(made)
    with pytest.raises(InputError, match="second"):
        ClassSensitivity(other="last").measure(ex, examples, explanations)


def test_nothing_is_left_behind() -> None:
    ex, examples, explanations, _ = on_texts(MethodAgreement())
    before = [part.clone() for part in ex.adapter.model.parameters()]
    MethodAgreement().measure(ex, examples, explanations)
    assert all(torch.equal(a, b) for a, b in zip(before, ex.adapter.model.parameters(), strict=True))
