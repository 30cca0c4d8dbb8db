"""Partial LRP equals its reference implementation for the last layer, selected layers and heads."""

import pytest

from tests.methods import replica_comparison
from tests.methods.relevance_models import SUBJECTS, TOLERANCES, VARIANTS, explain_batch, walk_batch
from tests.replicas import partial_lrp


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str, variant: str) -> None:
    results = explain_batch(subject, "partial-lrp", {"rules": variant})
    for e, (relevance, _, readout) in zip(results, walk_batch(subject, variant), strict=True):
        assert replica_comparison.gap(e.scores, partial_lrp.scores(relevance, readout)) < TOLERANCES[subject]


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    results = explain_batch("bert/classify", "partial-lrp", {}, layers=layers[0], heads=heads and heads[0])
    for e, (relevance, _, readout) in zip(results, walk_batch("bert/classify", "orig"), strict=True):
        expected = partial_lrp.scores(relevance, readout, layers[1], heads and heads[1])
        assert replica_comparison.gap(e.scores, expected) < TOLERANCES["bert/classify"]
