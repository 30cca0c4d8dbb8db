"""Materialised attention maps together with the unchanged output of the model's own kernel.

    A = softmax(Q Kᵀ s + mask),  O = A V;     ∂y/∂A = ∂y/∂O Vᵀ,  ∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A)

The output is bitwise that of the kernel which the model runs with: where attention is sharp, later layers amplify the
smallest rounding difference. The same holds for gradients: those of queries, keys and values follow the formula, but in
half precision, where they are rounded, too, they are computed as in a tiled pass. Maps and ∂y/∂A have at least float32.

Maps come from the model's own eager attention. On a CPU, for models that run with torch's own kernel, which takes a
scale and a mask and nothing else, they come from the formula with as little new memory as possible: the first access to
new memory is most of the cost of a map. The softmax is computed in place, sample by sample; ∂y/∂A is overwritten by
∂y/∂S once every method has read it, and its memory is reused for the next layer.
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

from clearhead.capture.attention.lazy_mask import HasVisibleKey, upcast_mask
from clearhead.capture.attention.tiled import TiledAttention, dispatch_backward, get_accumulation_dtype

#: Arguments of an attention call that the formula covers: it uses the scaling, and the others do not affect it.
SDPA_COMPATIBLE_KWARGS = frozenset(
    {"scaling", "dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"}
)
SDPA_COMPATIBLE_KWARGS |= {"deterministic", "output_attentions"}


@dataclass
class GradientBuffer:
    """Memory of ∂y/∂A of one call.

    Attributes:
        free_buffers: Memory that is no longer in use, shared by the calls of a pass.
        can_overwrite: Whether every method has read the gradient, so that its memory may be overwritten.
    """

    free_buffers: list[Tensor] = field(default_factory=list)
    can_overwrite: bool = False

    def allocate(self, reference: Tensor) -> Tensor:
        """Return uninitialised memory like `reference`, from the free buffers if one fits."""
        for index, buffer in enumerate(self.free_buffers):
            if buffer.shape == reference.shape and buffer.dtype == reference.dtype:
                return self.free_buffers.pop(index)
        return torch.empty_like(reference)


@dataclass(frozen=True)
class MaskForms:
    """The mask of a call in the forms of eager attention, of torch's kernel, and of a tiled pass.

    Attributes:
        eager_mask: Additive mask.
        sdpa_mask: Mask for torch's kernel.
        make_lazy_mask: Makes the lazy mask.
        has_visible_key: Whether each query sees at least one key; None if all do.
    """

    eager_mask: Float[Tensor, "#batch #head query key"] | None
    sdpa_mask: Tensor | None
    make_lazy_mask: Callable[[], Tensor | None]
    has_visible_key: HasVisibleKey = None


def compute_model_output(
    eager_forward: Callable[..., tuple[Tensor, Tensor]],
    sdpa_forward: Callable[..., tuple[Tensor, Any]] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: MaskForms,
    kwargs: Mapping[str, Any],
) -> Float[Tensor, "batch query head width"]:
    """Compute the attention output exactly as the model does without clearhead.

    Args:
        eager_forward: The model's eager attention.
        sdpa_forward: Torch's kernel, if the model runs with it; else None.
        module: The attention module.
        query: Queries.
        key: Keys.
        value: Values.
        masks: All forms of the mask.
        kwargs: Further arguments of the attention function.
    """
    if sdpa_forward is None:
        output: Tensor = eager_forward(module, query, key, value, masks.eager_mask, **kwargs)[0]
    else:
        output = sdpa_forward(module, query, key, value, masks.sdpa_mask, **kwargs)[0]
    return output


def attend_with_maps(
    eager_forward: Callable[..., tuple[Tensor, Tensor]],
    sdpa_forward: Callable[..., tuple[Tensor, Any]] | None,
    module: nn.Module,
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key value_width"],
    masks: MaskForms,
    kwargs: Mapping[str, Any],
    gradient_buffer: GradientBuffer,
    tiled: TiledAttention | None = None,
) -> tuple[Float[Tensor, "batch query head value_width"], Float[Tensor, "batch head query key"], HasVisibleKey]:
    """Compute the model's unchanged output and the full attention map, both in the graph.

    Args:
        eager_forward: The model's eager attention.
        sdpa_forward: Torch's kernel, if the model runs with it; else None.
        module: The attention module.
        query: Queries.
        key: Keys.
        value: Values.
        masks: All forms of the mask.
        kwargs: Further arguments of the attention function.
        gradient_buffer: Memory for ∂y/∂attention.
        tiled: The same call in a tiled pass, if the output gets the gradients of that pass.

    Returns:
        The output, the attention, and whether each query sees at least one key (None if all do).
    """
    mask = masks.eager_mask
    map_dtype = get_accumulation_dtype(query.dtype)
    # with dropout, output and map must come from the same random draw
    if is_function_mode_active() or kwargs.get("dropout") or (sdpa_forward is None and query.dtype == map_dtype):
        return *eager_forward(module, query, key, value, mask, **kwargs), None

    def rebuild(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        upcast = (tensor.to(map_dtype) for tensor in (query, key, value))
        return eager_forward(module, *upcast, upcast_mask(mask, map_dtype), **kwargs)

    with torch.no_grad():
        kernel_output = None
        if tiled is not None:
            kernel_output = tiled.prepare_backward(query, key, value)
        if kernel_output is None:
            kernel_output = compute_model_output(eager_forward, sdpa_forward, module, query, key, value, masks, kwargs)
    if tiled is not None:
        output, attention = attend_with_tiled_gradients(kernel_output, tiled, query, key, value, rebuild)
    elif sdpa_forward is not None and is_formula_exact(query, mask, kwargs):
        output, attention = attend_inplace_on_cpu(
            kernel_output, query, key, value, mask, kwargs.get("scaling"), gradient_buffer
        )
    else:
        output, attention = rebuild(query, key)
        output = _KernelOutput.apply(output, kernel_output)
    if sdpa_forward is None:
        return output, attention, None
    has_visible_key = masks.has_visible_key
    if has_visible_key is not None and output.requires_grad:
        output.register_hook(partial(torch.mul, has_visible_key.transpose(1, 2)))
    return output, attention, has_visible_key


def is_function_mode_active() -> bool:
    """Whether a torch function mode or transform must see every operation (a default device does not count)."""
    modes = torch.overrides._get_current_function_mode_stack()
    return torch._C._are_functorch_transforms_active() or any(not isinstance(mode, DeviceContext) for mode in modes)


def is_formula_exact(query: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any]) -> bool:
    """Whether the formula computes what torch's own kernel does, on a device where memory is the cost of maps."""
    has_full_precision = query.dtype in (torch.float32, torch.float64)
    is_supported = {name for name, argument in kwargs.items() if argument is not None} <= SDPA_COMPATIBLE_KWARGS
    is_additive = mask is None or (mask.is_floating_point() and mask.dim() == 4 and not mask.requires_grad)
    return query.device.type == "cpu" and has_full_precision and is_supported and is_additive


