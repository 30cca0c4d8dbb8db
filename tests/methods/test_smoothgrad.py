"""SmoothGrad equals its reference implementation with the same draws; without noise it equals saliency."""

import numpy as np
import pytest

from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import smoothgrad as replica


@pytest.mark.parametrize("reduce", ["l2", "abs"])  # a norm follows the embeddings directly: their gradients sum to zero
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_equals_reference_implementation(subject: str, reduce: str) -> None:
    method = Method("smoothgrad", samples=5, reduce=reduce)
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), method)
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        expected = replica.scores(case.evaluator, case.seed, **case.patch_layout, samples=5, reduce=reduce)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.get_tolerance(subject), 1e-9)


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_zero_noise_equals_saliency(subject: str) -> None:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)
    for without_noise, saliency in zip(
        ex.explain(raw, Method("smoothgrad", noise=0.0)), ex.explain(raw, "saliency"), strict=True
    ):
        assert replica_comparison.gap(without_noise.scores, saliency.scores) < 1e-12


def test_seed_reproduces_scores_and_another_seed_changes_them() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    scores, repeated, other_seed = (ex.explain(text, "smoothgrad", seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(scores, repeated)
    assert replica_comparison.gap(other_seed, scores) > 1e-4
