"""Handlers of torch operations: each calls the method of the rule set for the operation's kind.

A handler receives the mode, the operation and its arguments, and calls the rule set's method for that kind. Tensors
that depend on the input are active; everything else is constant. Handlers name their parameters as torch does.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import MissingRuleError, RuleSet, depends_on_input


class RuleModeProtocol(Protocol):
    """The attributes of the rule mode that handlers use."""

    rule_set: RuleSet
    batch_size: int
    tensor_uses: WeakTensorKeyDictionary


def _split_names(text: str) -> frozenset[str]:
    """Split a list of names at whitespace."""
    return frozenset(text.split())


#: Operations that move values, drop some of them, or change how they are stored.
MOVEMENT_OPS = _split_names("""
    view reshape view_as reshape_as flatten unflatten squeeze unsqueeze contiguous alias as_strided positive
    permute transpose t adjoint swapaxes swapdims movedim moveaxis roll flip rot90 diagonal unfold
    expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile meshgrid
    split split_with_sizes tensor_split chunk unbind cat concat stack hstack vstack
    __getitem__ select narrow index_select gather take_along_dim masked_select
    where masked_fill masked_scatter pad pixel_shuffle pixel_unshuffle max_pool1d max_pool2d
    clone to type type_as float double half bfloat16 cpu cuda detach
    __get__ __set__ __iter__ requires_grad_ register_hook retain_grad
""")
#: The movement operations that select some values.
INDEXING_OPS = _split_names("__getitem__ select index_select")
#: Operations that return their input unchanged in evaluation mode.
IDENTITY_OPS = _split_names("dropout dropout1d dropout2d")

CONVOLUTION_OPS = _split_names("conv1d conv2d conv3d")
LINEAR_MAP_OPS = _split_names("sum cumsum avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate")
ADDITION_OPS = _split_names("add add_ __add__ __radd__ __iadd__")
SUBTRACTION_OPS = _split_names("sub __sub__ subtract")
NEGATION_OPS = _split_names("neg negative __neg__")
ELEMENTWISE_PRODUCT_OPS = _split_names("mul __mul__ __rmul__ multiply")
PRODUCT_OPS = ELEMENTWISE_PRODUCT_OPS | _split_names("matmul __matmul__ __rmatmul__ bmm mm mv dot")
DIVISION_OPS = _split_names("div __truediv__ true_divide divide")
OUT_OF_PLACE_NAMES = {
    "mul_": "mul",
    "__imul__": "mul",
    "div_": "div",
    "__itruediv__": "div",
    "sub_": "sub",
    "__isub__": "sub",
}
CONSTANT_DENOMINATOR_OPS = _split_names("rsqrt sqrt norm vector_norm std var reciprocal __rdiv__ __rtruediv__")
ACTIVATION_OPS = _split_names("""
    gelu relu silu tanh sigmoid softplus elu leaky_relu hardswish hardsigmoid mish selu relu6 celu erf
    hardtanh clamp clamp_min clamp_max clip pow __pow__ square
""")

OperationHandler = Callable[..., Any]
OPERATION_HANDLERS: dict[str, OperationHandler] = {}


def _register_handler(names: Iterable[str]) -> Callable[[OperationHandler], OperationHandler]:
    """Enter the decorated handler into `OPERATION_HANDLERS` for each of these operation names."""

    def decorate(handler: OperationHandler) -> OperationHandler:
        OPERATION_HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


# Linear maps ----------------------------------------------------------------------------------------------------------


@_register_handler(["linear"])
def _linear(mode: RuleModeProtocol, func: Any, /, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by the rule of linear maps, or as a product and a sum if the weight depends on the input, too."""
    if depends_on_input(weight):
        product = _product(mode, _set_name("matmul", lambda x, w: x @ w.mT), input, weight)
        if bias is None:
            return product
        return _add(mode, torch.add, product, bias)
    x = mode.rule_set.on_branch(input, mode.tensor_uses)
    return mode.rule_set.linear(lambda x: functional.linear(x, weight.to(x), _cast_bias(bias, x)), x, weight)


