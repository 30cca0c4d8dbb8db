"""The gradient of attention, and attention times its gradient, against their replicas."""

import numpy as np
import pytest

import clearhead
from tests import models
from tests.methods import twins

BOTH = ("attention-gradient", "attention-x-gradient")


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("subject", twins.SUBJECTS)
def test_equals_its_replica(subject: str, method: str) -> None:
    twins.assert_twins(method, subject)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("subject", twins.FEW)
def test_every_row(subject: str, method: str) -> None:
    twins.assert_twins(method, subject, every_row=True)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("layers", twins.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *twins.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None, method: str) -> None:
    twins.assert_twins(method, "bert/classify", layers=layers, heads=heads)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("target", twins.TARGETS)
def test_targets(target: str, method: str) -> None:
    twins.assert_twins(method, "bert/classify", target=target)


@pytest.mark.parametrize("method", BOTH)
def test_a_difference_explains_the_contrast(method: str) -> None:
    ex, (text, *_) = twins.explainer("bert/classify"), models.inputs("bert/classify")
    difference = ex.explain(text, method, target=2) - ex.explain(text, method, target=0)
    assert difference.target["kind"] == "contrast"
    contrast = ex.explain(text, method, target=clearhead.Contrast(2, 0))
    np.testing.assert_allclose(difference.scores, contrast.scores, atol=1e-12 * np.abs(contrast.scores).max())


def test_generic_is_its_positive_part_in_one_layer() -> None:
    """Where no head's product is negative the two are the same: Generic Attention clamps, this one does not."""
    ex, (text, *_) = twins.explainer("bert/classify"), models.inputs("bert/classify")
    signed = ex.explain(text, "attention-x-gradient", layers=(2, 3), heads=[1]).scores
    clamped = ex.explain(text, "generic", layers=(2, 3), heads=[1]).scores
    np.testing.assert_allclose(np.maximum(signed, 0), clamped, atol=1e-12 * np.abs(clamped).max())
