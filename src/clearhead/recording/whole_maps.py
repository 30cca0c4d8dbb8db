"""Whole maps of attention on a CPU, with as little new memory as can be: to touch it first is most of what a map costs.

    A = softmax(Q Kᵀ s + mask),  O = A V;     ∂y/∂A = ∂y/∂O Vᵀ,  ∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A)

Scores become attention where they stand, sample by sample, and ∂y/∂A becomes ∂y/∂S where it stands once everybody has
seen it; its memory is the next layer's. This is for models that run with torch's own kernel, which heeds a scale and a
mask and nothing else, so that the formula is exact. Other attention is the model's own eager one (`interface.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

#: What a model may say about a call beside its mask: torch's own kernel heeds the first, and need not know the others.
KNOWN = frozenset({"scaling", "dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"})
KNOWN |= {"deterministic", "output_attentions"}


@dataclass
class Memory:
    """Where ∂y/∂A of one call lies."""

    #: Shared by the calls of a pass: maps that nobody looks at any more.
    spare: list[Tensor] = field(default_factory=list)
    #: Whether everybody has seen it, so that it may be written over.
    seen: bool = False

    def take(self, like: Tensor) -> Tensor:
        for place, one in enumerate(self.spare):
            if one.shape == like.shape and one.dtype == like.dtype:
                return self.spare.pop(place)
        return torch.empty_like(like)


def exact(query: Tensor, mask: Tensor | None, more: Mapping[str, Any]) -> bool:
    """Whether the formula is what torch's own kernel computes, and nobody must see the steps of it.

    In float64 many models' eager attention has a softmax in float32, which is then theirs.
    """
    plain = query.device.type == "cpu" and query.dtype == torch.float32
    told = {name for name, part in more.items() if part is not None} <= KNOWN
    added = mask is None or (mask.is_floating_point() and not mask.requires_grad)
    watched = torch._C._len_torch_function_stack() > 0 or torch._C._are_functorch_transforms_active()
    return plain and told and added and not watched


def attend(
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key width"],
    mask: Float[Tensor, "#batch #head query key"] | None,
    scaling: float | None,
    memory: Memory,
) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"]]:
    """The output and the attention, both in the graph."""
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    attention: Tensor = _Maps.apply(query, key, mask, scale, memory)
    output: Tensor = _Mixed.apply(attention, value, memory)
    return output, attention


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, memory: Memory) -> Tensor:
        batch, heads, queries, _ = query.shape
        attention = query.new_empty(batch, heads, queries, key.shape[2])
        for i, scores in enumerate(attention):
            # views of one sample go to the matrix product as they lie; those of a batch would be copied
            scores.baddbmm_(query[i], each_head(key[i], heads).mT, beta=0, alpha=scale)
            if mask is not None:
                scores += mask[i if len(mask) > 1 else 0]
            torch.softmax(scores, -1, out=scores)
        ctx.save_for_backward(query, key, attention)
        ctx.scale, ctx.memory = scale, memory
        return attention

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, attention = ctx.saved_tensors
        (slope,), memory, heads, shared = slopes, ctx.memory, query.shape[1], key.shape[1]
        if _several(slope):
            steep = torch._softmax_backward_data(slope, attention, -1, attention.dtype)
            keys = key.repeat_interleave(heads // shared, 1)
            found = joined_heads((steep.mT @ query) * ctx.scale, shared, 1)
            return (steep @ keys) * ctx.scale, found, None, None, None
        steep = slope if memory.seen else torch.empty_like(slope)
        into_query, into_key = as_models_have(query), as_models_have(key)
        for i, own in enumerate(steep):
            torch.ops.aten._softmax_backward_data.out(slope[i], attention[i], -1, own.dtype, grad_input=own)
            torch.mul(own @ each_head(key[i], heads), ctx.scale, out=into_query[i])
            # a map that stands on the right is read as it lies
            torch.mul(joined_heads(query[i].mT @ own, shared, 0).mT, ctx.scale, out=into_key[i])
        if memory.seen:
            memory.spare.append(slope)
        return into_query, into_key, None, None, None


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, value: Tensor, memory: Memory) -> Tensor:
        batch, heads, queries, _ = attention.shape
        output = value.new_empty(batch, queries, heads, value.shape[3])
        for i, one in enumerate(attention):
            output[i] = torch.bmm(one, each_head(value[i], heads)).transpose(0, 1)
        ctx.save_for_backward(attention, value)
        ctx.memory = memory
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        attention, value = ctx.saved_tensors
        heads, shared = attention.shape[1], value.shape[1]
        slope = slopes[0].transpose(-3, -2)
        if _several(slope):
            values = value.repeat_interleave(heads // shared, 1)
            return slope @ values.mT, joined_heads(attention.mT @ slope, shared, 1), None
        into_attention, into_value = ctx.memory.take(attention), as_models_have(value)
        for i, one in enumerate(slope):
            torch.bmm(one, each_head(value[i], heads).mT, out=into_attention[i])
            into_value[i] = joined_heads(one.mT @ attention[i], shared, 0).mT
        return into_attention, into_value, None


def _several(slope: Tensor) -> bool:
    """Whether gradients of several targets come at once, as a batch that nothing can be written into."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(slope) or functorch.is_batchedtensor(slope)


def as_models_have(
    part: Float[Tensor, "batch some token width"], heads: int | None = None
) -> Float[Tensor, "batch head token width"]:
    """Room for its gradient, which lies as batch × token × head × width: so it goes on to a linear map uncopied."""
    batch, own, tokens, width = part.shape
    return part.new_empty(batch, tokens, heads or own, width).transpose(1, 2)


def each_head(shared: Float[Tensor, "kv_head key width"], heads: int) -> Float[Tensor, "head key width"]:
    """Keys or values of one sample, one for each head."""
    return shared if len(shared) == heads else shared.repeat_interleave(heads // len(shared), 0)


def joined_heads(each: Tensor, shared: int, where: int) -> Tensor:
    """What comes to heads that share a key is the key's; `where` the heads are."""
    if each.shape[where] == shared:
        return each
    return each.reshape(*each.shape[:where], shared, -1, *each.shape[where + 1 :]).sum(where + 1)
