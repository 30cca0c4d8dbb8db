"""Edge cases of the divergences, and tau on scores."""

import math

import numpy as np
import pytest
import torch

from clearhead.probes.divergences import LARGEST, attainable, jensen_shannon, kullback_leibler, tau_b, total_variation


def test_one_hot_distributions_lie_ln_2_apart_and_equal_ones_not_at_all():
    a, b = torch.eye(5, dtype=torch.float64)[[1, 4]]
    assert float(jensen_shannon(a, b)) == pytest.approx(math.log(2), abs=1e-12)
    assert float(jensen_shannon(a, a)) == 0
    assert float(total_variation(a, b)) == 1 and float(total_variation(a, a)) == 0


def test_divergences_of_random_distributions_lie_in_their_bounds_and_are_those_of_scipy():
    from scipy.spatial.distance import jensenshannon

    rows = torch.rand(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
    rows[::3, 2] = 0
    p, q = (rows / rows.sum(-1, keepdim=True)).split(30)
    found = jensen_shannon(p, q)
    assert (found >= 0).all() and (found <= LARGEST).all()
    assert np.allclose(found, jensenshannon(p.numpy(), q.numpy(), axis=1) ** 2, atol=1e-12)


def test_nothing_times_its_logarithm_is_nothing():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert float(kullback_leibler(p, q)) == pytest.approx(math.log(2))
    assert math.isinf(float(kullback_leibler(q, p)))


def test_no_weights_are_farther_than_the_attainable_bound():
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(6, dtype=torch.float64, generator=generator).softmax(-1)
    visible = torch.tensor([True, True, False, True, True, True])
    p = (p * visible) / (p * visible).sum()
    bound = float(attainable(p, visible))
    tried = torch.rand(4000, 6, dtype=torch.float64, generator=generator).pow(20) * visible
    best = float(jensen_shannon(p.expand(4000, 6), tried / tried.sum(-1, keepdim=True)).max())
    assert 0.9 * bound < best <= bound < LARGEST


def test_tau_is_of_scores_and_not_of_their_orders():
    rng = np.random.default_rng(0)
    scores, orders = [], []
    for _ in range(200):
        truth = rng.normal(size=15)
        a, b = truth + 0.2 * rng.normal(size=15), truth + 0.2 * rng.normal(size=15)
        scores.append(tau_b(a, b)[0])
        orders.append(tau_b(np.argsort(-a).astype(float), np.argsort(-b).astype(float))[0])
    assert np.mean(scores) > 0.7 > 0.5 > np.mean(orders)  # the mistake of the AttCAT notebooks


def test_tau_of_ties_alone_is_no_number():
    assert math.isnan(tau_b(np.ones(4), np.arange(4.0))[0])
