"""Tiled attention on a GPU: torch's fused kernels compute outputs and most gradients, Triton kernels the reductions.

Maps are rebuilt tile by tile from the log-sum-exp of each row's scores. Where no usable fused kernel returns it
(`fused_sdpa.py`), output and gradients come from the model's own attention, and a Triton kernel computes the
log-sum-exp. The gradients of a long call come from Triton kernels, which compute the reduction of one row in the same
loop (`backward.py`). These reductions and gradients are bit-identical in every run; torch's gradients are so if torch
is set to be deterministic.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention import chunked_sdpa
from clearhead.capture.attention.lazy_mask import LazyMask
from clearhead.capture.attention.materialised import SDPA_COMPATIBLE_KWARGS
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import QKVGradients, TiledAttention
from clearhead.capture.kernels import fused_sdpa
from clearhead.capture.kernels.triton import backward as triton_backward
from clearhead.capture.kernels.triton.reductions import MAX_HEAD_WIDTH, TritonReducer, is_reduction_validated

P = ParamSpec("P")
T = TypeVar("T")
#: With more row vectors than this, torch tiles are faster: they compute each map once for all vectors.
MAX_PUSHED_ROWS = 256
#: The same for column vectors, each of which needs a pass over all maps.
MAX_PULLED_COLUMNS = 64


def _on_call_device(
    method: Callable[Concatenate["TritonKernel", TiledAttention, P], T],
) -> Callable[Concatenate["TritonKernel", TiledAttention, P], T]:
    """Run a method with the GPU of its call as the current one, on which Triton launches: a model may have several."""

    @wraps(method)
    def run(self: "TritonKernel", call: TiledAttention, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.device(call.query.device) if call.query.is_cuda else nullcontext():
            return method(self, call, *args, **kwargs)

    return run


class TritonKernel:
    """Attention kernel for NVIDIA GPUs (the `AttentionKernel` protocol of `tiling.py`)."""

    name = "triton"

    @_on_call_device
    def supports(self, call: TiledAttention, reductions: Sequence[MapReduction]) -> bool:
        """Whether the kernels can compute a call and its reductions, and were validated on its GPU."""
        query = call.query
        value = call.value
        if call.sdpa_forward is None:
            return False
        if not {name for name, argument in call.kwargs.items() if argument is not None} <= SDPA_COMPATIBLE_KWARGS:
            return False
        if not query.dtype == call.key.dtype == value.dtype:
            return False
        if max(query.shape[3], value.shape[3]) > MAX_HEAD_WIDTH.get(query.dtype, 0):
            return False
        if call.causal and query.shape[2] != call.key.shape[2]:
            return False
        if any(_count_vectors(reduction.row_weights) > MAX_PUSHED_ROWS for reduction in reductions):
            return False
        if any(_count_vectors(reduction.column_weights) > MAX_PULLED_COLUMNS for reduction in reductions):
            return False
        if not query.is_cuda:
            return query.dtype != torch.bfloat16  # Triton's interpreter multiplies bfloat16 as integers
        # Without reductions, none of these kernels is compiled.
        return not reductions or is_reduction_validated(query.dtype, query.shape[3], value.shape[3], query.device)

    def forward(self, call: TiledAttention) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        """Compute the output, and the tensors that the backward pass needs; none if no fused kernel was used."""
        kernel = fused_sdpa.select_fused_kernel(call)
        if kernel is None:
            return chunked_sdpa.chunked_sdpa_forward(call), ()
        saved = kernel.forward(call.query, call.key, call.value)
        return saved[0].transpose(1, 2), saved

    @_on_call_device
    def backward(
        self,
        call: TiledAttention,
        gradient: Float[Tensor, "batch query head width"],
        reductions: Sequence[MapReduction],
    ) -> tuple[QKVGradients, list[Tensor]]:
        """Compute the gradients of query, key and value, and the reductions."""
        # Used whatever the reductions are: other kernels round gradients differently.
        if triton_backward.supports_backward(call):
            return self._fused_backward(call, gradient, reductions)
        if call.kernel_saved_tensors:
            gradients = fused_sdpa.get_fused_kernel_used(call).backward(
                gradient.transpose(1, 2), call.query, call.key, call.value, call.kernel_saved_tensors
            )
        else:
            gradients = chunked_sdpa.chunked_sdpa_backward(call, gradient)
        return gradients, self.reduce_maps(call, gradient, reductions)

    def _fused_backward(
        self,
        call: TiledAttention,
        gradient: Float[Tensor, "batch query head width"],
        reductions: Sequence[MapReduction],
    ) -> tuple[QKVGradients, list[Tensor]]:
        """Compute the gradients with the Triton kernels, and one reduction in the same loop."""
        fused_index = _find_fusable_reduction(reductions)
        rows = _make_zero_row(call) if fused_index is None else reductions[fused_index].row_weights
        assert rows is not None
        gradients, push = triton_backward.build_backward(call, gradient.transpose(1, 2))(rows[:, 0])
        remaining = [reduction for i, reduction in enumerate(reductions) if i != fused_index]
        sums = self.reduce_maps(call, gradient, remaining)
        if fused_index is not None:
            sums.insert(fused_index, _divide_by_heads(push))
        return gradients, sums

    @_on_call_device
    def reduce_maps(
        self,
        call: TiledAttention,
        gradient: Float[Tensor, "batch query head width"] | None,
        reductions: Sequence[MapReduction],
    ) -> list[Tensor]:
        """Compute the reductions of a call's maps, without the gradients of query, key and value."""
        if not reductions:
            return []
        if gradient is not None:
            gradient = _make_vectors_contiguous(gradient.detach().transpose(1, 2))
        query, key, value = (_make_vectors_contiguous(tensor) for tensor in (call.query, call.key, call.value))
        reducer = TritonReducer(query, key, value, gradient, None, call.scaling, **_get_mask_args(call))
        if call.kernel_saved_tensors:
            batch, heads, queries, _ = reducer.map_shape  # a kernel may round the number of queries up
            lse = call.kernel_saved_tensors[1].reshape(batch, heads, -1)[:, :, :queries].contiguous()
            reducer = replace(reducer, lse=lse)
        else:
            reducer = reducer.with_computed_lse()
        return [_run_reduction(reducer, reduction) for reduction in reductions]