@_register_handler(["addmm"])
def _addmm(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """A linear map as GPT-2 computes it, or a sum of products."""
    if depends_on_input(input) or depends_on_input(mat2) or beta != 1 or alpha != 1:
        return _baddbmm(mode, func, input, mat1, mat2, beta=beta, alpha=alpha)
    x = mode.rule_set.on_branch(mat1, mode.tensor_uses)
    return mode.rule_set.linear(lambda x: torch.addmm(input.to(x), x, mat2.to(x)), x, mat2.T)


@_register_handler(["baddbmm"])
def _baddbmm(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """β input + α batch1 @ batch2, as a product, multiplications with constants and a sum."""
    product = _product(mode, torch.matmul, batch1, batch2)
    if alpha != 1:
        product = _product(mode, torch.mul, product, alpha)
    if beta == 0:
        return product
    if beta != 1:
        input = _product(mode, torch.mul, input, beta)
    return _add(mode, torch.add, input, product)


@_register_handler(CONVOLUTION_OPS)
def _convolution(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Convolution; the rule set also gets it as a function of the weights, whose signs it may separate."""
    return mode.rule_set.convolution(
        lambda x: func(x, weight.to(x), _cast_bias(bias, x), *args, **kwargs),
        lambda x, w: func(x, w, None, *args, **kwargs),
        input,
        weight,
    )


@_register_handler(LINEAR_MAP_OPS)
def _linear_map(mode: RuleModeProtocol, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Sum, cumulative sum, average pooling or interpolation, by the rule of linear maps."""
    return mode.rule_set.linear_map(lambda x: func(x, *args, **kwargs), input)


@_register_handler(["mean"])
def _mean(mode: RuleModeProtocol, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Mean, for which a rule set may have a rule other than that of linear maps."""
    return mode.rule_set.mean(lambda x: func(x, *args, **kwargs), input)


# Sums, products and quotients -----------------------------------------------------------------------------------------


@_register_handler(ADDITION_OPS)
def _add(mode: RuleModeProtocol, func: Any, /, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """a + α b; either may be a number or constant, and `add_` and `+=` write into a."""
    reference = input if isinstance(input, Tensor) else other
    a = _as_tensor_like(input, reference)
    b = _as_tensor_like(other, reference)
    if alpha != 1:
        b = _product(mode, torch.mul, b, alpha)
    return mode.rule_set.add(a, b, mode.batch_size, in_place=func.__name__ in ("add_", "__iadd__"))


@_register_handler(SUBTRACTION_OPS)
def _sub(mode: RuleModeProtocol, func: Any, /, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """a − α b, as the sum of a and −α b."""
    return _add(mode, torch.add, input, other, alpha=-alpha)


@_register_handler(["__rsub__", "rsub"])
def _rsub(mode: RuleModeProtocol, func: Any, /, input: Any, other: Any) -> Tensor:
    """other − input, as the sum of other and −1 · input."""
    return _add(mode, torch.add, other, _product(mode, torch.mul, input, -1))


@_register_handler(NEGATION_OPS)
def _neg(mode: RuleModeProtocol, func: Any, /, input: Tensor) -> Tensor:
    """−x, as the product with the constant −1."""
    return _product(mode, torch.mul, input, -1)


@_register_handler(PRODUCT_OPS)
def _product(mode: RuleModeProtocol, func: Any, /, input: Any, other: Any) -> Tensor:
    """A product of two active tensors, or of an active one and a constant."""
    if depends_on_input(input) and depends_on_input(other):
        return mode.rule_set.product(func, input, other)
    if depends_on_input(input):
        return _product_with_constant(mode, func, lambda x: func(x, other), input, other)
    if depends_on_input(other):
        return _product_with_constant(mode, func, lambda x: func(input, x), other, input)
    return func(input, other)


def _product_with_constant(
    mode: RuleModeProtocol, func: Any, apply: Callable[[Tensor], Tensor], x: Tensor, constant: Any
) -> Tensor:
    """Scale x if the product is element by element; any other is a linear map of x."""
    if func.__name__ in ELEMENTWISE_PRODUCT_OPS:
        return mode.rule_set.scale(apply, x, _as_tensor_like(constant, x))
    return mode.rule_set.linear_map(apply, x)


@_register_handler(DIVISION_OPS)
def _div(mode: RuleModeProtocol, func: Any, /, input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """A quotient, whose denominator is a constant: denominators of norms are detached."""
    denominator = other.detach() if isinstance(other, Tensor) else other
    if not depends_on_input(input):
        return torch.div(input, denominator)
    return mode.rule_set.scale(lambda x: torch.div(x, denominator), input, 1 / _as_tensor_like(denominator, input))


@_register_handler(OUT_OF_PLACE_NAMES)
def _run_out_of_place(mode: RuleModeProtocol, func: Any, /, input: Tensor, other: Any) -> Tensor:
    """Compute an in-place operation out of place, and copy the result into its first argument."""
    name = OUT_OF_PLACE_NAMES[func.__name__]
    return input.copy_(OPERATION_HANDLERS[name](mode, getattr(torch, name), input.clone(), other))


@_register_handler(["einsum"])
def _einsum(mode: RuleModeProtocol, func: Any, /, equation: str, *operands: Any) -> Tensor:
    """Einsum of two tensors, by the rule of products; any other number has no rule."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2:
        raise MissingRuleError(f"the operator einsum of {len(operands)} tensors has no rule in {mode.rule_set.name}")
    return _product(mode, _set_name("einsum", lambda a, b: torch.einsum(equation, a, b)), *operands)


@_register_handler(CONSTANT_DENOMINATOR_OPS)
def _denominator(mode: RuleModeProtocol, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A function that computes the denominator of a norm, which is a constant."""
    with torch.no_grad():
        return func(*args, **kwargs)


@_register_handler(["normalize"])
def _normalize(mode: RuleModeProtocol, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x / ‖x‖ with ‖x‖ as a constant, which is recovered as x / normalize(x), or 1 where that is 0/0."""
    with torch.no_grad():
        length = input / func(input, *args, **kwargs)
    return _div(mode, torch.div, input, torch.where(length.isfinite(), length, 1.0))


# Element-wise functions, softmax and norms ----------------------------------------------------------------------------


@_register_handler(ACTIVATION_OPS)
def _activation(mode: RuleModeProtocol, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """f(x) by the rule of element-wise functions; other arguments must not depend on the input."""
    kwargs.pop("inplace", None)
    if any(map(depends_on_input, (*args, *kwargs.values()))):
        raise MissingRuleError(
            f"the operator {func.__name__} with an exponent that depends on the input has no rule in "
            f"{mode.rule_set.name}"
        )
    return mode.rule_set.activation(_set_name(func.__name__, lambda x: func(x, *args, **kwargs)), input)


@_register_handler(IDENTITY_OPS)
def _dropout(
    mode: RuleModeProtocol, func: Any, /, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the input, as dropout does in evaluation mode; active dropout has no rule."""
    if training and p > 0:
        raise MissingRuleError("the operator dropout is active and has no rule: put the model in evaluation mode")
    return input


@_register_handler(["softmax"])
def _softmax(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    dim: int = -1,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A softmax; a dtype narrower than the input's rounds the result, but not the relevance."""
    if isinstance(_stacklevel, torch.dtype):  # the third positional argument of torch.softmax is its dtype
        dtype = _stacklevel

    def apply(x: Tensor) -> Tensor:
        probabilities = torch.softmax(x, dim, dtype=dtype)
        return probabilities.to(torch.promote_types(probabilities.dtype, x.dtype))

    return mode.rule_set.softmax(apply, input, dim, mode.batch_size)


@_register_handler(["layer_norm"])
def _layer_norm(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the axes of `normalized_shape`, by the rule of centred norms."""
    shape = tuple(normalized_shape)

    def apply(x: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias, eps)

    return mode.rule_set.norm(apply, input, weight, len(shape), eps, is_centred=True)


@_register_handler(["rms_norm"])
def _rms_norm(
    mode: RuleModeProtocol,
    func: Any,
    /,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Tensor:
    """Root-mean-square norm; without `eps`, that of the input's dtype is used, as in torch."""
    shape = tuple(normalized_shape)

    def apply(x: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, weight, eps)

    if eps is None:
        return mode.rule_set.norm(apply, input, weight, len(shape), torch.finfo(input.dtype).eps, is_centred=False)
    return mode.rule_set.norm(apply, input, weight, len(shape), eps, is_centred=False)


@_register_handler(["batch_norm"])
def _batch_norm(
    mode: RuleModeProtocol,
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
    """A batch norm with its running statistics, which is a multiplication."""
    if training:
        raise MissingRuleError("the operator batch_norm with batch statistics (in training mode) has no rule")
    factor = torch.rsqrt(running_var + eps)
    if weight is not None:
        factor = factor * weight
    factor = factor.reshape(1, -1, *[1] * (input.dim() - 2))
    return mode.rule_set.scale(
        lambda x: functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), input, factor
    )


def _cast_bias(bias: Tensor | None, x: Tensor) -> Tensor | None:
    """A bias in the dtype and on the device of x."""
    return None if bias is None else bias.to(x)


def _as_tensor_like(value: Any, reference: Tensor) -> Tensor:
    """A value as a tensor; a number gets the dtype and the device of `reference`."""
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value, dtype=reference.dtype, device=reference.device)


def _set_name(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a function the name of its operation, which rules and error messages read."""
    function.__name__ = name
    return function
