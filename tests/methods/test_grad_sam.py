"""Grad-SAM, by rows and by columns, against its replica."""

import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str, received: bool) -> None:
    replica_comparison.assert_twins("grad-sam", subject, received=received)


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None, received: bool) -> None:
    for subject in ("bert/classify", "beit/image"):
        replica_comparison.assert_twins("grad-sam", subject, layers=layers, heads=heads, received=received)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("grad-sam", subject, target=target)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_rows_and_columns_have_one_total(subject: str) -> None:
    both = [clearhead.Method("grad-sam"), clearhead.Method("grad-sam", received=True)]
    paid, received = replica_comparison.explainer(subject).explain(models.inputs(subject), both).values()
    for row, column in zip(paid, received, strict=True):
        assert row.scores.sum() > 0
        assert row.scores.sum() == pytest.approx(column.scores.sum(), rel=1e-12)
        assert replica_comparison.gap(row.scores, column.scores) > 0.01, "though they are not the same scores"


def test_last_layer_goes_to_the_class_token_alone() -> None:
    """Why [CLS] always wins by rows: no other row of the last layer reaches the output."""
    text = replica_comparison.SENTENCES[0]
    scores = replica_comparison.explainer("bert/classify").explain(text, "grad-sam", layers=(-1, None)).scores
    assert scores[0] > 0
    assert not scores[1:].any()


def test_scales_with_the_target() -> None:
    text = replica_comparison.SENTENCES[0]
    one, ten = (
        replica_comparison.with_classifier_times("bert/classify", factor).explain(text, "grad-sam", target=1).scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(ten, 10 * one) < 1e-12
