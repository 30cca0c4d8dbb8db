"""Saliency of token embeddings and image patches equals its reference implementation."""

import numpy as np
import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison

SUBJECTS = (*replica_comparison.SUBJECTS, "swin/image")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("saliency", subject)


@pytest.mark.parametrize("reduce", ["l2", "abs", "sum"])
@pytest.mark.parametrize("subject", ["vit/image", "dinov2/image"])
def test_image_reductions_equal_reference(subject: str, reduce: str) -> None:
    replica_comparison.assert_equals_reference("saliency", subject, reduce=reduce)


@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask"])
def test_text_abs_reduction_equals_reference_and_sum_is_zero(subject: str) -> None:
    """The norm after the embeddings subtracts their mean, so the sum of a gradient is zero up to rounding."""
    ex, texts = replica_comparison.explainer(subject), models.inputs(subject)
    replica_comparison.assert_equals_reference("saliency", subject, reduce="abs")
    for absolute, summed in zip(
        *(ex.explain(texts, clearhead.Method("saliency", reduce=r)) for r in ("abs", "sum")), strict=True
    ):
        assert np.abs(summed.scores).max() < 1e-12 * absolute.scores.max()


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("saliency", subject, target=target)


def test_only_the_sum_reduction_is_signed() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for name in ("saliency", "input-x-gradient"):
        for reduce in ("sum", "l2", "abs"):
            e = ex.explain(models.TEXTS[0], clearhead.Method(name, reduce=reduce))
            assert e.signed == bool((e.scores < 0).any()) == (reduce == "sum")