def attend_inplace_on_cpu(
    output: Float[Tensor, "batch query head value_width"],
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key value_width"],
    mask: Float[Tensor, "#batch #head query key"] | None,
    scaling: float | None,
    gradient_buffer: GradientBuffer,
) -> tuple[Float[Tensor, "batch query head value_width"], Float[Tensor, "batch head query key"]]:
    """Compute the attention map in place on a CPU, and connect it and the given output of a kernel to the graph.

    Args:
        output: Output of the kernel, without a graph.
        query: Queries.
        key: Keys.
        value: Values.
        mask: Additive mask.
        scaling: Factor of the scores; None for width^(-1/2).
        gradient_buffer: Memory for ∂y/∂attention.

    Returns:
        The output and the attention, both in the graph.
    """
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    attention: Tensor = _CPUAttentionMaps.apply(query, key, mask, scaling, gradient_buffer)
    return _CPUAttentionOutput.apply(output, attention, value, gradient_buffer), attention


#: Maps queries and keys to the output and the attention.
RebuildFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TiledGradients(NamedTuple):
    """Gradients that the backward pass computes at the output: ∂y/∂A through the output, ∂y/∂query and ∂y/∂key.

    Attributes:
        attention_gradient: ∂y/∂A through the output.
        query_gradient: ∂y/∂query through the output.
        key_gradient: ∂y/∂key through the output.
    """

    attention_gradient: Float[Tensor, "*target batch head query key"]
    query_gradient: Tensor
    key_gradient: Tensor


def attend_with_tiled_gradients(
    output: Float[Tensor, "batch query head value_width"],
    tiled: TiledAttention,
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch kv_head key width"],
    value: Float[Tensor, "batch kv_head key value_width"],
    rebuild: RebuildFunction,
) -> tuple[Float[Tensor, "batch query head value_width"], Float[Tensor, "batch head query key"]]:
    """Compute the attention map, and give the output of a kernel the gradients of a tiled pass.

    Args:
        output: Output of the kernel, without a graph.
        tiled: The same call in a tiled pass.
        query: Queries.
        key: Keys.
        value: Values.
        rebuild: Computes the map from queries and keys.

    Returns:
        The output and the attention, both in the graph.
    """
    tiled_gradients: list[TiledGradients] = []
    attention: Tensor = _AttentionMapTap.apply(query, key, rebuild, tiled_gradients)
    return _TiledGradientOutput.apply(output, attention, value, tiled, tiled_gradients), attention


