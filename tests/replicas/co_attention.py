"""Relevance in models with cross-attention (Chefer et al., ICCV 2021), with loops, and the attention maps of such
models from their own forward pass. One sample at a time; no code of clearhead is used."""

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
    """One attention call: its map, the gradient of the target, the stream of its queries (`looks`) and keys (`seen`).

    In a residual tower, keys are the units of the tower that runs in parallel to the stream.
    """

    module: str
    attention: Float[np.ndarray, "head query key"]
    gradient: Float[np.ndarray, "head query key"]
    looks: str = ""
    seen: str = ""
    tower: bool = False


def watch(model: Any, inputs: Mapping[str, Any], value: Callable[[Any], Tensor]) -> list[Look]:
    """Return every attention call of one pass in order, recorded at the dropout of the probabilities, or where a module
    returns them (BridgeTower)."""
    eager = copy.deepcopy(model).eval()
    eager.set_attn_implementation("eager")
    attention_maps: list[tuple[str, Tensor]] = []
    for name, module in eager.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "query"):
            module.register_forward_hook(lambda _, __, out, name=name: attention_maps.append((name, out[1])))
        elif hasattr(module, "dropout") and (hasattr(module, "query") or hasattr(module, "qkv")):
            module.dropout.register_forward_hook(lambda _, __, out, name=name: attention_maps.append((name, out)))
        if isinstance(module, torch.nn.MultiheadAttention):
            module.forward = partial(attend, module, lambda out, name=name: attention_maps.append((name, out)))
    target = value(eager(**inputs))
    gradients = torch.autograd.grad(target, [out for _, out in attention_maps], allow_unused=True)
    return [
        Look(name, out[0].detach().numpy(), np.zeros(out[0].shape) if g is None else g[0].numpy())
        for (name, out), g in zip(attention_maps, gradients, strict=True)
    ]


def attend(
    module: torch.nn.MultiheadAttention, record: Callable[[Tensor], None], query: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Self-attention of torch's module that passes its probabilities to `record`: unit × batch × model, unmasked."""
    units, batch, width = query.shape
    projections = torch.nn.functional.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads = [projection.reshape(units, batch, module.num_heads, -1).permute(1, 2, 0, 3) for projection in projections]
    probabilities = (heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5).softmax(-1)
    record(probabilities)
    mixed = (probabilities @ heads[2]).permute(2, 0, 1, 3).reshape(units, batch, width)
    return module.out_proj(mixed), None


def fused(look: Look) -> Float[np.ndarray, "query key"]:
    """Equation 5, entry by entry."""
    heads, queries, keys = look.attention.shape
    result = np.zeros((queries, keys))
    for i in range(queries):
        for j in range(keys):
            products = [look.attention[h, i, j] * look.gradient[h, i, j] for h in range(heads)]
            result[i, j] = sum(max(product, 0.0) for product in products) / heads
    return result


def normalised(relevance: Float[np.ndarray, "row row"]) -> Float[np.ndarray, "row row"]:
    """Equations 8 and 9; a row of zeros stays zero."""
    residual = relevance - np.eye(len(relevance))
    for row in residual:
        if row.sum() != 0:
            row /= row.sum()
    return residual + np.eye(len(relevance))


def generic(
    steps: Sequence[Sequence[Look]], lengths: Mapping[str, int], normalise: bool = True, within: bool = True
) -> dict[tuple[str, str], Float[np.ndarray, "row unit"]]:
    """Rules 6, 7, 10 and 11 over the steps of a model. Within a step, each stream uses the others as before the step.

    A stream with a residual tower gets, before each of its steps, what the tower gained since the last one.
    """
    r = {(s, q): np.eye(lengths[s]) if s == q else np.zeros((lengths[s], lengths[q])) for s in lengths for q in lengths}
    towers = {s: np.eye(lengths[s]) for s in lengths}
    previous_towers = dict(towers)
    for step in steps:
        if not step[0].tower:
            for s in lengths:
                r[s, s] = r[s, s] + (towers[s] - previous_towers[s])
                previous_towers[s] = towers[s]
        before = {pair: matrix.copy() for pair, matrix in r.items()}
        for look in step:
            s, q, cam = look.looks, look.seen, fused(look)
            if look.tower:
                towers[s] = towers[s] + cam @ towers[s]
            elif s == q:
                for other in lengths:
                    r[s, other] = r[s, other] + cam @ r[s, other]
            else:
                left, right = (
                    normalised(relevance) if normalise else relevance for relevance in (r[s, s], before[q, q])
                )
                r[s, q] = r[s, q] + (left.T @ cam @ right if within else cam)
                r[s, s] = r[s, s] + cam @ before[q, s]
    for s in lengths:
        r[s, s] = r[s, s] - np.eye(lengths[s])
    return r


def rollout(steps: Sequence[Sequence[Look]], lengths: Mapping[str, int]) -> dict[tuple[str, str], np.ndarray]:
    """Attention multiplied through the layers of each stream; for cross-attention, R_ssᵀ A R_qq.

    Half of a tower's layer goes to the tower, and half to the stream in parallel to it.
    """
    r = {(s, s): np.eye(length) for s, length in lengths.items()}
    towers = {s: np.eye(length) for s, length in lengths.items()}
    for step in steps:
        before = dict(r)
        for look in step:
            s, q, mean = look.looks, look.seen, look.attention.mean(0)
            if look.tower:
                r[s, s] = (mean @ towers[s] + r[s, s]) / 2
                towers[s] = (mean + np.eye(lengths[s])) / 2 @ towers[s]
            elif s == q:
                r[s, s] = (mean + np.eye(lengths[s])) / 2 @ r[s, s]
            else:
                r[s, q] = r[s, s].T @ mean @ before[q, q]
    return r


def attribution(
    steps: Sequence[Sequence[Look]], lengths: Mapping[str, int], normalise: bool = False
) -> dict[tuple[str, str], np.ndarray]:
    """Transformer Attribution, where `attention` is the relevance of attention: Π (I + Ā) for self-attention, and Ā of
    the last cross-attention.

    Layers of a tower: (x, t) ← (x + Ā t, t + Ā t); `normalise` divides rows by the row sums of I + Ā and keeps I.
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
