"""Edge cases of the divergences, and tau on scores."""

import math

import numpy as np
import pytest
import torch

from clearhead.probes.divergences import (
    MAX_JSD,
    compute_js_divergence,
    compute_kl_divergence,
    compute_max_jsd,
    compute_tau_b,
    compute_total_variation,
)


def test_jsd_is_ln_2_for_one_hot_and_0_for_equal_distributions():
    a, b = torch.eye(5, dtype=torch.float64)[[1, 4]]
    assert float(compute_js_divergence(a, b)) == pytest.approx(math.log(2), abs=1e-12)
    assert float(compute_js_divergence(a, a)) == 0
    assert float(compute_total_variation(a, b)) == 1 and float(compute_total_variation(a, a)) == 0


def test_divergences_are_bounded_and_equal_scipy():
    from scipy.spatial.distance import jensenshannon

    rows = torch.rand(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
    rows[::3, 2] = 0
    p, q = (rows / rows.sum(-1, keepdim=True)).split(30)
    result = compute_js_divergence(p, q)
    assert (result >= 0).all() and (result <= MAX_JSD).all()
    assert np.allclose(result, jensenshannon(p.numpy(), q.numpy(), axis=1) ** 2, atol=1e-12)


def test_zero_times_log_zero_is_zero():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert float(compute_kl_divergence(p, q)) == pytest.approx(math.log(2))
    assert math.isinf(float(compute_kl_divergence(q, p)))


def test_no_weights_exceed_the_attainable_jsd():
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(6, dtype=torch.float64, generator=generator).softmax(-1)
    visible = torch.tensor([True, True, False, True, True, True])
    p = (p * visible) / (p * visible).sum()
    bound = float(compute_max_jsd(p, visible))
    tried = torch.rand(4000, 6, dtype=torch.float64, generator=generator).pow(20) * visible
    best = float(compute_js_divergence(p.expand(4000, 6), tried / tried.sum(-1, keepdim=True)).max())
    assert 0.9 * bound < best <= bound < MAX_JSD


def test_tau_uses_scores_not_ranks():
    rng = np.random.default_rng(0)
    scores, orders = [], []
    for _ in range(200):
        truth = rng.normal(size=15)
        a, b = truth + 0.2 * rng.normal(size=15), truth + 0.2 * rng.normal(size=15)
        scores.append(compute_tau_b(a, b)[0])
        orders.append(compute_tau_b(np.argsort(-a).astype(float), np.argsort(-b).astype(float))[0])
    assert np.mean(scores) > 0.7 > 0.5 > np.mean(orders)  # the mistake of the AttCAT notebooks


def test_tau_of_constant_scores_is_nan():
    assert math.isnan(compute_tau_b(np.ones(4), np.arange(4.0))[0])
