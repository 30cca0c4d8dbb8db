"""The gradient of attention against its replica."""

import numpy as np
import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison

METHOD = "attention-gradient"


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins(METHOD, subject)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_every_row(subject: str) -> None:
    replica_comparison.assert_twins(METHOD, subject, every_row=True)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_twins(METHOD, "bert/classify", layers=layers, heads=heads)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
def test_targets(target: str) -> None:
    replica_comparison.assert_twins(METHOD, "bert/classify", target=target)


def test_a_difference_explains_the_contrast() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    difference = ex.explain(text, METHOD, target=2) - ex.explain(text, METHOD, target=0)
    assert difference.target["kind"] == "contrast"
    contrast = ex.explain(text, METHOD, target=clearhead.Contrast(2, 0))
    np.testing.assert_allclose(difference.scores, contrast.scores, atol=1e-12 * np.abs(contrast.scores).max())
