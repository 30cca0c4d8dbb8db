"""Rationale metrics equal reference implementations; word pieces map to words by characters."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.bench.data import CharSpan, Example
from clearhead.bench.protocols.rationales import (
    RationaleAgreement,
    compute_curve_areas,
    compute_iou_f1,
    compute_word_scores,
    find_words,
)
from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units
from tests.bench.replicas import rationales as replica
from tests.models import explainer

TEXT = "one two three four five six seven eight nine ten"
WORDS = TEXT.split()


def explanation(scores: Any, cut_at: int | None = None) -> Explanation:
    """Units are half words between special tokens; words from index `cut_at` on are truncated."""
    names, offsets, start = ["[CLS]"], [(0, 0)], 0
    for word in WORDS[:cut_at]:
        half = len(word) // 2
        names += [word[:half], "##" + word[half:]]
        offsets += [(start, start + half), (start + half, start + len(word))]
        start += len(word) + 1
    names, offsets = [*names, "[SEP]"], [*offsets, (0, 0)]
    special = tuple(name.startswith("[") for name in names)
    units = Units("text", "token", tuple(names), special, (TEXT,), (0,) * len(names), tuple(offsets))
    half_word_scores = [value for score in scores[:cut_at] for value in (score, score - 0.5)]
    return Explanation(units, np.array([99.0, *half_word_scores, 98.0]), "m", {}, {})


def example_with_spans(*spans: tuple[int, int]) -> Example:
    starts = [TEXT.index(word) for word in WORDS]
    evidence = tuple(CharSpan(starts[a], starts[b - 1] + len(WORDS[b - 1])) for a, b in spans)
    return Example("x", TEXT, 0, (evidence,))


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(1, 11)), st.sampled_from([((2, 4),), ((0, 1), (6, 9)), ((8, 10),)]), st.booleans())
def test_rationale_metrics_equal_reference(order: list[int], spans: Any, cut_off: bool) -> None:
    stop = 7 if cut_off else None
    protocol = RationaleAgreement(counts=(1, 3, 5))
    (measurement,) = protocol.measure(None, [example_with_spans(*spans)], {"m": [explanation(order, stop)]})  # type: ignore[arg-type]
    gold = {word for a, b in spans for word in range(a, b)}
    ranked = sorted(range(len(WORDS[:stop])), key=lambda word: -order[word])
    for count in protocol.counts:
        chosen = set(ranked[:count])
        assert measurement.figures[f"token f1 @{count}"] == pytest.approx(replica.token_f1(chosen, gold))
        expected = replica.iou_f1(replica.runs(chosen), [set(range(a, b)) for a, b in spans])
        assert measurement.figures[f"iou f1 @{count}"] == pytest.approx(expected)
    scores = [float(order[word]) if word < len(ranked) else -1.0 for word in range(10)]
    auprc, average = replica.areas(scores, gold)
    assert measurement.figures["auprc"] == pytest.approx(auprc) and measurement.figures[
        "average precision"
    ] == pytest.approx(average)


def test_spans_setting_selects_runs_or_single_words() -> None:
    order = [10, 9, 8, 1, 2, 3, 4, 5, 6, 7]
    sample = example_with_spans((0, 3))
    metrics_by_spans = {
        spans: RationaleAgreement(counts=(3,), spans=spans)
        .measure(None, [sample], {"m": [explanation(order)]})[0]
        .figures  # type: ignore[arg-type]
        for spans in ("runs", "words")
    }
    assert metrics_by_spans["runs"]["iou f1 @3"] == 1 and metrics_by_spans["words"]["iou f1 @3"] == 0
    assert metrics_by_spans["words"]["token f1 @3"] == 1
    with pytest.raises(InputError, match="runs"):
        RationaleAgreement(spans="word").measure(None, [], {})  # type: ignore[arg-type]


def test_truncated_words_are_missed_and_clamp_zeroes_negative_scores() -> None:
    figures = (
        RationaleAgreement(counts=(1, 20))
        .measure(None, [example_with_spans((8, 10))], {"m": [explanation([1.0] * 10, 7)]})[0]
        .figures
    )  # type: ignore[arg-type]
    assert figures["token f1 @20"] == 0 and figures["marked"] == 2
    clamped = RationaleAgreement(counts=(1,), clamp=True).measure(
        None, [example_with_spans((0, 1))], {"m": [explanation([-9.0] * 10)]}
    )  # type: ignore[arg-type]
    assert clamped[0].figures["average precision"] == pytest.approx(0.1)  # all scores are tied at zero


def test_unknown_tokens_do_not_shift_word_scores() -> None:
    ex = explainer("bert/classify")
    text = "I like 日本 the movie, so boring!"
    explained = ex.explain(text, method="random")
    words = find_words(explained.units)
    assert [text[a:b] for _, (a, b) in words] == text.split()
    scores = compute_word_scores(explained.units, np.arange(len(explained.units), dtype=float), words)
    assert not np.isnan(scores).any() and (np.diff(scores) > 0).all()
    assert explained.units.offsets is not None
    for (_, (a, b)), score in zip(words, scores, strict=True):
        inside = [
            i for i, (c, d) in enumerate(explained.units.offsets) if c < b and d > a and not explained.units.special[i]
        ]
        assert score == max(inside)


def test_iou_f1_counts_spans_from_half_overlap() -> None:
    assert compute_iou_f1([(0, 0, 2)], [(0, 0, 4)]) == 1 and compute_iou_f1([(0, 0, 1)], [(0, 0, 4)]) == 0
    assert compute_iou_f1([(0, 0, 2)], [(1, 0, 2)]) == 0 and compute_iou_f1([], [(0, 0, 2)]) == 0


def test_auprc_equals_sklearn_and_reference() -> None:
    from sklearn.metrics import auc, precision_recall_curve

    rng = np.random.default_rng(0)
    gold, scores = rng.random(30) < 0.3, rng.random(30).round(1)
    precision, recall, _ = precision_recall_curve(gold, scores)
    assert compute_curve_areas(gold, scores)["auprc"] == pytest.approx(auc(recall, precision))
    assert compute_curve_areas(gold, scores)["auprc"] == pytest.approx(
        replica.areas(scores.tolist(), set(np.flatnonzero(gold).tolist()))[0]
    )


def test_missing_rationale_raises() -> None:
    with pytest.raises(InputError, match="no rationale"):
        RationaleAgreement().measure(None, [Example("x", TEXT, 0)], {"m": [explanation([1.0] * 10)]})  # type: ignore[arg-type]
