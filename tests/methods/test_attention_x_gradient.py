"""Attention times its gradient equals its reference implementation."""

import numpy as np
import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison

METHOD = "attention-x-gradient"


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference(METHOD, subject)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_rows_equal_reference(subject: str) -> None:
    replica_comparison.assert_equals_reference(METHOD, subject, all_rows=True)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_equals_reference(METHOD, "bert/classify", layers=layers, heads=heads)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
def test_targets_and_scales_equal_reference(target: str) -> None:
    replica_comparison.assert_equals_reference(METHOD, "bert/classify", target=target)


def test_difference_of_explanations_equals_the_contrast() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    difference = ex.explain(text, METHOD, target=2) - ex.explain(text, METHOD, target=0)
    assert difference.target["kind"] == "contrast"
    contrast = ex.explain(text, METHOD, target=clearhead.Contrast(2, 0))
    np.testing.assert_allclose(difference.scores, contrast.scores, atol=1e-12 * np.abs(contrast.scores).max())


def test_generic_equals_the_positive_part_for_one_layer_and_head() -> None:
    """For one layer and one head the methods differ only in the clamp of Generic Attention."""
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    signed = ex.explain(text, "attention-x-gradient", layers=(2, 3), heads=[1]).scores
    clamped = ex.explain(text, "generic", layers=(2, 3), heads=[1]).scores
    np.testing.assert_allclose(np.maximum(signed, 0), clamped, atol=1e-12 * np.abs(clamped).max())
