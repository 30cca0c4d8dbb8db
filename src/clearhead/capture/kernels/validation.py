"""What a kernel is held against before it is trusted: compilers have their bugs, and GPUs their limits."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import Gradients
from clearhead.errors import ClearheadWarning


def holds(agree: Callable[[], bool], what: str, instead: str) -> bool:
    """Whether kernels give on this machine what their formula gives; those that do not are told of, and not used."""
    try:
        if agree():
            return True
        reason = "what they give is not what the formula gives"
    except torch.OutOfMemoryError:  # which says nothing about them
        raise
    except Exception as problem:  # compilers have errors of their own
        reason = f"{type(problem).__name__}: {problem}"
    warnings.warn(f"{what} cannot be used here ({reason}): {instead}", ClearheadWarning, stacklevel=2)
    return False


class Exact(NamedTuple):
    """product: A ⊙ ∂y/∂A"""

    output: Float[Tensor, "batch head query value_width"]
    gradients: Gradients
    lse: Float[Tensor, "batch head query"]
    product: Float[Tensor, "batch head query key"]


def by_formula(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, seen: Tensor | None) -> Exact:
    """In float64, without autograd: this may be in the middle of a layer that is computed twice."""
    shared, group, scale = key.shape[1], query.shape[1] // key.shape[1], query.shape[3] ** -0.5
    q, k, v, g = (part.double() for part in (query, *(p.repeat_interleave(group, 1) for p in (key, value)), slope))
    scores = q @ k.mT * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    attention, into = scores.softmax(-1), g @ v.mT
    steep = attention * (into - (attention * into).sum(-1, keepdim=True)) * scale
    dk, dv = (part.unflatten(1, (shared, group)).sum(2) for part in (steep.mT @ q, attention.mT @ g))
    return Exact(attention @ v, (steep @ k, dk, dv), scores.logsumexp(-1), attention * into)
