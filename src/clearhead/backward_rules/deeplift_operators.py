"""Tables of torch operations for DeepLIFT: those that have a rule, and those that are decomposed into others.

Entries name their parameters as torch does. Operations that are always linear are in `linear_operators.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backward_rules import deeplift
from clearhead.backward_rules.base import MissingRuleError, depends_on_input
from clearhead.backward_rules.secants import SECANTS, select_power_secant

#: The active inputs, and a formula that receives for each of them a triple: its value at both sides, and the tangent.
InputsAndFormula = tuple[tuple[Any, ...], Callable[..., Tensor]]
#: The operation and its arguments → its inputs and formula; None where it is linear with these arguments.
DEEPLIFT_RULES: dict[str, Callable[..., InputsAndFormula | None]] = {}
#: The arguments of a composite operation → a function that runs its steps; None where it is linear with them.
DECOMPOSITIONS: dict[str, Callable[..., Callable[[], Tensor] | None]] = {}
#: Padding of an image before max pooling, at both sides (never the maximum) and for the tangent.
POOL_PADDING_VALUES = (-torch.inf, -torch.inf, 0.0)


def _register_rule(
    *names: str,
) -> Callable[[Callable[..., InputsAndFormula | None]], Callable[..., InputsAndFormula | None]]:
    """Enter the decorated function into `DEEPLIFT_RULES` for each of these operation names."""

    def decorate(handler: Callable[..., InputsAndFormula | None]) -> Callable[..., InputsAndFormula | None]:
        DEEPLIFT_RULES.update(dict.fromkeys(names, handler))
        return handler

    return decorate


def _register_decomposition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function into `DECOMPOSITIONS` for each of these operation names."""

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


# Products and quotients -----------------------------------------------------------------------------------------------


@_register_rule("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot")
def _make_product_rule(func: Any, input: Any, other: Any) -> InputsAndFormula | None:
    """Δ(ab) = ā Δb + b̄ Δa; None if only one factor depends on the input: then the product is linear."""
    if not (depends_on_input(input) and depends_on_input(other)):
        return None
    return (input, other), lambda a, b: deeplift.product_rule(func, *a, *b)


@_register_rule("mul", "__mul__", "__rmul__", "multiply")
def _make_mul_rule(func: Any, input: Any, other: Any) -> InputsAndFormula | None:
    """Δ(ab) as `_make_product_rule`, or by `scale_rule` if one factor is one scale for each row of the other."""
    if depends_on_input(input) and depends_on_input(other) and deeplift.is_scale(other, input):
        return (input, other), lambda c, r: deeplift.scale_rule(*c, *r)
    if depends_on_input(input) and depends_on_input(other) and deeplift.is_scale(input, other):
        return (other, input), lambda c, r: deeplift.scale_rule(*c, *r)
    return _make_product_rule(func, input, other)


