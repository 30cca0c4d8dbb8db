"""Transition attention maps against its replica."""

import pytest

from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import beyond_intuition_head as head
from tests.replicas import tam as replica


@pytest.mark.parametrize("layers", [None, (0, None), (0, 2), (-1, None)], ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image", "beit/image", "dinov2/image"])
def test_equals_its_replica(subject: str, layers: tuple | None) -> None:
    results = replica_comparison.explainer(subject).explain(
        models.inputs(subject), Method("tam", steps=4), layers=layers
    )
    chosen = range(3)[slice(*(layers or (1, None)))]
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        expected = replica.scores(one.seen, head.feedback(one.walker, 4), one.readout, chosen)
        assert replica_comparison.gap(e.scores, expected) < 1e-5


def test_it_lacks_one_identity_of_uniform_perception() -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    ours = ex.explain(raw, Method("tam", feedback="none"), layers=(0, None)).scores
    uniform = Method("beyond-intuition-head", perception="uniform", feedback="none")
    theirs = ex.explain(raw, uniform, layers=(0, None)).scores
    below = ex.explain(raw, uniform, layers=(0, 2)).scores
    assert replica_comparison.gap(ours, theirs - below) < 1e-12
