"""Grad-SAM, by rows and by columns, equals its reference implementation."""

import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str, received: bool) -> None:
    replica_comparison.assert_equals_reference("grad-sam", subject, received=received)


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None, received: bool) -> None:
    for subject in ("bert/classify", "beit/image"):
        replica_comparison.assert_equals_reference("grad-sam", subject, layers=layers, heads=heads, received=received)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("grad-sam", subject, target=target)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_row_and_column_scores_have_equal_sums(subject: str) -> None:
    methods = [clearhead.Method("grad-sam"), clearhead.Method("grad-sam", received=True)]
    by_row, by_column = replica_comparison.explainer(subject).explain(models.inputs(subject), methods).values()
    for row, column in zip(by_row, by_column, strict=True):
        assert row.scores.sum() > 0
        assert row.scores.sum() == pytest.approx(column.scores.sum(), rel=1e-12)
        assert replica_comparison.gap(row.scores, column.scores) > 0.01, "the scores themselves differ"


def test_last_layer_scores_only_the_class_token() -> None:
    """Why [CLS] always ranks first by rows: no other row of the last layer reaches the output."""
    text = replica_comparison.SENTENCES[0]
    scores = replica_comparison.explainer("bert/classify").explain(text, "grad-sam", layers=(-1, None)).scores
    assert scores[0] > 0
    assert not scores[1:].any()


def test_scores_scale_linearly_with_the_target() -> None:
    text = replica_comparison.SENTENCES[0]
    scores, scaled_scores = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor)
        .explain(text, "grad-sam", target=1)
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(scaled_scores, 10 * scores) < 1e-12
