"""A kernel as plain as can be, from whole maps: what every other kernel is held to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction, pull_columns, push_rows
from clearhead.capture.attention.tiled import QKVGradients, TiledAttention
from clearhead.capture.tape import AttentionCall


class WholeMaps:
    name = "whole maps"

    def supports(self, call: TiledAttention, reductions: Sequence[MapReduction]) -> bool:
        return not set(call.kwargs) & {"s_aux", "softcap", "position_bias"}

    def attention(self, call: TiledAttention, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT * call.scaling
        if call.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        elif call.mask is not None and call.mask.dtype == torch.bool:
            scores = scores.masked_fill(~call.mask, torch.finfo(torch.float32).min)
        elif call.mask is not None:
            scores = scores + call.mask
        return scores.softmax(-1)

    def forward(self, call: TiledAttention) -> tuple[Tensor, tuple[Tensor, ...]]:
        shares = call.query.shape[1] // call.key.shape[1]
        key, value = (part.repeat_interleave(shares, 1) for part in (call.key, call.value))
        attention = self.attention(call, call.query, key)
        return (attention @ value).transpose(1, 2), (attention.sum(-1),)

    def backward(
        self, call: TiledAttention, gradient: Tensor, reductions: Sequence[MapReduction]
    ) -> tuple[QKVGradients, list[Tensor]]:
        assert torch.allclose(call.kernel_saved_tensors[0], torch.ones_like(call.kernel_saved_tensors[0]))
        with torch.enable_grad():
            leaves = [part.clone().requires_grad_() for part in (call.query, call.key, call.value)]
            shares = call.query.shape[1] // call.key.shape[1]
            query, key, value = leaves[0], *(part.repeat_interleave(shares, 1) for part in leaves[1:])
            attention = self.attention(call, query, key)
            output = (attention @ value).transpose(1, 2)
            *found, slope = torch.autograd.grad(output, [*leaves, attention], gradient)
        made = AttentionCall(0, "", attention=attention.detach(), attention_gradient=slope)
        return (found[0], found[1], found[2]), [self._sum(one, made) for one in reductions]

    def reduce_maps(
        self, call: TiledAttention, gradient: Tensor | None, reductions: Sequence[MapReduction]
    ) -> list[Tensor]:
        slope = torch.zeros_like(call.query.transpose(1, 2)) if gradient is None else gradient
        return self.backward(call, slope, reductions)[1]

    def _sum(self, wanted: MapReduction, call: AttentionCall) -> Tensor:
        own = call if wanted.heads is None else call.select_heads(wanted.heads)
        maps = wanted.compute_maps(own)
        if wanted.column_weights is not None:
            return pull_columns(wanted.column_weights, maps)
        return maps.sum(3) if wanted.row_weights is None else push_rows(wanted.row_weights, maps)
