"""Raw attention equals its reference implementation, and its rows sum to one for any model."""

import numpy as np
import pytest

from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("attention", subject)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_rows_equal_reference(subject: str) -> None:
    replica_comparison.assert_equals_reference("attention", subject, all_rows=True)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_equals_reference("attention", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_equals_reference("attention", "beit/image", layers=layers, heads=heads, all_rows=True)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_rows_sum_to_one(subject: str) -> None:
    inputs = models.inputs(subject)
    for e in replica_comparison.explainer(subject).explain(inputs, "attention", layers=(0, None), rows="all"):
        assert (e.matrix >= 0).all()
        np.testing.assert_allclose(e.matrix.sum(1), 1, atol=1e-6)
