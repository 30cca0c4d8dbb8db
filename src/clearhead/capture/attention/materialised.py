"""Whole maps of attention, beside the output that the model makes when nobody looks.

    A = softmax(Q Kᵀ s + mask),  O = A V;     ∂y/∂A = ∂y/∂O Vᵀ,  ∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A)

The output is that of the kernel which the model runs with, to the last bit: where attention is sharp, layers above make
much of the least rounding. So they do of gradients: those of queries, keys and values are the formula's, but in half
precision, where they are rounded, too, they are made as a streaming pass makes them. Maps, and ∂y/∂A, are float32's at
least.

Maps come from the model's own eager attention; or, on a CPU, for models that run with torch's own kernel, which heeds a
scale and a mask and nothing else, from the formula, with as little new memory as can be: to touch it first is most of
what a map costs. Scores become attention where they stand, sample by sample, and ∂y/∂A becomes ∂y/∂S where it stands
once everybody has seen it; its memory is the next layer's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._device import DeviceContext

from clearhead.capture.attention.lazy_mask import Seeing, widened
from clearhead.capture.attention.tiled import Streamed, reached, wide

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


@dataclass(frozen=True)
class Masks:
    """What hides keys, as eager attention has it, as torch's kernel has it, and as a streaming pass would have it."""

    eager: Float[Tensor, "batch 1 query key"] | None
    kernels: Tensor | None
    tiles: Callable[[], Tensor | None]
    seeing: Seeing = None


def as_ever(
    eager: Callable[..., tuple[Tensor, Tensor]],
    kernel: Callable[..., tuple[Tensor, Any]] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    more: Mapping[str, Any],
) -> Float[Tensor, "batch query head width"]:
    """The output as the model makes it when nobody looks. kernel: torch's own, where the model runs with it."""
    made, mask = (eager, masks.eager) if kernel is None else (kernel, masks.kernels)
    output: Tensor = made(module, query, key, value, mask, **more)[0]
    return output


def attend(
    eager: Callable[..., tuple[Tensor, Tensor]],
    kernel: Callable[..., tuple[Tensor, Any]] | None,
    module: nn.Module,
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key width"],
    masks: Masks,
    more: Mapping[str, Any],
    memory: Memory,
    streamed: Streamed | None = None,
) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"], Seeing]:
    """The output, as ever, and the attention, both in the graph; and which queries have any, where some have none.

    streamed: the same call in a streaming pass, whose gradients the output is to have
    """
    mask, format_ = masks.eager, wide(query.dtype)
    # what dropout leaves out must be the same in both
    if watched() or more.get("dropout") or (kernel is None and query.dtype == format_):
        return *eager(module, query, key, value, mask, **more), None

    def rebuilt(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        parts = (part.to(format_) for part in (query, key, value))
        return eager(module, *parts, widened(mask, format_), **more)

    with torch.no_grad():
        made = None if streamed is None else streamed.hold(query, key, value)
        if made is None:
            made = as_ever(eager, kernel, module, query, key, value, masks, more)
    if streamed is not None:
        output, attention = beside(made, streamed, query, key, value, rebuilt)
    elif kernel is not None and exact(query, mask, more):
        output, attention = in_place(made, query, key, value, mask, more.get("scaling"), memory)
    else:
        output, attention = rebuilt(query, key)
        output = _AsMade.apply(output, made)
    seeing = None if kernel is None else masks.seeing
    if seeing is not None and output.requires_grad:
        output.register_hook(partial(torch.mul, seeing.transpose(1, 2)))
    return output, attention, seeing


def watched() -> bool:
    """Whether somebody must see every step that is made (to say where tensors are made is not to look)."""
    modes = torch.overrides._get_current_function_mode_stack()
    return torch._C._are_functorch_transforms_active() or any(not isinstance(mode, DeviceContext) for mode in modes)


def exact(query: Tensor, mask: Tensor | None, more: Mapping[str, Any]) -> bool:
    """Whether the formula is what torch's own kernel computes, and memory is what maps cost."""
    plain = query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)
    told = {name for name, part in more.items() if part is not None} <= KNOWN
    added = mask is None or (mask.is_floating_point() and mask.dim() == 4 and not mask.requires_grad)
    return plain and told and added


