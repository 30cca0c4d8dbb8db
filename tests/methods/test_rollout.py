"""Rollout against its replica, and checks (a) and (b) of the specification."""

import numpy as np
import pytest

from tests import models
from tests.methods import replica_comparison
from tests.replicas import rollout


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("rollout", subject)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_every_row(subject: str) -> None:
    replica_comparison.assert_twins("rollout", subject, every_row=True)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_twins("rollout", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_twins("rollout", "dinov2/image", layers=layers, heads=heads, every_row=True)


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_rows_sum_to_one(subject: str) -> None:
    """(a), and with it that nothing leaks into padding: the rows are cut to the sample's own length."""
    allowed = 1e-6 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-12
    for e in replica_comparison.explainer(subject).explain(models.inputs(subject), "rollout", rows="all"):
        np.testing.assert_allclose(e.matrix.sum(1), 1, atol=allowed)


def test_normalised_rows_are_half_attention_half_identity() -> None:
    """(b): rownorm(A + I), as the authors write it, is the 0.5 A + 0.5 I that is pushed here."""
    for seen, _ in replica_comparison.slow_batch("bert/classify"):
        for layer in range(seen.layers):
            half = 0.5 * seen.attention[layer].mean(0) + 0.5 * np.eye(seen.units)
            assert replica_comparison.gap(rollout.augmented(seen.attention[layer], None), half) < 1e-14


def test_one_layer_is_half_attention_half_identity() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        rolled = ex.explain(text, "rollout", layers=(layer, layer + 1), rows="all").matrix
        raw = ex.explain(text, "attention", layers=(layer, layer + 1), rows="all").matrix
        assert replica_comparison.gap(rolled, (raw + np.eye(len(raw))) / 2) < 1e-14


def test_does_not_depend_on_the_target() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    one, other = (ex.explain(text, "rollout", target=label).scores for label in (0, 1))
    np.testing.assert_array_equal(one, other)