class _AttentionMapTap(torch.autograd.Function):
    """Attention map in the graph between output and queries: ∂y/∂A passes it, and tiled gradients replace its own."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, rebuild: RebuildFunction, tiled_gradients: list[TiledGradients]
    ) -> Tensor:
        """Compute the attention map with `rebuild`."""
        ctx.save_for_backward(query, key)
        ctx.rebuild = rebuild
        ctx.tiled_gradients = tiled_gradients
        return rebuild(query, key)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the tiled gradients; ∂y/∂A from other uses of the map goes through `rebuild` in addition."""
        attention_gradient = grad_outputs[0]
        tiled = ctx.tiled_gradients.pop() if ctx.tiled_gradients else None
        if tiled is not None and attention_gradient is tiled.attention_gradient:
            return tiled.query_gradient, tiled.key_gradient, None, None
        # the model or a target function used the attention, too: the remainder takes the ordinary path
        remainder = attention_gradient
        if tiled is not None:
            remainder = attention_gradient - tiled.attention_gradient
        query, key = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            attention = ctx.rebuild(query, key)[1]
        query_gradient, key_gradient = torch.autograd.grad(attention, (query, key), remainder)
        if tiled is not None:
            query_gradient = query_gradient + tiled.query_gradient
            key_gradient = key_gradient + tiled.key_gradient
        return query_gradient, key_gradient, None, None