def in_place(
    output: Float[Tensor, "batch query head width"],
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key width"],
    mask: Float[Tensor, "#batch #head query key"] | None,
    scaling: float | None,
    memory: Memory,
) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"]]:
    """The output, which a kernel made, and the attention, both in the graph."""
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    attention: Tensor = _Maps.apply(query, key, mask, scale, memory)
    return _Mixed.apply(output, attention, value, memory), attention


#: Queries and keys → the output and the attention.
Rebuilt = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Found(NamedTuple):
    """What a backward pass found when it came to the output: ∂y/∂A by way of it, ∂y/∂query and ∂y/∂key."""

    slope: Float[Tensor, "*target batch head query key"]
    into_query: Tensor
    into_key: Tensor


def beside(
    output: Float[Tensor, "batch query head width"],
    streamed: Streamed,
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key width"],
    rebuilt: Rebuilt,
) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"]]:
    """The output, with the gradients of a streaming pass, and the attention, both in the graph."""
    found: list[Found] = []
    attention: Tensor = _Shown.apply(query, key, rebuilt, found)
    return _AsStreamed.apply(output, attention, value, streamed, found), attention


class _Shown(torch.autograd.Function):
    """Maps that ∂y/∂A comes to on its way to queries and keys, whose gradients are found by then."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, rebuilt: Rebuilt, found: list[Found]) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.rebuilt, ctx.found = rebuilt, found
        return rebuilt(query, key)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        slope, found = slopes[0], ctx.found.pop() if ctx.found else None
        if found is not None and slope is found.slope:
            return found.into_query, found.into_key, None, None
        # something else was made of the attention, too: by the model, or by whoever recorded it
        others = slope if found is None else slope - found.slope
        query, key = (part.detach().requires_grad_() for part in ctx.saved_tensors)
        with torch.enable_grad():
            attention = ctx.rebuilt(query, key)[1]
        into_query, into_key = torch.autograd.grad(attention, (query, key), others)
        if found is not None:
            into_query, into_key = into_query + found.into_query, into_key + found.into_key
        return into_query, into_key, None, None


class _AsStreamed(torch.autograd.Function):
    """What a kernel made, with the gradients of a streaming pass, and ∂y/∂A."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, attention: Tensor, value: Tensor, streamed: Streamed, found: list[Found]
    ) -> Tensor:
        ctx.streamed, ctx.found, ctx.heads = streamed, found, attention.shape[1]
        return output.clone()  # itself it may be held for the way back, and somebody may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        streamed, gradient, format_ = ctx.streamed, slopes[0], wide(slopes[0].dtype)
        into_query, into_key, into_value = reached(streamed, gradient)
        values = streamed.value.repeat_interleave(ctx.heads // streamed.value.shape[1], 1)
        slope = gradient.transpose(-3, -2).to(format_) @ values.mT.to(format_)
        ctx.found[:] = [Found(slope, into_query, into_key)]
        return None, slope, into_value, None, None


class _AsMade(torch.autograd.Function):
    """What a kernel made, with the gradient of what stands for it."""

    @staticmethod
    def forward(ctx: Any, rebuilt: Tensor, output: Tensor) -> Tensor:
        ctx.format = rebuilt.dtype
        return output.clone()  # itself it would come out as a view, which nobody may change in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].to(ctx.format), None


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
    def forward(ctx: Any, output: Tensor, attention: Tensor, value: Tensor, memory: Memory) -> Tensor:
        ctx.save_for_backward(attention, value)
        ctx.memory = memory
        return output.clone()  # itself it would come out as a view, which nobody may change in place

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        attention, value = ctx.saved_tensors
        heads, shared = attention.shape[1], value.shape[1]
        slope = slopes[0].transpose(-3, -2)
        if _several(slope):
            values = value.repeat_interleave(heads // shared, 1)
            return None, slope @ values.mT, joined_heads(attention.mT @ slope, shared, 1), None
        into_attention, into_value = ctx.memory.take(attention), as_models_have(value)
        for i, one in enumerate(slope):
            torch.bmm(one, each_head(value[i], heads).mT, out=into_attention[i])
            into_value[i] = joined_heads(one.mT @ attention[i], shared, 0).mT
        return None, into_attention, into_value, None


def _several(slope: Tensor) -> bool:
    """Whether gradients of several targets come at once, as a batch that nothing can be written into."""
    return torch._C._functorch.is_batchedtensor(slope)


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