def _find_fusable_reduction(reductions: Sequence[MapReduction]) -> int | None:
    """The index of the reduction that the backward kernels can compute: one row, positive part, all heads."""
    for i, reduction in enumerate(reductions):
        is_positive_row = reduction.quantity == "positive" and _count_vectors(reduction.row_weights) == 1
        if is_positive_row and reduction.heads is None:
            return i
    return None


def _make_zero_row(call: TiledAttention) -> Float[Tensor, "batch 1 token"]:
    """Return weights of zero: a row to push where only the gradients are needed."""
    return torch.zeros(len(call.query), 1, call.query.shape[2], device=call.query.device)


def _make_vectors_contiguous(x: Tensor) -> Tensor:
    """The kernels require that the elements of each vector are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _get_mask_args(call: TiledAttention) -> dict[str, Any]:
    """The mask as arguments of `TritonReducer`; as a window if it is one, so that kernels visit no other keys."""
    if not isinstance(call.mask, LazyMask):
        return {"causal": call.causal, "mask": call.mask}
    band = call.mask.band_mask
    if band is None:
        return {"mask": call.mask.full_mask}
    if band.window_after is None:
        return {"mask": band.padding}
    window = None if band.window_before is None else band.window_before + 1 + band.window_after
    return {"causal": True, "lookahead": band.window_after, "window": window, "mask": band.padding}


def _count_vectors(weights: Tensor | None) -> int:
    """Return the number of row or column vectors of a reduction; 0 without weights."""
    return 0 if weights is None else weights.shape[1]


def _run_reduction(reducer: TritonReducer, reduction: MapReduction) -> Tensor:
    """Compute one reduction, in the layout that `MapReduction` documents."""
    if reduction.heads is not None:
        reducer = reducer.select_heads(reduction.heads)
    if reduction.column_weights is not None:
        pulled = [
            _divide_by_heads(reducer.sum_over_keys(reduction.quantity, column))
            for column in reduction.column_weights.unbind(1)
        ]
        return pulled[0] if len(pulled) == 1 else torch.cat(pulled, 2).sum(1, keepdim=True)
    if reduction.row_weights is None:
        return reducer.sum_over_keys(reduction.quantity)
    if reduction.row_weights.shape[1] == 1:
        row = reduction.row_weights[:, 0]
        return _divide_by_heads(reducer.sum_over_queries(row, reduction.quantity, reduction.has_negative_rows))
    return reducer.sum_head_mean_over_queries(reduction.row_weights, reduction.quantity)[:, None]


def _divide_by_heads(per_head: Float[Tensor, "batch head unit"]) -> Float[Tensor, "batch head 1 unit"]:
    """One row or column per head, scaled so that the sum over heads is that of the mean map."""
    return per_head[:, :, None] / per_head.shape[1]
