"""How far two distributions lie apart, and how concentrated one is. Natural logarithms; 0 · log 0 is 0."""

import math

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: The largest Jensen–Shannon divergence, of two distributions that share nothing.
LARGEST = math.log(2)


def total_variation(
    p: Float[Tensor, "*batch label"], q: Float[Tensor, "*batch label"], multi_label: bool = False
) -> Float[Tensor, "*batch"]:
    """½ Σ |p − q|; where each label has a probability of its own, the mean of |p − q|.

    >>> float(total_variation(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])))
    0.5
    """
    gap = (p - q).abs()
    return gap.mean(-1) if multi_label else gap.sum(-1) / 2


def kullback_leibler(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Σ p log(p / q); infinite where p has weight and q has none.

    >>> float(kullback_leibler(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])))
    inf
    """
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def jensen_shannon(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2: from 0 to ln 2.

    >>> round(float(jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))), 4)
    0.6931
    """
    middle = (p + q) / 2
    return ((kullback_leibler(p, middle) + kullback_leibler(q, middle)) / 2).clamp(0, LARGEST)


def attainable(p: Float[Tensor, "*batch key"], visible: Bool[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """The largest divergence from p that any weights on visible keys have: all of it on the key that p gives least.

    JSD(p, q) is convex in q, so a corner is farthest.

    >>> p = torch.tensor([0.5, 0.5])
    >>> round(float(attainable(p, torch.tensor([True, True]))), 4)
    0.2158
    """
    least = p.masked_fill(~visible, torch.inf).argmin(-1, keepdim=True)
    return jensen_shannon(p, torch.zeros_like(p).scatter(-1, least, 1.0))


def entropy(p: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """−Σ p log p.

    >>> round(float(entropy(torch.full((4,), 0.25))), 4)
    1.3863
    """
    return -torch.xlogy(p, p).sum(-1)


def tau_b(one: Float[np.ndarray, "unit"], other: Float[np.ndarray, "unit"]) -> tuple[float, float]:
    """Kendall's tau-b of two lists of scores (not of their orders), corrected for ties, with its p; NaN where one is
    all ties or there are fewer than two.

    >>> tau_b(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))[0]
    1.0
    """
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan, math.nan
    found = scipy.stats.kendalltau(one, other, variant="b")
    return float(found.statistic), float(found.pvalue)
