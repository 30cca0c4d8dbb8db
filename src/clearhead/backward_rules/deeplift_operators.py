"""Which operations have which of DeepLIFT's rules, which are linear as they are, and which are made of others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backward_rules import deeplift
from clearhead.backward_rules.base import NoRule, active
from clearhead.backward_rules.secants import SLOPES, of_power

#: What goes in, and a formula that is handed, for each of it, the values at both sides and what is to be mapped.
Ruled = tuple[tuple[Any, ...], Callable[..., Tensor]]
#: The operation and its arguments → how it is ruled; None where it is linear with these arguments.
RULES: dict[str, Callable[..., Ruled | None]] = {}
#: Operations that are others one after the other: their arguments → those steps; None where it is linear with these.
COMPOSED: dict[str, Callable[..., Callable[[], Tensor] | None]] = {}
#: What lies around a picture at both sides, of which nothing is ever the largest, and around what is mapped.
EDGES = (-torch.inf, -torch.inf, 0.0)


def _rule(*names: str) -> Callable[[Callable[..., Ruled | None]], Callable[..., Ruled | None]]:
    def decorate(handler: Callable[..., Ruled | None]) -> Callable[..., Ruled | None]:
        RULES.update(dict.fromkeys(names, handler))
        return handler

    return decorate


def _composed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSED.update(dict.fromkeys(names, handler))
        return handler

    return decorate


# Products and quotients -----------------------------------------------------------------------------------------------


@_rule("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot")
def _product(func: Any, input: Any, other: Any) -> Ruled | None:
    if not (active(input) and active(other)):
        return None
    return (input, other), lambda a, b: deeplift.product(func, *a, *b)


@_rule("mul", "__mul__", "__rmul__", "multiply")
def _mul(func: Any, input: Any, other: Any) -> Ruled | None:
    if active(input) and active(other) and deeplift.is_scale(other, input):
        return (input, other), lambda c, r: deeplift.scaled(*c, *r)
    if active(input) and active(other) and deeplift.is_scale(input, other):
        return (other, input), lambda c, r: deeplift.scaled(*c, *r)
    return _product(func, input, other)


@_rule("einsum")
def _einsum(func: Any, equation: str, *operands: Any) -> Ruled | None:
    parts = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    moving = [i for i, part in enumerate(parts) if active(part)]
    if len(moving) < 2:
        return None
    if len(moving) > 2:
        raise NoRule(f"the operator einsum of {len(moving)} tensors that depend on the input has no rule in DeepLIFT")

    def times(a: Tensor, b: Tensor) -> Tensor:
        given = [deeplift.wide(part) for part in parts]
        given[moving[0]], given[moving[1]] = a, b
        return torch.einsum(equation, *given)

    return (parts[moving[0]], parts[moving[1]]), lambda a, b: deeplift.product(times, *a, *b)


@_rule("div", "__truediv__", "__div__", "true_divide", "divide")
def _div(func: Any, input: Any, other: Any, *, rounding_mode: str | None = None) -> Ruled | None:
    if rounding_mode is not None:
        raise NoRule("the operator div that rounds has no rule in DeepLIFT")
    if not active(other):
        return None
    if active(input):
        return (input, other), lambda a, b: deeplift.quotient(*a, *b)
    return (other,), lambda b: -b[2] / (b[0] * b[1]) * input


@_rule("__rdiv__", "__rtruediv__")
def _rdiv(func: Any, input: Tensor, other: Any) -> Ruled | None:
    return _div(func, other, input)


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _convolution(func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Ruled | None:
    if not (active(input) and active(weight)):
        return None
    if active(bias):
        raise NoRule(f"the operator {func.__name__} with a bias that depends on the input has no rule in DeepLIFT")
    return (input, weight), lambda a, b: deeplift.product(lambda x, w: func(x, w, None, *args, **kwargs), *a, *b)


@_composed("linear")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[], Tensor] | None:
    if not (active(input) and active(weight)):
        return None
    return lambda: input @ weight.mT if bias is None else input @ weight.mT + bias


@_composed("addmm")
def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Callable[[], Tensor] | None:
    return (lambda: beta * input + alpha * (mat1 @ mat2)) if active(mat1) and active(mat2) else None


@_composed("baddbmm")
def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Callable[[], Tensor] | None:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha)


@_rule("amax", "max")
def _max(func: Any, input: Tensor, dim: Any = None, keepdim: bool = False) -> Ruled | None:
    if not isinstance(dim, int):
        raise NoRule(f"the operator {func.__name__} over anything but one axis has no rule in DeepLIFT")

    def formula(z: Any) -> Tensor:
        found = deeplift.largest(*z, axis=dim)
        return found if keepdim else found.squeeze(dim)

    return (input,), formula


@_composed("addcmul")
def _addcmul(input: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Callable[[], Tensor] | None:
    return (lambda: input + value * (first * second)) if active(first) and active(second) else None


@_composed("scaled_dot_product_attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Callable[[], Tensor]:
    if dropout_p > 0:
        raise NoRule("the operator scaled_dot_product_attention with dropout has no rule in DeepLIFT")
    mask = attn_mask
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)

    def steps() -> Tensor:
        times = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        k, v = (part.repeat_interleave(times, -3) if times > 1 else part for part in (key, value))
        scores = query @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        return (scores if mask is None else scores + mask).softmax(-1) @ v

    return steps


@_rule("max_pool2d")
def _max_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Ruled | None:
    if ceil_mode or return_indices or input.dim() != 4:
        raise NoRule("the operator max_pool2d with ceil_mode or return_indices has no rule in DeepLIFT")
    windows = partial(F.unfold, kernel_size=kernel_size, dilation=dilation, stride=stride or kernel_size)
    high, wide = padding if isinstance(padding, tuple | list) else (padding, padding)

    def formula(x: Any) -> Tensor:
        padded = (F.pad(part, (wide, wide, high, high), value=least) for part, least in zip(x, EDGES, strict=True))
        parts = (windows(part).unflatten(1, (input.shape[1], -1)) for part in padded)  # batch channel window place
        return deeplift.largest(*parts, axis=2).reshape(pooled)

    pooled = func(input.detach(), kernel_size, stride, padding, dilation).shape
    return (input,), formula


# Functions of each number ---------------------------------------------------------------------------------------------


@_rule(*SLOPES)
def _elementwise(func: Any, input: Any, *args: Any, **kwargs: Any) -> Ruled | None:
    if any(map(active, (*args, *kwargs.values()))):
        raise NoRule(
            f"the operator {func.__name__} of several tensors that depend on the input has no rule in DeepLIFT"
        )
    slope, beside = SLOPES[func.__name__], [deeplift.wide(part) for part in args]
    return (input,), lambda z: deeplift.elementwise(lambda part: func(part, *beside, **kwargs), slope, *z)


@_rule("pow", "__pow__")
def _pow(func: Any, input: Any, exponent: Any) -> Ruled | None:
    if isinstance(exponent, Tensor) and (active(exponent) or exponent.numel() != 1):
        raise NoRule("the operator pow with an exponent that is no single number has no rule in DeepLIFT")
    slope = of_power(exponent)
    return (input,), lambda z: deeplift.elementwise(lambda part: part**exponent, slope, *z)


@_rule("dropout", "dropout1d", "dropout2d", "feature_dropout", "alpha_dropout")
def _dropout(func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Ruled | None:
    if training and p > 0:
        raise NoRule("the operator dropout is at work, and has no rule: put the model in evaluation mode")
    return None


@_composed("glu")
def _glu(input: Tensor, dim: int = -1) -> Callable[[], Tensor]:
    def steps() -> Tensor:
        a, b = input.chunk(2, dim)
        return a * b.sigmoid()

    return steps


# Softmax and norms ----------------------------------------------------------------------------------------------------


@_rule("softmax")
def _softmax(
    func: Any, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Ruled | None:
    return (input,), lambda z: deeplift.softmax(*z, axis=dim)


@_rule("logsumexp")
def _logsumexp(func: Any, input: Tensor, dim: Any, keepdim: bool = False) -> Ruled | None:
    def formula(z: Any) -> Tensor:
        found = deeplift.logsumexp(*z, axis=dim)
        return found if keepdim else found.squeeze(dim)

    return (input,), formula


@_rule("log_softmax")
def _log_softmax(
    func: Any, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Ruled | None:
    return (input,), lambda z: z[2] - deeplift.logsumexp(*z, axis=dim)


@_rule("layer_norm")
def _layer_norm(
    func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Ruled | None:
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    return (input,), lambda x: _weighted(deeplift.norm(*x, axes=axes, eps=eps, centred=True), weight)


@_rule("rms_norm")
def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Ruled | None:
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    least = torch.finfo(input.dtype).eps if eps is None else eps
    return (input,), lambda x: _weighted(deeplift.norm(*x, axes=axes, eps=least, centred=False), weight)


@_rule("group_norm")
def _group_norm(
    func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Ruled | None:
    def formula(x: Any) -> Tensor:
        now, then, live = (part.reshape(len(part), num_groups, -1) for part in x)
        found = deeplift.norm(now, then, live, axes=(-1,), eps=eps, centred=True).reshape(input.shape)
        return _weighted(found, None if weight is None else weight.reshape(-1, *[1] * (input.dim() - 2)))

    return (input,), formula


@_rule("batch_norm")
def _batch_norm(
    func: Any,
    input: Tensor,
    mean: Any,
    var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> Ruled | None:
    if training:
        raise NoRule("the operator batch_norm with the statistics of its batch has no rule in DeepLIFT")
    return None


@_rule("norm", "vector_norm", "linalg_vector_norm")
def _length(
    func: Any,
    input: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    p: Any = None,
    dtype: Any = None,
    out: Any = None,
) -> Ruled | None:
    order = ord if p is None else p
    if order not in (2, 2.0, "fro", None):
        raise NoRule(f"the operator norm of order {order!r} has no rule in DeepLIFT")
    axes = tuple(range(input.dim())) if dim is None else dim

    def formula(x: Any) -> Tensor:
        n, n0 = (part.square().sum(axes, keepdim=True).sqrt() for part in x[:2])
        found = deeplift.length(n, n0, *x, axes=axes)
        return found if keepdim else found.squeeze(axes)

    return (input,), formula


@_composed("normalize")
def _normalize(
    input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Callable[[], Tensor]:
    return lambda: input / input.norm(p, dim, keepdim=True).clamp_min(eps)


@_composed("cosine_similarity")
def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Callable[[], Tensor]:
    def lengthened(x: Tensor) -> Tensor:
        return x / x.norm(2, dim, keepdim=True).clamp_min(eps)

    return lambda: (lengthened(x1) * lengthened(x2)).sum(dim)


def _weighted(part: Tensor, weight: Tensor | None) -> Tensor:
    return part if weight is None else part * weight
