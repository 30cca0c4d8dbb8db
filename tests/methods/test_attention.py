"""Raw attention against its replica, and what must hold of it whatever the model."""

import numpy as np
import pytest

from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("attention", subject)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_every_row(subject: str) -> None:
    replica_comparison.assert_twins("attention", subject, every_row=True)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_twins("attention", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_twins("attention", "beit/image", layers=layers, heads=heads, every_row=True)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_rows_sum_to_one(subject: str) -> None:
    inputs = models.inputs(subject)
    for e in replica_comparison.explainer(subject).explain(inputs, "attention", layers=(0, None), rows="all"):
        assert (e.matrix >= 0).all()
        np.testing.assert_allclose(e.matrix.sum(1), 1, atol=1e-6)