@_register_rule("einsum")
def _make_einsum_rule(func: Any, equation: str, *operands: Any) -> InputsAndFormula | None:
    """Δ(ab) = ā Δb + b̄ Δa of the two active operands, whatever the others; three active ones have no rule."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    active = [i for i, operand in enumerate(operands) if depends_on_input(operand)]
    if len(active) < 2:
        return None
    if len(active) > 2:
        raise MissingRuleError(
            f"the operator einsum of {len(active)} tensors that depend on the input has no rule in DeepLIFT"
        )
    first, second = active

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        factors = [deeplift.upcast_half(operand) for operand in operands]
        factors[first] = a
        factors[second] = b
        return torch.einsum(equation, *factors)

    return (operands[first], operands[second]), lambda a, b: deeplift.product_rule(multiply, *a, *b)


@_register_rule("div", "__truediv__", "__div__", "true_divide", "divide")
def _make_div_rule(func: Any, input: Any, other: Any, *, rounding_mode: str | None = None) -> InputsAndFormula | None:
    """Δ(a/b) by `quotient_rule`; −a Δb / (b b₀) if a is constant; None if b is, because it is then linear."""
    if rounding_mode is not None:
        raise MissingRuleError("the operator div with a rounding mode has no rule in DeepLIFT")
    if not depends_on_input(other):
        return None
    if depends_on_input(input):
        return (input, other), lambda a, b: deeplift.quotient_rule(*a, *b)
    return (other,), lambda b: -b[2] / (b[0] * b[1]) * input


@_register_rule("__rdiv__", "__rtruediv__")
def _make_rdiv_rule(func: Any, input: Tensor, other: Any) -> InputsAndFormula | None:
    """Δ(other / input): the quotient with its operands in reverse order."""
    return _make_div_rule(func, other, input)


@_register_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _make_convolution_rule(
    func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> InputsAndFormula | None:
    """Δ(ab) = ā Δb + b̄ Δa if the weights depend on the input, too; None if not: then it is linear."""
    if not (depends_on_input(input) and depends_on_input(weight)):
        return None
    if depends_on_input(bias):
        raise MissingRuleError(
            f"the operator {func.__name__} with a bias that depends on the input has no rule in DeepLIFT"
        )
    return (input, weight), lambda a, b: deeplift.product_rule(lambda x, w: func(x, w, None, *args, **kwargs), *a, *b)


@_register_decomposition("linear")
def _decompose_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[], Tensor] | None:
    """Steps of x Wᵀ + b if x and W both depend on the input; None if not, because it is then linear."""
    if not (depends_on_input(input) and depends_on_input(weight)):
        return None
    if bias is None:
        return lambda: input @ weight.mT
    return lambda: input @ weight.mT + bias


@_register_decomposition("addmm")
def _decompose_addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Callable[[], Tensor] | None:
    """Steps of addmm if both matrices depend on the input; None if not, because it is then linear."""
    if not (depends_on_input(mat1) and depends_on_input(mat2)):
        return None
    return lambda: beta * input + alpha * (mat1 @ mat2)


@_register_decomposition("baddbmm")
def _decompose_baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Callable[[], Tensor] | None:
    """Steps of a batch of `addmm`."""
    return _decompose_addmm(input, batch1, batch2, beta=beta, alpha=alpha)


@_register_rule("amax", "max")
def _make_max_rule(func: Any, input: Tensor, dim: Any = None, keepdim: bool = False) -> InputsAndFormula | None:
    """Δ max over one axis, by `max_rule`; other calls have no rule."""
    if not isinstance(dim, int):
        raise MissingRuleError(f"the operator {func.__name__} over anything but one axis has no rule in DeepLIFT")

    def formula(z: Any) -> Tensor:
        return _drop_axes(deeplift.max_rule(*z, axis=dim), dim, keepdim)

    return (input,), formula


@_register_decomposition("addcmul")
def _decompose_addcmul(
    input: Tensor, first: Tensor, second: Tensor, *, value: float = 1
) -> Callable[[], Tensor] | None:
    """Steps of input + value · first · second; None if only one of the factors depends on the input."""
    if not (depends_on_input(first) and depends_on_input(second)):
        return None
    return lambda: input + value * (first * second)


@_register_decomposition("scaled_dot_product_attention")
def _decompose_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Callable[[], Tensor]:
    """Steps of softmax(Q Kᵀ s + mask) V, with keys and values repeated for grouped heads."""
    if dropout_p > 0:
        raise MissingRuleError("the operator scaled_dot_product_attention with dropout has no rule in DeepLIFT")
    mask = attn_mask
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)

    def steps() -> Tensor:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ repeat_heads(key).mT * factor
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1) @ repeat_heads(value)

    def repeat_heads(states: Tensor) -> Tensor:
        group_size = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        return states.repeat_interleave(group_size, -3) if group_size > 1 else states

    return steps


@_register_rule("max_pool2d")
def _make_max_pool_rule(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> InputsAndFormula | None:
    """Δ of the maximum of each window: windows are unfolded to an axis, and padding is never the maximum."""
    if ceil_mode or return_indices or input.dim() != 4:
        raise MissingRuleError("the operator max_pool2d with ceil_mode or return_indices has no rule in DeepLIFT")
    unfold = partial(F.unfold, kernel_size=kernel_size, dilation=dilation, stride=stride or kernel_size)
    if not isinstance(padding, tuple | list):
        padding = (padding, padding)
    pad_height, pad_width = padding

    def formula(x: Any) -> Tensor:
        padded = (
            F.pad(tensor, (pad_width, pad_width, pad_height, pad_height), value=fill)
            for tensor, fill in zip(x, POOL_PADDING_VALUES, strict=True)
        )
        # batch, channel, place in the window, window
        windows = (unfold(tensor).unflatten(1, (input.shape[1], -1)) for tensor in padded)
        return deeplift.max_rule(*windows, axis=2).reshape(output_shape)

    output_shape = func(input.detach(), kernel_size, stride, padding, dilation).shape
    return (input,), formula


# Element-wise functions -----------------------------------------------------------------------------------------------


@_register_rule(*SECANTS)
def _make_elementwise_rule(func: Any, input: Any, *args: Any, **kwargs: Any) -> InputsAndFormula | None:
    """Δf = (Δf/Δz) Δz with the secant slope of `SECANTS`; other arguments must be constant."""
    if any(map(depends_on_input, (*args, *kwargs.values()))):
        raise MissingRuleError(
            f"the operator {func.__name__} of several tensors that depend on the input has no rule in DeepLIFT"
        )
    secant = SECANTS[func.__name__]
    constants = [deeplift.upcast_half(arg) for arg in args]
    return (input,), lambda z: deeplift.elementwise_rule(lambda x: func(x, *constants, **kwargs), secant, *z)


@_register_rule("pow", "__pow__")
def _make_pow_rule(func: Any, input: Any, exponent: Any) -> InputsAndFormula | None:
    """Δ(z^n) = (Δf/Δz) Δz with the secant slope of the constant exponent n."""
    if isinstance(exponent, Tensor) and (depends_on_input(exponent) or exponent.numel() != 1):
        raise MissingRuleError(
            "the operator pow with an exponent that is not a single constant number has no rule in DeepLIFT"
        )
    secant = select_power_secant(exponent)
    return (input,), lambda z: deeplift.elementwise_rule(lambda x: x**exponent, secant, *z)


@_register_rule("dropout", "dropout1d", "dropout2d", "feature_dropout", "alpha_dropout")
def _make_dropout_rule(
    func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> InputsAndFormula | None:
    """None: dropout is the identity in evaluation mode; active dropout has no rule."""
    if training and p > 0:
        raise MissingRuleError("the operator dropout is active and has no rule: put the model in evaluation mode")
    return None


@_register_decomposition("glu")
def _decompose_glu(input: Tensor, dim: int = -1) -> Callable[[], Tensor]:
    """Steps of a gated linear unit: a σ(b) for the two halves of the input."""

    def steps() -> Tensor:
        a, b = input.chunk(2, dim)
        return a * b.sigmoid()

    return steps


# Softmax and norms ----------------------------------------------------------------------------------------------------


@_register_rule("softmax")
def _make_softmax_rule(
    func: Any, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> InputsAndFormula | None:
    """Δp over one axis, by `softmax_rule`."""
    return (input,), lambda z: deeplift.softmax_rule(*z, axis=dim)


@_register_rule("logsumexp")
def _make_logsumexp_rule(func: Any, input: Tensor, dim: Any, keepdim: bool = False) -> InputsAndFormula | None:
    """Δ log Σ e^z, by `logsumexp_rule`."""

    def formula(z: Any) -> Tensor:
        return _drop_axes(deeplift.logsumexp_rule(*z, axis=dim), dim, keepdim)

    return (input,), formula


@_register_rule("log_softmax")
def _make_log_softmax_rule(
    func: Any, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> InputsAndFormula | None:
    """Δ log p = Δz − Δ log Σ e^z."""
    return (input,), lambda z: z[2] - deeplift.logsumexp_rule(*z, axis=dim)


@_register_rule("layer_norm")
def _make_layer_norm_rule(
    func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> InputsAndFormula | None:
    """Δ of the centred norm, by `normalisation_rule`, times the weight."""
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    return (input,), lambda x: _apply_weight(
        deeplift.normalisation_rule(*x, axes=axes, eps=eps, is_centred=True), weight
    )


@_register_rule("rms_norm")
def _make_rms_norm_rule(
    func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> InputsAndFormula | None:
    """Δ of the root-mean-square norm, by `normalisation_rule`, times the weight."""
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    return (input,), lambda x: _apply_weight(
        deeplift.normalisation_rule(*x, axes=axes, eps=epsilon, is_centred=False), weight
    )


@_register_rule("group_norm")
def _make_group_norm_rule(
    func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> InputsAndFormula | None:
    """Δ of the centred norm of each group of channels, times the weight of each channel."""

    def formula(x: Any) -> Tensor:
        groups = (tensor.reshape(len(tensor), num_groups, -1) for tensor in x)
        normalised = deeplift.normalisation_rule(*groups, axes=(-1,), eps=eps, is_centred=True).reshape(input.shape)
        if weight is None:
            return normalised
        return normalised * weight.reshape(-1, *[1] * (input.dim() - 2))

    return (input,), formula


@_register_rule("batch_norm")
def _make_batch_norm_rule(
    func: Any,
    input: Tensor,
    mean: Any,
    var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> InputsAndFormula | None:
    """None: with its running statistics it is linear; with those of the batch it has no rule."""
    if training:
        raise MissingRuleError(
            "the operator batch_norm with batch statistics (in training mode) has no rule in DeepLIFT"
        )
    return None


@_register_rule("norm", "vector_norm", "linalg_vector_norm")
def _make_vector_norm_rule(
    func: Any,
    input: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    p: Any = None,
    dtype: Any = None,
    out: Any = None,
) -> InputsAndFormula | None:
    """Δ‖x‖₂ = Σ (x + x₀) Δx / (‖x‖ + ‖x₀‖); norms of other orders have no rule."""
    order = ord if p is None else p
    if order not in (2, 2.0, "fro", None):
        raise MissingRuleError(f"the operator norm of order {order!r} has no rule in DeepLIFT")
    axes = tuple(range(input.dim())) if dim is None else dim

    def formula(x: Any) -> Tensor:
        n, n0 = (tensor.square().sum(axes, keepdim=True).sqrt() for tensor in x[:2])
        return _drop_axes(deeplift.vector_norm_rule(n, n0, *x, axes=axes), axes, keepdim)

    return (input,), formula


@_register_decomposition("normalize")
def _decompose_normalize(
    input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Callable[[], Tensor]:
    """Steps of x / max(‖x‖_p, eps)."""
    return lambda: input / input.norm(p, dim, keepdim=True).clamp_min(eps)


@_register_decomposition("cosine_similarity")
def _decompose_cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Callable[[], Tensor]:
    """Steps of Σ x₁ x₂ / (‖x₁‖ ‖x₂‖), each norm at least eps."""

    def normalise(x: Tensor) -> Tensor:
        return x / x.norm(2, dim, keepdim=True).clamp_min(eps)

    return lambda: (normalise(x1) * normalise(x2)).sum(dim)


def _apply_weight(normalised: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply with the weight of a norm, if it has one."""
    return normalised if weight is None else normalised * weight


def _drop_axes(tensor: Tensor, axes: Any, keepdim: bool) -> Tensor:
    """Remove the reduced axes, which have length one, unless `keepdim`."""
    return tensor if keepdim else tensor.squeeze(axes)
