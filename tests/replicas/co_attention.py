"""Relevance where streams look at each other (Chefer et al., ICCV 2021), slowly, and the attention of such models as
their own forward pass computes it. One sample at a time; no code of clearhead's is used."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Look:
    """One attention call: whose queries look at whose keys, and the gradient of the number that is explained.

    In a tower, a stream looks at its units as they are in the tower beside it.
    """

    module: str
    attention: Float[np.ndarray, "head query key"]
    gradient: Float[np.ndarray, "head query key"]
    looks: str = ""
    seen: str = ""
    tower: bool = False


def watch(model: Any, inputs: Mapping[str, Any], value: Callable[[Any], Tensor]) -> list[Look]:
    """Every attention call of one pass in order, caught where each module drops out of its probabilities, or where it
    returns them (BridgeTower's)."""
    twin = copy.deepcopy(model).eval()
    twin.set_attn_implementation("eager")
    caught: list[tuple[str, Tensor]] = []
    for name, module in twin.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "query"):
            module.register_forward_hook(lambda _, __, out, name=name: caught.append((name, out[1])))
        elif hasattr(module, "dropout") and (hasattr(module, "query") or hasattr(module, "qkv")):
            module.dropout.register_forward_hook(lambda _, __, out, name=name: caught.append((name, out)))
        if isinstance(module, torch.nn.MultiheadAttention):
            module.forward = partial(attend, module, lambda out, name=name: caught.append((name, out)))
    number = value(twin(**inputs))
    gradients = torch.autograd.grad(number, [out for _, out in caught], allow_unused=True)
    return [
        Look(name, out[0].detach().numpy(), np.zeros(out[0].shape) if g is None else g[0].numpy())
        for (name, out), g in zip(caught, gradients, strict=True)
    ]


def attend(
    module: torch.nn.MultiheadAttention, catch: Callable[[Tensor], None], query: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Self-attention of torch's own module with its probabilities in the open: unit × batch × model, nothing hidden."""
    units, batch, width = query.shape
    parts = torch.nn.functional.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads = [part.reshape(units, batch, module.num_heads, -1).permute(1, 2, 0, 3) for part in parts]
    probabilities = (heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5).softmax(-1)
    catch(probabilities)
    mixed = (probabilities @ heads[2]).permute(2, 0, 1, 3).reshape(units, batch, width)
    return module.out_proj(mixed), None


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
    """Rules 6, 7, 10 and 11 over the steps of a model. In one step each stream sees the others as they were before.

    A stream that has a tower beside it is given, before each step of its own, what the tower gained since the last.
    """
    r = {(s, q): np.eye(lengths[s]) if s == q else np.zeros((lengths[s], lengths[q])) for s in lengths for q in lengths}
    towers = {s: np.eye(lengths[s]) for s in lengths}
    given = dict(towers)
    for step in steps:
        if not step[0].tower:
            for s in lengths:
                r[s, s] = r[s, s] + (towers[s] - given[s])
                given[s] = towers[s]
        old = {pair: matrix.copy() for pair, matrix in r.items()}
        for look in step:
            s, q, cam = look.looks, look.seen, fused(look)
            if look.tower:
                towers[s] = towers[s] + cam @ towers[s]
            elif s == q:
                for other in lengths:
                    r[s, other] = r[s, other] + cam @ r[s, other]
            else:
                left, right = (normalised(own) if normalise else own for own in (r[s, s], old[q, q]))
                r[s, q] = r[s, q] + (left.T @ cam @ right if within else cam)
                r[s, s] = r[s, s] + cam @ old[q, s]
    for s in lengths:
        r[s, s] = r[s, s] - np.eye(lengths[s])
    return r


def rollout(steps: Sequence[Sequence[Look]], lengths: Mapping[str, int]) -> dict[tuple[str, str], np.ndarray]:
    """Attention multiplied through the layers of each stream; where one looks at another, R_ssᵀ A R_qq.

    A layer of a tower is half of what the tower becomes, and half of what the stream beside it becomes.
    """
    r = {(s, s): np.eye(length) for s, length in lengths.items()}
    towers = {s: np.eye(length) for s, length in lengths.items()}
    for step in steps:
        old = dict(r)
        for look in step:
            s, q, mean = look.looks, look.seen, look.attention.mean(0)
            if look.tower:
                r[s, s] = (mean @ towers[s] + r[s, s]) / 2
                towers[s] = (mean + np.eye(lengths[s])) / 2 @ towers[s]
            elif s == q:
                r[s, s] = (mean + np.eye(lengths[s])) / 2 @ r[s, s]
            else:
                r[s, q] = r[s, s].T @ mean @ old[q, q]
    return r


def attribution(
    steps: Sequence[Sequence[Look]], lengths: Mapping[str, int], normalise: bool = False
) -> dict[tuple[str, str], np.ndarray]:
    """Transformer Attribution where `attention` is the relevance of attention: Π (I + Ā) of what a stream sees of
    itself, and Ā of its last look at another.

    Layers of a tower: (x, t) ← (x + Ā t, t + Ā t); rows are divided by those of I + Ā if asked for, and I stays.
    """
    r = {(s, s): np.eye(length) for s, length in lengths.items()}
    towers = {s: np.eye(length) for s, length in lengths.items()}
    for look in (look for step in steps for look in step):
        s, cam = look.looks, fused(look)
        if s != look.seen:
            r[s, look.seen] = cam
            continue
        sums = 1 + cam.sum(1, keepdims=True) if normalise else 1
        r[s, s] = (r[s, s] + cam @ (towers[s] if look.tower else r[s, s])) / sums
        if look.tower:
            towers[s] = (towers[s] + cam @ towers[s]) / sums
    for s in lengths:
        if not normalise:
            r[s, s] = r[s, s] - np.eye(lengths[s])
    return r


def gradcam(look: Look) -> Float[np.ndarray, "query key"]:
    heads = len(look.attention)
    weighted = [look.gradient[h].mean() * look.attention[h] for h in range(heads)]
    return np.maximum(sum(weighted) / heads, 0)
