"""Runs torch's attention kernel on chunks of queries where the full mask would be too large."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.lazy_mask import MAX_MASK_ELEMENTS, LazyMask
from clearhead.capture.attention.tiling import QKVGradients

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import TiledAttention


def chunked_sdpa_forward(call: "TiledAttention") -> Float[Tensor, "batch query head width"]:
    """Compute the output of a call with torch's kernel, chunk by chunk."""
    query = call.query
    key = call.key
    value = call.value
    outputs = [
        _attend_chunk(
            call, query_slice, key_slice, query[:, :, query_slice], key[:, :, key_slice], value[:, :, key_slice]
        )
        for query_slice, key_slice in _list_chunk_spans(call)
    ]
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, 1)


def chunked_sdpa_backward(call: "TiledAttention", grad_output: Float[Tensor, "batch query head width"]) -> QKVGradients:
    """Compute ∂y/∂query, ∂y/∂key and ∂y/∂value with torch's kernel, chunk by chunk; sums are in float32."""
    qkv = (call.query, call.key, call.value)
    spans = _list_chunk_spans(call)
    is_single_chunk = spans[0] == (slice(0, call.query.shape[2]), slice(0, call.key.shape[2]))
    sums: list[Tensor] = []
    if not is_single_chunk:
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in qkv]
    for query_slice, key_slice in spans:
        slices = (query_slice, key_slice, key_slice)
        leaves = [tensor[:, :, slice_].detach().requires_grad_() for tensor, slice_ in zip(qkv, slices, strict=True)]
        with torch.enable_grad():
            output = _attend_chunk(call, query_slice, key_slice, *leaves)
        dq, dk, dv = torch.autograd.grad(output, leaves, grad_output[:, query_slice])
        if is_single_chunk:
            return dq, dk, dv
        for sum_, slice_, gradient in zip(sums, slices, (dq, dk, dv), strict=True):
            sum_[:, :, slice_] += gradient
    dq, dk, dv = (sum_.to(tensor.dtype) for sum_, tensor in zip(sums, qkv, strict=True))
    return dq, dk, dv


def _attend_chunk(
    call: "TiledAttention", query_slice: slice, key_slice: slice, query: Tensor, key: Tensor, value: Tensor
) -> Float[Tensor, "batch query head width"]:
    """Run torch's kernel on one chunk, with the chunk's slice of every argument that has query and key axes."""
    assert call.sdpa_forward is not None
    kwargs = {name: call.slice_argument(argument, query_slice, key_slice) for name, argument in call.kwargs.items()}
    mask = _get_chunk_mask(call, query_slice, key_slice)
    return call.sdpa_forward(call.module, query, key, value, mask, **kwargs)[0]


def _get_chunk_mask(call: "TiledAttention", query_slice: slice, key_slice: slice) -> Tensor | None:
    """Return the mask of one chunk, one row if all queries share it; a mask that is not lazy is returned whole."""
    if not isinstance(call.mask, LazyMask):
        return call.mask
    if _is_same_for_all_queries(call.mask):
        return call.mask.compute_tile(slice(0, 1), key_slice)
    return call.mask.compute_tile(query_slice, key_slice)


def _list_chunk_spans(call: "TiledAttention") -> list[tuple[slice, slice]]:
    """The queries of each chunk, and the keys that they can see."""
    batch, _, queries, keys = call.meta_attention.shape
    if not isinstance(call.mask, LazyMask) or _is_same_for_all_queries(call.mask):
        return [(slice(0, queries), slice(0, keys))]
    size = max(1, MAX_MASK_ELEMENTS // (batch * keys))
    query_slices = [slice(start, min(start + size, queries)) for start in range(0, queries, size)]
    return [(query_slice, call.mask.find_key_span(query_slice)) for query_slice in query_slices]


def _is_same_for_all_queries(mask: LazyMask) -> bool:
    """Whether one row of the mask holds for all queries."""
    return mask.band_mask is not None and mask.band_mask.is_same_for_all_queries