class _TiledGradientOutput(torch.autograd.Function):
    """Output of a kernel, with the gradients of a tiled pass and with ∂y/∂A."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        attention: Tensor,
        value: Tensor,
        tiled: TiledAttention,
        tiled_gradients: list[TiledGradients],
    ) -> Tensor:
        """Return a copy of the kernel's output."""
        ctx.tiled = tiled
        ctx.tiled_gradients = tiled_gradients
        ctx.num_heads = attention.shape[1]
        return output.clone()  # the kernel may have saved the output itself, and the model may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute tiled gradients and ∂y/∂A = ∂y/∂O Vᵀ, and leave them for `_AttentionMapTap`."""
        tiled = ctx.tiled
        output_gradient = grad_outputs[0]
        map_dtype = get_accumulation_dtype(output_gradient.dtype)
        query_gradient, key_gradient, value_gradient = dispatch_backward(tiled, output_gradient)
        values = tiled.value.repeat_interleave(ctx.num_heads // tiled.value.shape[1], 1)
        attention_gradient = output_gradient.transpose(-3, -2).to(map_dtype) @ values.mT.to(map_dtype)
        ctx.tiled_gradients[:] = [TiledGradients(attention_gradient, query_gradient, key_gradient)]
        return None, attention_gradient, value_gradient, None, None


class _KernelOutput(torch.autograd.Function):
    """Output of a kernel in the forward pass; its gradient goes to the output that eager attention computed."""

    @staticmethod
    def forward(ctx: Any, eager_output: Tensor, kernel_output: Tensor) -> Tensor:
        """Return a copy of the kernel's output, and drop the values of the eager one."""
        ctx.eager_dtype = eager_output.dtype
        return kernel_output.clone()  # autograd would return the input as a view, which must not be changed in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient to the eager output, in its dtype."""
        return grad_outputs[0].to(ctx.eager_dtype), None


class _CPUAttentionMaps(torch.autograd.Function):
    """Attention maps on a CPU, computed sample by sample in place."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, gradient_buffer: GradientBuffer
    ) -> Tensor:
        """A = softmax(scale · Q Kᵀ + mask), sample by sample in the memory of the result."""
        batch, heads, queries, _ = query.shape
        attention = query.new_empty(batch, heads, queries, key.shape[2])
        for i, scores in enumerate(attention):
            # the matrix product takes views of one sample without a copy; those of a batch would be copied
            scores.baddbmm_(query[i], repeat_kv_heads(key[i], heads).mT, beta=0, alpha=scale)
            if mask is not None:
                scores += mask[i if len(mask) > 1 else 0]
            torch.softmax(scores, -1, out=scores)
        ctx.save_for_backward(query, key, attention)
        ctx.scale = scale
        ctx.gradient_buffer = gradient_buffer
        return attention

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A), written over ∂y/∂A if the buffer allows it."""
        query, key, attention = ctx.saved_tensors
        attention_gradient = grad_outputs[0]
        can_overwrite = ctx.gradient_buffer.can_overwrite
        heads = query.shape[1]
        kv_heads = key.shape[1]
        if _is_vmapped(attention_gradient):
            score_gradient = torch._softmax_backward_data(attention_gradient, attention, -1, attention.dtype)
            keys = key.repeat_interleave(heads // kv_heads, 1)
            key_gradient = sum_kv_groups((score_gradient.mT @ query) * ctx.scale, kv_heads, 1)
            return (score_gradient @ keys) * ctx.scale, key_gradient, None, None, None
        score_gradients = attention_gradient if can_overwrite else torch.empty_like(attention_gradient)
        query_gradient = empty_bthd(query)
        key_gradient = empty_bthd(key)
        for i, score_gradient in enumerate(score_gradients):
            torch.ops.aten._softmax_backward_data.out(
                attention_gradient[i], attention[i], -1, score_gradient.dtype, grad_input=score_gradient
            )
            torch.mul(score_gradient @ repeat_kv_heads(key[i], heads), ctx.scale, out=query_gradient[i])
            # as the right factor, the map is read without a transposed copy
            torch.mul(sum_kv_groups(query[i].mT @ score_gradient, kv_heads, 0).mT, ctx.scale, out=key_gradient[i])
        if can_overwrite:
            ctx.gradient_buffer.free_buffers.append(attention_gradient)
        return query_gradient, key_gradient, None, None, None


class _CPUAttentionOutput(torch.autograd.Function):
    """Output of a kernel, with the gradients of A·V."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, attention: Tensor, value: Tensor, gradient_buffer: GradientBuffer) -> Tensor:
        """Return a copy of the kernel's output."""
        ctx.save_for_backward(attention, value)
        ctx.gradient_buffer = gradient_buffer
        return output.clone()  # autograd would return the input as a view, which must not be changed in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """∂y/∂A = ∂y/∂O Vᵀ and ∂y/∂V = Aᵀ ∂y/∂O, summed over the heads that share values."""
        attention, value = ctx.saved_tensors
        heads = attention.shape[1]
        kv_heads = value.shape[1]
        output_gradient = grad_outputs[0].transpose(-3, -2)
        if _is_vmapped(output_gradient):
            values = value.repeat_interleave(heads // kv_heads, 1)
            value_gradient = sum_kv_groups(attention.mT @ output_gradient, kv_heads, 1)
            return None, output_gradient @ values.mT, value_gradient, None
        attention_gradient = ctx.gradient_buffer.allocate(attention)
        value_gradient = empty_bthd(value)
        for i, sample_gradient in enumerate(output_gradient):
            torch.bmm(sample_gradient, repeat_kv_heads(value[i], heads).mT, out=attention_gradient[i])
            value_gradient[i] = sum_kv_groups(sample_gradient.mT @ attention[i], kv_heads, 0).mT
        return None, attention_gradient, value_gradient, None


def _is_vmapped(gradient: Tensor) -> bool:
    """Whether this is a batched gradient of several targets (`torch.vmap`), which in-place operations cannot use."""
    return torch._C._functorch.is_batchedtensor(gradient)


def empty_bthd(
    tensor: Float[Tensor, "batch some token width"], heads: int | None = None
) -> Float[Tensor, "batch head token width"]:
    """Allocate the gradient of a tensor in the memory order batch × token × head × width.

    A linear map takes it without a copy.

    Args:
        tensor: Queries, keys or values.
        heads: Number of heads, if it differs from that of the tensor.
    """
    batch, tensor_heads, tokens, width = tensor.shape
    return tensor.new_empty(batch, tokens, heads or tensor_heads, width).transpose(1, 2)


def repeat_kv_heads(tensor: Float[Tensor, "kv_head key width"], num_heads: int) -> Float[Tensor, "head key width"]:
    """Repeat the keys or values of one sample, so that each head has its own."""
    if len(tensor) == num_heads:
        return tensor
    return tensor.repeat_interleave(num_heads // len(tensor), 0)


def sum_kv_groups(per_head: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Sum gradients over the heads that share a key–value head; `head_dim` is the axis of the heads."""
    if per_head.shape[head_dim] == num_kv_heads:
        return per_head
    return per_head.unflatten(head_dim, (num_kv_heads, -1)).sum(head_dim + 1)
