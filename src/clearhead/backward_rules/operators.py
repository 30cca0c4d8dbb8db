"""Which operations there are, and of which kind each is: `KINDS` leads from an operation's name to its handler.

A handler takes the mode, the operation and its arguments, and asks the family for the rule. What depends on the input
is called active; all else is constant.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import Family, NoRule, active


class Mode(Protocol):
    """What handlers see of the operator mode."""

    family: Family
    size: int
    uses: WeakTensorKeyDictionary


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operations that move numbers about, leave some out, or change how they are stored.
MOVES = _names("""
    view reshape view_as reshape_as flatten unflatten squeeze unsqueeze contiguous alias as_strided positive
    permute transpose t adjoint swapaxes swapdims movedim moveaxis roll flip rot90 diagonal unfold
    expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile meshgrid
    split split_with_sizes tensor_split chunk unbind cat concat stack hstack vstack
    __getitem__ select narrow index_select gather take_along_dim masked_select
    where masked_fill masked_scatter pad pixel_shuffle pixel_unshuffle max_pool1d max_pool2d
    clone to type type_as float double half bfloat16 cpu cuda detach
    __get__ __set__ __iter__ requires_grad_ register_hook retain_grad
""")
#: Those of them that pick some numbers out.
PICKS = _names("__getitem__ select index_select")
#: Those that hand over what they are given.
SAME = _names("dropout dropout1d dropout2d")

CONVOLUTIONS = _names("conv1d conv2d conv3d")
MAPS = _names("sum cumsum avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate")
SUMS = _names("add add_ __add__ __radd__ __iadd__")
DIFFERENCES = _names("sub __sub__ subtract")
OPPOSITES = _names("neg negative __neg__")
FACTORS = _names("mul __mul__ __rmul__ multiply")
PRODUCTS = FACTORS | _names("matmul __matmul__ __rmatmul__ bmm mm mv dot")
QUOTIENTS = _names("div __truediv__ true_divide divide")
IN_PLACE = {"mul_": "mul", "__imul__": "mul", "div_": "div", "__itruediv__": "div", "sub_": "sub", "__isub__": "sub"}
DENOMINATORS = _names("rsqrt sqrt norm vector_norm std var reciprocal __rdiv__ __rtruediv__")
ACTIVATIONS = _names("""
    gelu relu silu tanh sigmoid softplus elu leaky_relu hardswish hardsigmoid mish selu relu6 celu erf
    hardtanh clamp clamp_min clamp_max clip pow __pow__ square
""")

Handler = Callable[..., Any]
KINDS: dict[str, Handler] = {}


def _kind(names: Iterable[str]) -> Callable[[Handler], Handler]:
    def decorate(handler: Handler) -> Handler:
        KINDS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


# Linear maps ----------------------------------------------------------------------------------------------------------


@_kind(["linear"])
def _linear(mode: Mode, func: Any, /, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if active(weight):
        product = _product(mode, _named("matmul", lambda x, w: x @ w.mT), input, weight)
        return product if bias is None else _add(mode, torch.add, product, bias)
    x = mode.family.branched(input, mode.uses)
    return mode.family.linear(
        lambda x: functional.linear(x, weight.to(x), None if bias is None else bias.to(x)), x, weight
    )


@_kind(["addmm"])
def _addmm(
    mode: Mode, func: Any, /, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """GPT-2's linear map, or a sum of products."""
    if active(input) or active(mat2) or beta != 1 or alpha != 1:
        return _baddbmm(mode, func, input, mat1, mat2, beta=beta, alpha=alpha)
    x = mode.family.branched(mat1, mode.uses)
    return mode.family.linear(lambda x: torch.addmm(input.to(x), x, mat2.to(x)), x, mat2.T)


