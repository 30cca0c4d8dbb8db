"""Relevance where streams look at each other (Chefer et al., ICCV 2021), slowly, and the attention of such models as
their own forward pass computes it. One sample at a time; no code of clearhead's is used."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Look:
    """One attention call: whose queries look at whose keys, and the gradient of the number that is explained."""

    module: str
    attention: Float[np.ndarray, "head query key"]
    gradient: Float[np.ndarray, "head query key"]
    looks: str = ""
    seen: str = ""


def watch(model: Any, inputs: Mapping[str, Any], value: Callable[[Any], Tensor]) -> list[Look]:
    """Every attention call of one pass in order, caught where each module drops out of its probabilities."""
    twin = copy.deepcopy(model).eval()
    caught: list[tuple[str, Tensor]] = []
    for name, module in twin.named_modules():
        if hasattr(module, "dropout") and (hasattr(module, "query") or hasattr(module, "qkv")):
            module.dropout.register_forward_hook(lambda _, __, out, name=name: caught.append((name, out)))
    number = value(twin(**inputs))
    gradients = torch.autograd.grad(number, [out for _, out in caught], allow_unused=True)
    return [
        Look(name, out[0].detach().numpy(), np.zeros(out[0].shape) if g is None else g[0].numpy())
        for (name, out), g in zip(caught, gradients, strict=True)
    ]


def fused(look: Look) -> Float[np.ndarray, "query key"]:
    """Equation 5, entry by entry."""
    heads, queries, keys = look.attention.shape
    found = np.zeros((queries, keys))
    for i in range(queries):
        for j in range(keys):
            products = [look.attention[h, i, j] * look.gradient[h, i, j] for h in range(heads)]
            found[i, j] = sum(max(product, 0.0) for product in products) / heads
    return found


def normalised(relevance: Float[np.ndarray, "row row"]) -> Float[np.ndarray, "row row"]:
    """Equations 8 and 9; a row that is zero stays so."""
    rest = relevance - np.eye(len(relevance))
    for row in rest:
        if row.sum() != 0:
            row /= row.sum()
    return rest + np.eye(len(relevance))


def generic(
    steps: Sequence[Sequence[Look]], lengths: Mapping[str, int], normalise: bool = True, within: bool = True
) -> dict[tuple[str, str], Float[np.ndarray, "row unit"]]:
    """Rules 6, 7, 10 and 11 over the steps of a model. The looks of one step happen at once."""
    r = {(s, q): np.eye(lengths[s]) if s == q else np.zeros((lengths[s], lengths[q])) for s in lengths for q in lengths}
    for step in steps:
        old = {pair: matrix.copy() for pair, matrix in r.items()}
        for look in step:
            s, q, cam = look.looks, look.seen, fused(look)
            if s == q:
                for other in lengths:
                    r[s, other] = old[s, other] + cam @ old[s, other]
                continue
            left, right = (normalised(old[t, t]) if normalise else old[t, t] for t in (s, q))
            r[s, q] = old[s, q] + (left.T @ cam @ right if within else cam)
            r[s, s] = old[s, s] + cam @ old[q, s]
    for s in lengths:
        r[s, s] = r[s, s] - np.eye(lengths[s])
    return r


def rollout(steps: Sequence[Sequence[Look]], lengths: Mapping[str, int]) -> dict[tuple[str, str], np.ndarray]:
    """Attention multiplied through the layers of each stream; where one looks at another, R_ssᵀ A R_qq."""
    r = {(s, s): np.eye(length) for s, length in lengths.items()}
    for step in steps:
        for look in step:
            s, q, mean = look.looks, look.seen, look.attention.mean(0)
            if s == q:
                r[s, s] = (mean + np.eye(lengths[s])) / 2 @ r[s, s]
            else:
                r[s, q] = r[s, s].T @ mean @ r[q, q]
    return r


def gradcam(look: Look) -> Float[np.ndarray, "query key"]:
    heads = len(look.attention)
    weighted = [look.gradient[h].mean() * look.attention[h] for h in range(heads)]
    return np.maximum(sum(weighted) / heads, 0)
