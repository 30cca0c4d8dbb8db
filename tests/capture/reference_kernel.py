"""A minimal reference kernel that materialises attention maps; the other kernels are compared with it."""

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
        group_size = call.query.shape[1] // call.key.shape[1]
        key, value = (tensor.repeat_interleave(group_size, 1) for tensor in (call.key, call.value))
        attention = self.attention(call, call.query, key)
        return (attention @ value).transpose(1, 2), (attention.sum(-1),)

    def backward(
        self, call: TiledAttention, gradient: Tensor, reductions: Sequence[MapReduction]
    ) -> tuple[QKVGradients, list[Tensor]]:
        assert torch.allclose(call.kernel_saved_tensors[0], torch.ones_like(call.kernel_saved_tensors[0]))
        with torch.enable_grad():
            leaves = [tensor.clone().requires_grad_() for tensor in (call.query, call.key, call.value)]
            group_size = call.query.shape[1] // call.key.shape[1]
            query, key, value = leaves[0], *(tensor.repeat_interleave(group_size, 1) for tensor in leaves[1:])
            attention = self.attention(call, query, key)
            output = (attention @ value).transpose(1, 2)
            *gradients, attention_gradient = torch.autograd.grad(output, [*leaves, attention], gradient)
        materialised = AttentionCall(0, "", attention=attention.detach(), attention_gradient=attention_gradient)
        return (gradients[0], gradients[1], gradients[2]), [
            self._reduce(reduction, materialised) for reduction in reductions
        ]

    def reduce_maps(
        self, call: TiledAttention, gradient: Tensor | None, reductions: Sequence[MapReduction]
    ) -> list[Tensor]:
        output_gradient = torch.zeros_like(call.query.transpose(1, 2)) if gradient is None else gradient
        return self.backward(call, output_gradient, reductions)[1]

    def _reduce(self, reduction: MapReduction, call: AttentionCall) -> Tensor:
        selected = call if reduction.heads is None else call.select_heads(reduction.heads)
        maps = reduction.compute_maps(selected)
        if reduction.column_weights is not None:
            return pull_columns(reduction.column_weights, maps)
        return maps.sum(3) if reduction.row_weights is None else push_rows(reduction.row_weights, maps)