@_kind(["baddbmm"])
def _baddbmm(
    mode: Mode, func: Any, /, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = _product(mode, torch.matmul, batch1, batch2)
    product = _product(mode, torch.mul, product, alpha) if alpha != 1 else product
    if beta == 0:
        return product
    return _add(mode, torch.add, _product(mode, torch.mul, input, beta) if beta != 1 else input, product)


@_kind(CONVOLUTIONS)
def _convolution(
    mode: Mode, func: Any, /, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    return mode.family.convolution(
        lambda x: func(x, weight.to(x), None if bias is None else bias.to(x), *args, **kwargs),
        lambda x, part: func(x, part, None, *args, **kwargs),
        input,
        weight,
    )


@_kind(MAPS)
def _map(mode: Mode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return mode.family.map(lambda x: func(x, *args, **kwargs), input)


@_kind(["mean"])
def _mean(mode: Mode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return mode.family.mean(lambda x: func(x, *args, **kwargs), input)


# Sums, products and quotients -----------------------------------------------------------------------------------------


@_kind(SUMS)
def _add(mode: Mode, func: Any, /, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    beside = input if isinstance(input, Tensor) else other
    a, b = _tensor(input, beside), _tensor(other, beside)
    if alpha != 1:
        b = _product(mode, torch.mul, b, alpha)
    return mode.family.add(a, b, mode.size, in_place=func.__name__ in ("add_", "__iadd__"))


@_kind(DIFFERENCES)
def _sub(mode: Mode, func: Any, /, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _add(mode, torch.add, input, other, alpha=-alpha)


@_kind(["__rsub__", "rsub"])
def _rsub(mode: Mode, func: Any, /, input: Any, other: Any) -> Tensor:
    return _add(mode, torch.add, other, _product(mode, torch.mul, input, -1))


@_kind(OPPOSITES)
def _neg(mode: Mode, func: Any, /, input: Tensor) -> Tensor:
    return _product(mode, torch.mul, input, -1)


@_kind(PRODUCTS)
def _product(mode: Mode, func: Any, /, input: Any, other: Any) -> Tensor:
    """A product of two activations, or of one with a constant."""
    if active(input) and active(other):
        return mode.family.product(func, input, other)
    if not active(input) and not active(other):
        return func(input, other)
    x, constant = (input, other) if active(input) else (other, input)
    apply = (lambda part: func(part, other)) if active(input) else (lambda part: func(input, part))
    if func.__name__ in FACTORS:
        return mode.family.scale(apply, x, _tensor(constant, x))
    return mode.family.map(apply, x)


@_kind(QUOTIENTS)
def _div(mode: Mode, func: Any, /, input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """What divides is a constant: the denominators of norms."""
    below = other.detach() if isinstance(other, Tensor) else other
    if not active(input):
        return torch.div(input, below)
    return mode.family.scale(lambda x: torch.div(x, below), input, 1 / _tensor(below, input))


@_kind(IN_PLACE)
def _in_place(mode: Mode, func: Any, /, input: Tensor, other: Any) -> Tensor:
    """Into a new tensor, and from there into the old one."""
    name = IN_PLACE[func.__name__]
    return input.copy_(KINDS[name](mode, getattr(torch, name), input.clone(), other))


@_kind(["einsum"])
def _einsum(mode: Mode, func: Any, /, equation: str, *operands: Any) -> Tensor:
    parts = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if len(parts) != 2:
        raise NoRule(f"the operator einsum of {len(parts)} tensors has no rule in {mode.family.name}")
    return _product(mode, _named("einsum", lambda a, b: torch.einsum(equation, a, b)), *parts)


@_kind(DENOMINATORS)
def _denominator(mode: Mode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The denominators of norms are constants."""
    with torch.no_grad():
        return func(*args, **kwargs)


@_kind(["normalize"])
def _normalize(mode: Mode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        length = input / func(input, *args, **kwargs)
    return _div(mode, torch.div, input, torch.where(length.isfinite(), length, 1.0))


# Functions of each number, softmax and norms --------------------------------------------------------------------------


@_kind(ACTIVATIONS)
def _activation(mode: Mode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("inplace", None)
    if any(map(active, (*args, *kwargs.values()))):
        raise NoRule(f"the operator {func.__name__} with an exponent from the input has no rule in {mode.family.name}")
    return mode.family.activation(_named(func.__name__, lambda x: func(x, *args, **kwargs)), input)


@_kind(SAME)
def _dropout(
    mode: Mode, func: Any, /, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if training and p > 0:
        raise NoRule("the operator dropout is at work, and has no rule: put the model in evaluation mode")
    return input


@_kind(["softmax"])
def _softmax(
    mode: Mode, func: Any, /, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """A softmax in a narrower format than its input's is rounded to it, but what flows back is not."""
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype  # torch.softmax has its dtype in that place

    def apply(x: Tensor) -> Tensor:
        found = torch.softmax(x, dim, dtype=dtype)
        return found.to(torch.promote_types(found.dtype, x.dtype))

    return mode.family.softmax(apply, input, mode.size)


@_kind(["layer_norm"])
def _layer_norm(
    mode: Mode,
    func: Any,
    /,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    shape = tuple(normalized_shape)

    def apply(x: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias, eps)

    return mode.family.norm(apply, input, weight, len(shape), eps, centred=True)


@_kind(["rms_norm"])
def _rms_norm(
    mode: Mode, func: Any, /, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    shape = tuple(normalized_shape)

    def apply(x: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, weight, eps)

    least = torch.finfo(input.dtype).eps if eps is None else eps
    return mode.family.norm(apply, input, weight, len(shape), least, centred=False)


@_kind(["batch_norm"])
def _batch_norm(
    mode: Mode,
    func: Any,
    /,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With the means and variances that it has learned: a multiplication."""
    if training:
        raise NoRule("the operator batch_norm with the statistics of its batch has no rule")
    factor = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    factor = factor.reshape(1, -1, *[1] * (input.dim() - 2))
    return mode.family.scale(
        lambda x: functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), input, factor
    )


def _tensor(part: Any, beside: Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else torch.as_tensor(part, dtype=beside.dtype, device=beside.device)


def _named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.__name__ = name
    return function
