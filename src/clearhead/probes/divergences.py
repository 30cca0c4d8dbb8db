"""Divergences between distributions, entropy and rank correlation. Natural logarithms; 0 · log 0 is 0."""

import math

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: The largest Jensen–Shannon divergence, of two distributions with disjoint support.
MAX_JSD = math.log(2)


def compute_total_variation(
    p: Float[Tensor, "*batch label"], q: Float[Tensor, "*batch label"], multi_label: bool = False
) -> Float[Tensor, "*batch"]:
    """Compute the total variation distance ½ Σ |p − q|; for independent labels, the mean of |p − q|.

    >>> float(compute_total_variation(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])))
    0.5
    """
    difference = (p - q).abs()
    return difference.mean(-1) if multi_label else difference.sum(-1) / 2


def compute_kl_divergence(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Compute the Kullback–Leibler divergence Σ p log(p / q); infinite where p is positive and q is 0.

    >>> float(compute_kl_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])))
    inf
    """
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def compute_js_divergence(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Compute the Jensen–Shannon divergence ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2: from 0 to ln 2.

    >>> round(float(compute_js_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))), 4)
    0.6931
    """
    middle = (p + q) / 2
    return ((compute_kl_divergence(p, middle) + compute_kl_divergence(q, middle)) / 2).clamp(0, MAX_JSD)


def compute_max_jsd(p: Float[Tensor, "*batch key"], visible: Bool[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Compute the largest divergence of any weights on visible keys from p.

    JSD(p, q) is convex in q, so the farthest weights are a corner: all of it on the key that p weighs least.

    >>> p = torch.tensor([0.5, 0.5])
    >>> round(float(compute_max_jsd(p, torch.tensor([True, True]))), 4)
    0.2158
    """
    least = p.masked_fill(~visible, torch.inf).argmin(-1, keepdim=True)
    return compute_js_divergence(p, torch.zeros_like(p).scatter(-1, least, 1.0))


def compute_entropy(p: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Compute the entropy −Σ p log p.

    >>> round(float(compute_entropy(torch.full((4,), 0.25))), 4)
    1.3863
    """
    return -torch.xlogy(p, p).sum(-1)


def compute_tau_b(x: Float[np.ndarray, "unit"], y: Float[np.ndarray, "unit"]) -> tuple[float, float]:
    """Compute Kendall's tau-b of two lists of scores (not of ranks), corrected for ties, with its p.

    Both are NaN if a list is constant or has fewer than two scores.

    >>> compute_tau_b(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))[0]
    1.0
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan, math.nan
    result = scipy.stats.kendalltau(x, y, variant="b")
    return float(result.statistic), float(result.pvalue)
