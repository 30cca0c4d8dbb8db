"""The attention that a model runs with, some queries after others where the mask of them all would be too large."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.lazy_mask import CELLS, Described
from clearhead.capture.attention.tiling import Gradients

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import Streamed


def output(call: "Streamed") -> Float[Tensor, "batch query head width"]:
    query, key, value = call.query, call.key, call.value
    parts = [
        _attend(call, rows, keys, query[:, :, rows], key[:, :, keys], value[:, :, keys]) for rows, keys in _spans(call)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def gradients(call: "Streamed", gradient: Float[Tensor, "batch query head width"]) -> Gradients:
    """∂y/∂query, ∂y/∂key and ∂y/∂value."""
    whole, spans = (call.query, call.key, call.value), _spans(call)
    at_once = spans[0] == (slice(0, call.query.shape[2]), slice(0, call.key.shape[2]))
    sums = [] if at_once else [torch.zeros_like(part, dtype=torch.float32) for part in whole]
    for rows, keys in spans:
        places = (rows, keys, keys)
        leaves = [part[:, :, at].detach().requires_grad_() for part, at in zip(whole, places, strict=True)]
        with torch.enable_grad():
            made = _attend(call, rows, keys, *leaves)
        dq, dk, dv = torch.autograd.grad(made, leaves, gradient[:, rows])
        if not sums:
            return dq, dk, dv
        for sum_, at, part in zip(sums, places, (dq, dk, dv), strict=True):
            sum_[:, :, at] += part
    dq, dk, dv = (sum_.to(part.dtype) for sum_, part in zip(sums, whole, strict=True))
    return dq, dk, dv


def _attend(
    call: "Streamed", rows: slice, keys: slice, query: Tensor, key: Tensor, value: Tensor
) -> Float[Tensor, "batch query head width"]:
    assert call.forward is not None
    more = {name: call.cut(part, rows, keys) for name, part in call.more.items()}
    return call.forward(call.module, query, key, value, _mask(call, rows, keys), **more)[0]


def _mask(call: "Streamed", rows: slice, keys: slice) -> Tensor | None:
    if not isinstance(call.mask, Described):
        return call.mask
    return call.mask.cells(slice(0, 1) if _alike(call.mask) else rows, keys)


def _spans(call: "Streamed") -> list[tuple[slice, slice]]:
    """The queries of each piece, and the keys that they may see."""
    batch, _, queries, keys = call.outline.shape
    if not isinstance(call.mask, Described) or _alike(call.mask):
        return [(slice(0, queries), slice(0, keys))]
    size = max(1, CELLS // (batch * keys))
    pieces = [slice(start, min(start + size, queries)) for start in range(0, queries, size)]
    return [(rows, call.mask.span(rows)) for rows in pieces]


def _alike(mask: Described) -> bool:
    """Whether one row says it all."""
    return mask.facts is not None and mask.facts.alike
