"""Partial LRP against its replica: last layer, any layers, some heads."""

import pytest

from tests.methods import replica_comparison
from tests.methods.relevance_models import SUBJECTS, VARIANTS, WITHIN, explained, walked
from tests.replicas import partial_lrp


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str, variant: str) -> None:
    own = explained(subject, "partial-lrp", {"rules": variant})
    for e, (found, _, readout) in zip(own, walked(subject, variant), strict=True):
        assert replica_comparison.gap(e.scores, partial_lrp.scores(found, readout)) < WITHIN[subject]


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    own = explained("bert/classify", "partial-lrp", {}, layers=layers[0], heads=heads and heads[0])
    for e, (found, _, readout) in zip(own, walked("bert/classify", "orig"), strict=True):
        expected = partial_lrp.scores(found, readout, layers[1], heads and heads[1])
        assert replica_comparison.gap(e.scores, expected) < WITHIN["bert/classify"]
