"""SmoothGrad against its replica with the same draws; without noise it is saliency."""

import numpy as np
import pytest

from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import smoothgrad as replica


@pytest.mark.parametrize("reduce", ["l2", "abs"])  # a norm follows words at once: their gradients sum to zero
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_equals_its_replica(subject: str, reduce: str) -> None:
    method = Method("smoothgrad", samples=5, reduce=reduce)
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), method)
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        expected = replica.scores(one.walker, one.seed, **one.cut, samples=5, reduce=reduce)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.allowed(subject), 1e-9)


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_without_noise_it_is_saliency(subject: str) -> None:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)
    for still, plain in zip(ex.explain(raw, Method("smoothgrad", noise=0.0)), ex.explain(raw, "saliency"), strict=True):
        assert replica_comparison.gap(still.scores, plain.scores) < 1e-12


def test_another_seed_another_noise() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    one, same, other = (ex.explain(text, "smoothgrad", seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert replica_comparison.gap(other, one) > 1e-4
