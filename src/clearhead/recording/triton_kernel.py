"""Streaming attention on a GPU: torch's own kernels forward and for the usual gradients, Triton's for the sums.

Flash attention and cuDNN say the log-sum-exp of each row's scores, from which the maps can be rebuilt tile by tile, and
in float32 the memory-efficient kernel does; the one runs that torch would choose. Where none can be used (masks that
are neither causal nor absent, grouped heads in float32) the output and the gradients are those of the attention that
the model runs with, whichever kernel that is, and the log-sum-exp is made by a kernel of ours. Our sums are the same
bytes each time; gradients are, where torch is told to be deterministic.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend

from clearhead.recording import pieces
from clearhead.recording.masks import Described
from clearhead.recording.reduce import Reduce
from clearhead.recording.streaming import Gradients, Streamed
from clearhead.recording.triton_sums import WIDEST, Rebuilt, proven
from clearhead.recording.whole_maps import KNOWN

#: More rows than these are pushed by tiles of torch, which make each map once for all of them.
MOST_ROWS = 256
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
aten = torch.ops.aten


class TritonKernel:
    name = "triton"

    def takes(self, call: Streamed, reductions: Sequence[Reduce]) -> bool:
        query, key, value = call.query, call.key, call.value
        told = {name for name, part in call.more.items() if part is not None} <= KNOWN
        widest = max(query.shape[3], value.shape[3])
        fits = widest <= WIDEST.get(query.dtype, 0) and query.dtype == key.dtype == value.dtype
        square = not call.causal or query.shape[2] == key.shape[2]
        few = all(one.rows is None or one.rows.shape[1] <= MOST_ROWS for one in reductions)
        if call.forward is None or not (told and fits and square and few):
            return False
        if not query.is_cuda:
            return query.dtype != torch.bfloat16  # which Triton's interpreter multiplies as the integers it is kept in
        return proven(query.dtype, query.shape[3], value.shape[3], query.device)

    def output(self, call: Streamed) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        query, key, value = call.query, call.key, call.value
        backend = _backend(call)
        if backend is None:
            return pieces.output(call), ()
        saved = _fused(backend, query, key, value, call.causal, call.scaling)
        return saved[0].transpose(1, 2), saved

    def backward(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"], reductions: Sequence[Reduce]
    ) -> tuple[Gradients, list[Tensor]]:
        return _gradients(call, gradient), self.reduced(call, gradient, reductions)

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


def _backend(call: Streamed) -> SDPBackend | None:
    """Which of those that say the log-sum-exp torch would choose."""
    query, key, value = call.query, call.key, call.value
    wide = query.shape[3] == value.shape[3] and query.shape[3] % 8 == 0
    grouped = query.shape[1] != key.shape[1]
    saying = _saying(query.dtype, grouped)
    if not (query.is_cuda and saying and call.mask is None and wide):
        return None
    with torch.enable_grad():  # some kernels have no backward pass for some shapes
        chosen = torch._fused_sdp_choice(
            query.detach().requires_grad_(), key, value, None, 0.0, call.causal, scale=call.scaling, enable_gqa=grouped
        )
    backend = next((one for one in saying if one.value == chosen), None)
    known = backend is not None and _says_lse(backend, query.dtype, query.shape[3], query.device)
    return backend if known else None


def _saying(dtype: torch.dtype, grouped: bool) -> tuple[SDPBackend, ...]:
    """The kernels that say the log-sum-exp of such numbers."""
    if dtype in (torch.bfloat16, torch.float16):
        return FLASH, CUDNN
    return () if grouped or dtype != torch.float32 else (EFFICIENT,)


def _fused(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and what the backward pass wants to know of dropout, which there is none of."""
    if backend == EFFICIENT:
        how = {"is_causal": causal, "scale": scale}
        return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, **how)
    if backend == CUDNN:
        made = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, is_causal=causal, scale=scale)
    else:
        made = aten._scaled_dot_product_flash_attention(query, key, value, is_causal=causal, scale=scale)
    output, lse, _, _, _, _, seed, offset, _ = made
    return output, lse, seed, offset


@cache
def _says_lse(backend: SDPBackend, dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether what a kernel calls the log-sum-exp is that: of scaled scores, to the base e, row by row."""
    draw = torch.Generator(device).manual_seed(0)
    query, key = (torch.randn(1, 2, 128, width, generator=draw, device=device).to(dtype) for _ in range(2))
    hidden = torch.ones(128, 128, dtype=torch.bool, device=device).triu(1)
    scores = (query.double() @ key.double().mT * width**-0.5).masked_fill(hidden, -torch.inf)
    said = _fused(backend, query, key, key, True, width**-0.5)[1].reshape(1, 2, -1)[:, :, :128]
    return bool((said - scores.logsumexp(-1)).abs().max() < 1e-2)


def _gradients(call: Streamed, gradient: Float[Tensor, "batch query head width"]) -> Gradients:
    query, key, value = call.query, call.key, call.value
    if not call.saved:
        return pieces.gradients(call, gradient)
    output, lse, seed, offset = call.saved
    sizes = {"max_q": query.shape[2], "max_k": key.shape[2], "cum_seq_q": None, "cum_seq_k": None}
    how = {"dropout_p": 0.0, "is_causal": call.causal, "scale": call.scaling}
    drawn = {"philox_seed": seed, "philox_offset": offset}
    slope = gradient.transpose(1, 2)
    if query.dtype == torch.float32:  # the memory-efficient kernel's
        backward = aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        dq, dk, dv, _ = backward(
            slope, query, key, value, None, output, lse, seed, offset, 0.0, wanted, call.causal, scale=call.scaling
        )
    elif lse.dim() == 4:  # cuDNN's
        backward = aten._scaled_dot_product_cudnn_attention_backward
        dq, dk, dv = backward(slope, query, key, value, output, lse, attn_bias=None, **drawn, **sizes, **how)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = backward(slope, query, key, value, output, lse, **drawn, **sizes, **how)
    return dq, dk, dv


def _reduced(rebuilt: Rebuilt, one: Reduce) -> Tensor:
    if one.rows is None:
        return rebuilt.over_keys(one.of)
    if one.rows.shape[1] == 1:
        return rebuilt.over_queries(one.rows[:, 0], one.of)[:, :, None] / rebuilt.shape[1]
    return rebuilt.joined(one.rows, one.of)[:, None]
