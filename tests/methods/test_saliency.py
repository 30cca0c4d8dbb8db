"""Saliency against its replica: word embeddings, and pixels gathered into patches."""

import numpy as np
import pytest

import clearhead
from tests import models
from tests.methods import replica_comparison

SUBJECTS = (*replica_comparison.SUBJECTS, "swin/image")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("saliency", subject)


@pytest.mark.parametrize("reduce", ["l2", "abs", "sum"])
@pytest.mark.parametrize("subject", ["vit/image", "dinov2/image"])
def test_reductions(subject: str, reduce: str) -> None:
    replica_comparison.assert_twins("saliency", subject, reduce=reduce)


@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask"])
def test_reductions_of_words(subject: str) -> None:
    """The norm after the embeddings takes their mean away, so a gradient's plain sum is nothing but rounding."""
    ex, texts = replica_comparison.explainer(subject), models.inputs(subject)
    replica_comparison.assert_twins("saliency", subject, reduce="abs")
    for steep, summed in zip(
        *(ex.explain(texts, clearhead.Method("saliency", reduce=r)) for r in ("abs", "sum")), strict=True
    ):
        assert np.abs(summed.scores).max() < 1e-12 * steep.scores.max()


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("saliency", subject, target=target)


def test_a_sum_has_a_sign_and_a_length_has_none() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for name in ("saliency", "input-x-gradient"):
        for reduce in ("sum", "l2", "abs"):
            e = ex.explain(models.TEXTS[0], clearhead.Method(name, reduce=reduce))
            assert e.signed == bool((e.scores < 0).any()) == (reduce == "sum")
