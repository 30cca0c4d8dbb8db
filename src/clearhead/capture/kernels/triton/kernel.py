"""Streaming attention on a GPU: torch's own kernels forward and for most gradients, Triton's for the sums.

Maps are rebuilt, tile by tile, from the log-sum-exp of each row's scores. Where none of torch's kernels says it that
can be used (`fused_sdpa.py`) the output and the gradients are those of the attention that the model runs with,
whichever kernel that is, and the log-sum-exp is made by a kernel of ours. The gradients of a long call are ours, and a
row that is to be pushed down is made beside them (`backward.py`). Our sums, and those gradients, are the same bytes
each time; torch's gradients are, where torch is told to be deterministic.
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
from clearhead.capture.attention.lazy_mask import Described
from clearhead.capture.attention.materialised import KNOWN
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiled import Gradients, Streamed
from clearhead.capture.kernels import fused_sdpa
from clearhead.capture.kernels.triton import backward as triton_backward
from clearhead.capture.kernels.triton.reductions import WIDEST, Rebuilt, proven

P = ParamSpec("P")
T = TypeVar("T")
#: More rows than these are pushed by tiles of torch, which make each map once for all of them.
MOST_ROWS = 256
#: The same of columns, each of which takes a walk of its own.
MOST_COLUMNS = 64


def _there(
    method: Callable[Concatenate["TritonKernel", Streamed, P], T],
) -> Callable[Concatenate["TritonKernel", Streamed, P], T]:
    """Triton launches on the GPU that is the current one, wherever its tensors are: a model may have several."""

    @wraps(method)
    def run(self: "TritonKernel", call: Streamed, *more: P.args, **named: P.kwargs) -> T:
        with torch.cuda.device(call.query.device) if call.query.is_cuda else nullcontext():
            return method(self, call, *more, **named)

    return run


class TritonKernel:
    name = "triton"

    @_there
    def takes(self, call: Streamed, reductions: Sequence[Reduce]) -> bool:
        query, key, value = call.query, call.key, call.value
        told = {name for name, part in call.more.items() if part is not None} <= KNOWN
        widest = max(query.shape[3], value.shape[3])
        fits = widest <= WIDEST.get(query.dtype, 0) and query.dtype == key.dtype == value.dtype
        square = not call.causal or query.shape[2] == key.shape[2]
        few = all(_count(one.rows) <= MOST_ROWS and _count(one.columns) <= MOST_COLUMNS for one in reductions)
        if call.forward is None or not (told and fits and square and few):
            return False
        if not query.is_cuda:
            return query.dtype != torch.bfloat16  # which Triton's interpreter multiplies as the integers it is kept in
        # where no sums are wanted, nothing need be compiled for them
        return not reductions or proven(query.dtype, query.shape[3], value.shape[3], query.device)

    def output(self, call: Streamed) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        kernel = fused_sdpa.chosen(call)
        if kernel is None:
            return chunked_sdpa.output(call), ()
        saved = kernel.forward(call.query, call.key, call.value)
        return saved[0].transpose(1, 2), saved

    @_there
    def backward(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"], reductions: Sequence[Reduce]
    ) -> tuple[Gradients, list[Tensor]]:
        slope = gradient.transpose(1, 2)
        if triton_backward.takes(call):  # whatever is asked for: other kernels would round gradients otherwise
            beside = _beside(reductions)
            rows = _no_row(call) if beside is None else reductions[beside].rows
            assert rows is not None
            gradients, push = triton_backward.of_call(call, slope)(rows[:, 0])
            sums = self.reduced(call, gradient, [one for i, one in enumerate(reductions) if i != beside])
            if beside is not None:
                sums.insert(beside, _of_mean(push))
            return gradients, sums
        if call.saved:
            gradients = fused_sdpa.ran(call).backward(slope, call.query, call.key, call.value, call.saved)
        else:
            gradients = chunked_sdpa.gradients(call, gradient)
        return gradients, self.reduced(call, gradient, reductions)

    @_there
    def reduced(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"] | None, reductions: Sequence[Reduce]
    ) -> list[Tensor]:
        if not reductions:
            return []
        slope = None if gradient is None else _in_rows(gradient.detach().transpose(1, 2))
        query, key, value = (_in_rows(part) for part in (call.query, call.key, call.value))
        rebuilt = Rebuilt(query, key, value, slope, None, call.scaling, **_seen(call))
        if call.saved:
            batch, heads, queries, _ = rebuilt.shape  # a kernel may round the number of queries up
            lse = call.saved[1].reshape(batch, heads, -1)[:, :, :queries].contiguous()
            rebuilt = replace(rebuilt, lse=lse)
        else:
            rebuilt = rebuilt.with_lse()
        return [_reduced(rebuilt if one.heads is None else rebuilt.of_heads(one.heads), one) for one in reductions]


def _beside(reductions: Sequence[Reduce]) -> int | None:
    """Which sum can be made beside the gradients: one row pushed through the positive part of all heads."""
    for i, one in enumerate(reductions):
        if one.of == "positive" and one.heads is None and one.rows is not None and one.rows.shape[1] == 1:
            return i
    return None


def _no_row(call: Streamed) -> Float[Tensor, "batch 1 token"]:
    return torch.zeros(len(call.query), 1, call.query.shape[2], device=call.query.device)


def _in_rows(x: Tensor) -> Tensor:
    """The kernels read the numbers of a vector one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _seen(call: Streamed) -> dict[str, Any]:
    """What is seen, in a few words where they suffice: the kernels walk along no more than a window then."""
    if not isinstance(call.mask, Described):
        return {"causal": call.causal, "mask": call.mask}
    facts = call.mask.facts
    if facts is None:
        return {"mask": call.mask.whole}
    if facts.after is None:
        return {"mask": facts.padding}
    window = None if facts.before is None else facts.before + 1 + facts.after
    return {"causal": True, "ahead": facts.after, "window": window, "mask": facts.padding}


def _count(part: Tensor | None) -> int:
    return 0 if part is None else part.shape[1]


def _reduced(rebuilt: Rebuilt, one: Reduce) -> Tensor:
    if one.columns is not None:
        pulled = [_of_mean(rebuilt.over_keys(one.of, column)) for column in one.columns.unbind(1)]
        return pulled[0] if len(pulled) == 1 else torch.cat(pulled, 2).sum(1, keepdim=True)
    if one.rows is None:
        return rebuilt.over_keys(one.of)
    if one.rows.shape[1] == 1:
        return _of_mean(rebuilt.over_queries(one.rows[:, 0], one.of))
    return rebuilt.joined(one.rows, one.of)[:, None]


def _of_mean(one: Float[Tensor, "batch head unit"]) -> Float[Tensor, "batch head 1 unit"]:
    """One row or column, so that the sum over heads is that of the mean map (`reduce.push`, `reduce.pull`)."""
    return one[:, :, None] / one.shape[1]
