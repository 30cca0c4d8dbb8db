"""Beyond Intuition, token-wise, against its replica."""

import pytest

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as replica

NAME = "beyond-intuition-token"


@pytest.mark.parametrize("subject", ["bert/classify", "bert/mask", "vit/image"])
def test_equals_its_replica(subject: str) -> None:
    ex = replica_comparison.explainer(subject)
    results = ex.explain(models.inputs(subject), Method(NAME, steps=4))
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        expected = replica.scores(ex.adapter.model, one.seen, head.feedback(one.walker, 4), one.readout)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.allowed(subject), 1e-9)


def test_every_row_and_layers() -> None:
    ex, one = replica_comparison.explainer("bert/classify"), replica_inputs.cases("bert/classify")[1]
    e = ex.explain(models.TEXTS[1], NAME, rows="all", layers=(0, 2))
    expected = replica.matrix(ex.adapter.model, one.seen, head.feedback(one.walker), (0, 1))
    assert replica_comparison.gap(e.matrix, expected) < 1e-9


def test_uniform_is_the_head_wise_uniform() -> None:
    """(f): without ρ and θ the two are one."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        ours, theirs = (
            ex.explain(raw, Method(name, perception="uniform"), layers=(0, None))
            for name in (NAME, "beyond-intuition-head")
        )
        assert replica_comparison.gap(ours.scores, theirs.scores) < 1e-12


def test_perception_does_not_see_the_target() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    one, other = (ex.explain(text, Method(NAME, feedback="none"), target=label).scores for label in (0, 1))
    assert replica_comparison.gap(one, other) == 0
    one, other = (ex.explain(text, NAME, target=label).scores for label in (0, 1))
    assert replica_comparison.gap(one, other) > 1e-3


def test_refused_where_values_cannot_be_seen() -> None:
    with pytest.raises(clearhead.UnsupportedError, match="its values cannot be recorded"):
        replica_comparison.explainer("deberta/classify").explain(models.TEXTS[0], NAME)
