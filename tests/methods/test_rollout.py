"""Rollout equals its reference implementation; checks (a) and (b) of the specification."""

import numpy as np
import pytest

from tests import models
from tests.methods import replica_comparison
from tests.replicas import rollout


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("rollout", subject)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_rows_equal_reference(subject: str) -> None:
    replica_comparison.assert_equals_reference("rollout", subject, all_rows=True)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_equals_reference("rollout", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_equals_reference("rollout", "dinov2/image", layers=layers, heads=heads, all_rows=True)


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_rows_sum_to_one(subject: str) -> None:
    """(a); rows are cut to the length of the sample, so no attention is lost in padding."""
    tolerance = 1e-6 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-12
    for e in replica_comparison.explainer(subject).explain(models.inputs(subject), "rollout", rows="all"):
        np.testing.assert_allclose(e.matrix.sum(1), 1, atol=tolerance)


def test_row_normalised_map_equals_half_attention_half_identity() -> None:
    """(b): the authors' rownorm(A + I) equals 0.5 A + 0.5 I."""
    for seen, _ in replica_comparison.record_plain_passes("bert/classify"):
        for layer in range(seen.layers):
            half = 0.5 * seen.attention[layer].mean(0) + 0.5 * np.eye(seen.units)
            assert replica_comparison.gap(rollout.normalise_with_identity(seen.attention[layer], None), half) < 1e-14


def test_one_layer_equals_half_attention_half_identity() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        rolled = ex.explain(text, "rollout", layers=(layer, layer + 1), rows="all").matrix
        raw = ex.explain(text, "attention", layers=(layer, layer + 1), rows="all").matrix
        assert replica_comparison.gap(rolled, (raw + np.eye(len(raw))) / 2) < 1e-14


def test_does_not_depend_on_the_target() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    first, second = (ex.explain(text, "rollout", target=label).scores for label in (0, 1))
    np.testing.assert_array_equal(first, second)
