"""The operator mode: every operation of a forward pass, seen as it is called, gets the rule of its kind.

An operation that moves numbers about (reshape, index, concatenate …) is differentiated as ever; one of a kind that the
family of rules knows gets its rule; any other that the target depends on is refused by its name. The mode holds in one
thread, inside one `with`, and nothing is patched.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.errors import Refusal
from clearhead.recording.scope import hooks
from clearhead.rules.family import Family


class NoRule(Refusal):
    """An operation that a family of rules does not know."""


class Rules(TorchFunctionMode):
    """A family of rules at work on one forward pass of `size` samples."""

    def __init__(self, family: Family, size: int) -> None:
        super().__init__()
        self.family, self.size = family, size
        #: What became of each tensor so far.
        self.uses = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not any(map(_active, _flat((args, kwargs)))):
            return func(*args, **kwargs)
        name, parts = func.__name__, list(filter(_active, _flat((args, kwargs))))
        if name in KINDS:
            self._use(parts, name)
            return KINDS[name](self, func, *args, **kwargs)
        output = func(*args, **kwargs)
        if not any(map(_active, _flat(output))) or any(output is part for part in parts):
            return output
        if name not in MOVES:
            raise NoRule(f"the operator {resolve_name(func) or name} has no rule in {self.family.name}")
        self._use(parts, name)
        return self.family.picked(output) if name in PICKS and isinstance(output, Tensor) else output

    def _use(self, parts: list[Tensor], name: str) -> None:
        for part in parts if name not in SAME else ():
            self.family.used(part, self.uses, name)


@contextmanager
def under(model: nn.Module, family: Family, size: int) -> Iterator[None]:
    """Let the passes that run in this thread inside the `with` be differentiated by these rules."""
    with hooks(list(_activations(model, family))), Rules(family, size):
        yield


def _activations(model: nn.Module, family: Family) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """transformers' activation functions, some of which are made of several operations, as one function each.

    The module is called with an input out of the graph, and its output gets back into it by the rule.
    """
    thread = threading.get_ident()
    given: dict[int, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() == thread and args and _active(args[0]):
            given[id(module)] = args[0]
            return (args[0].detach(), *args[1:])
        return None

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        x = given.pop(id(module), None) if threading.get_ident() == thread else None
        return None if x is None else family.activation(module.forward, x)

    for module in model.modules():
        if type(module).__module__ == "transformers.activations":
            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(after)


def _flat(parts: Any) -> Iterator[Any]:
    if isinstance(parts, tuple | list):
        for part in parts:
            yield from _flat(part)
    elif isinstance(parts, dict):
        yield from _flat(list(parts.values()))
    else:
        yield parts


def _active(part: Any) -> bool:
    """Whether it depends on the input."""
    return isinstance(part, Tensor) and part.requires_grad


def _tensor(part: Any, beside: Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else torch.as_tensor(part, dtype=beside.dtype, device=beside.device)


#: Operations that move numbers about, leave some out, or change how they are stored.
MOVES = frozenset(
    [
        "view",
        "reshape",
        "view_as",
        "reshape_as",
        "permute",
        "transpose",
        "t",
        "adjoint",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "contiguous",
        "expand",
        "expand_as",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "tensor_split",
        "chunk",
        "unbind",
        "cat",
        "concat",
        "stack",
        "hstack",
        "vstack",
        "__getitem__",
        "select",
        "narrow",
        "index_select",
        "gather",
        "take_along_dim",
        "masked_select",
        "repeat",
        "repeat_interleave",
        "tile",
        "roll",
        "flip",
        "rot90",
        "clone",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "detach",
        "where",
        "masked_fill",
        "pad",
        "broadcast_to",
        "broadcast_tensors",
        "unfold",
        "diagonal",
        "__get__",
        "requires_grad_",
        "register_hook",
        "alias",
        "positive",
        "meshgrid",
        "masked_scatter",
        "pixel_shuffle",
        "pixel_unshuffle",
        "as_strided",
        "__iter__",
        "__set__",
        "retain_grad",
    ]
)
#: Those of them that pick some numbers out.
PICKS = frozenset(("__getitem__", "select", "index_select"))
#: Those that hand over what they are given.
SAME = frozenset(("dropout", "dropout1d", "dropout2d"))
KINDS: dict[str, Callable[..., Any]] = {}


def _kind(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        KINDS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


@_kind("linear")
def _linear(mode: Rules, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _active(weight):
        return _product(mode, functional.linear, input, weight)
    x = mode.family.branched(input, mode.uses)
    return mode.family.linear(lambda x: functional.linear(x, weight, bias), x, weight)


@_kind("addmm")
def _addmm(
    mode: Rules, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if _active(input) or _active(mat2) or beta != 1 or alpha != 1:
        return _baddbmm(mode, func, input, mat1, mat2, beta=beta, alpha=alpha)
    return mode.family.linear(lambda x: torch.addmm(input, x, mat2), mat1, mat2.T)


@_kind("baddbmm")
def _baddbmm(
    mode: Rules, func: Any, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    product = _product(mode, torch.matmul, batch1, batch2) if _active(batch1) or _active(batch2) else batch1 @ batch2
    product = _product(mode, torch.mul, product, alpha) if alpha != 1 and _active(product) else product * alpha
    if beta == 0:
        return product
    scaled = _product(mode, torch.mul, input, beta) if beta != 1 and _active(input) else input * beta
    return _add(mode, torch.add, scaled, product)


@_kind("conv1d", "conv2d", "conv3d")
def _convolution(
    mode: Rules, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    return mode.family.convolution(
        lambda x: func(x, weight, bias, *args, **kwargs),
        lambda x, part: func(x, part, None, *args, **kwargs),
        input,
        weight,
    )


@_kind("add", "add_", "__add__", "__radd__", "__iadd__")
def _add(mode: Rules, func: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    in_place = func.__name__ in ("add_", "__iadd__")
    beside = input if isinstance(input, Tensor) else other
    a, b = _tensor(input, beside), _tensor(other, beside)
    if alpha != 1:
        b = _product(mode, torch.mul, b, alpha) if _active(b) else b * alpha
    return mode.family.add(a, b, mode.size, in_place)


@_kind("sub", "__sub__", "subtract")
def _sub(mode: Rules, func: Any, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _add(mode, torch.add, input, other, alpha=-alpha)


@_kind("__rsub__", "rsub")
def _rsub(mode: Rules, func: Any, input: Any, other: Any) -> Tensor:
    return _add(mode, torch.add, other, _product(mode, torch.mul, input, -1))


@_kind("neg", "negative", "__neg__")
def _neg(mode: Rules, func: Any, input: Tensor) -> Tensor:
    return _product(mode, torch.mul, input, -1)


@_kind("mul", "__mul__", "__rmul__", "multiply", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot")
def _product(mode: Rules, func: Any, input: Any, other: Any) -> Tensor:
    """A product of two activations, or of one with a constant."""
    if _active(input) and _active(other):
        return mode.family.product(func, input, other)
    x = input if _active(input) else other
    constant = _tensor(other if _active(input) else input, x)
    apply = (lambda part: func(part, other)) if _active(input) else (lambda part: func(input, part))
    if "mul" in func.__name__ and "matmul" not in func.__name__:
        return mode.family.scale(apply, x, constant)
    return mode.family.map(apply, x)


@_kind("mul_", "__imul__", "div_", "__itruediv__", "sub_", "__isub__")
def _in_place(mode: Rules, func: Any, input: Tensor, other: Any) -> Tensor:
    """Into a new tensor, and from there into the old one."""
    name = {"mul": "mul", "div": "div", "sub": "sub"}[
        func.__name__.strip("_").removeprefix("i").replace("true", "")[:3]
    ]
    return input.copy_(KINDS[name](mode, getattr(torch, name), input.clone(), other))


@_kind("einsum")
def _einsum(mode: Rules, func: Any, equation: str, *operands: Any) -> Tensor:
    parts = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if len(parts) != 2:
        raise NoRule(f"the operator einsum of {len(parts)} tensors has no rule in {mode.family.name}")
    return _product(mode, _named("einsum", lambda a, b: torch.einsum(equation, a, b)), *parts)


@_kind("div", "__truediv__", "true_divide", "divide")
def _div(mode: Rules, func: Any, input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """What divides is a constant: the denominators of norms."""
    below = other.detach() if isinstance(other, Tensor) else other
    if not _active(input):
        return torch.div(input, below)
    return mode.family.scale(lambda x: torch.div(x, below), input, 1 / _tensor(below, input))


@_kind("rsqrt", "sqrt", "norm", "vector_norm", "std", "var", "reciprocal", "__rdiv__", "__rtruediv__")
def _denominator(mode: Rules, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The denominators of norms are constants."""
    with torch.no_grad():
        return func(*args, **kwargs)


@_kind("mean", "sum", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "interpolate", "cumsum")
def _map(mode: Rules, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return mode.family.map(lambda x: func(x, *args, **kwargs), input)


@_kind(
    *[
        "gelu",
        "relu",
        "silu",
        "tanh",
        "sigmoid",
        "softplus",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "mish",
        "selu",
        "relu6",
        "celu",
        "erf",
        "pow",
        "__pow__",
        "square",
    ]
)
def _activation(mode: Rules, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("inplace", None)
    if any(map(_active, _flat((args, kwargs)))):
        raise NoRule(f"the operator {func.__name__} with an exponent from the input has no rule in {mode.family.name}")
    return mode.family.activation(lambda x: func(x, *args, **kwargs), input)


@_kind(*SAME)
def _dropout(
    mode: Rules, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if training and p > 0:
        raise NoRule("the operator dropout is at work, and has no rule: put the model in evaluation mode")
    return input


@_kind("softmax")
def _softmax(
    mode: Rules, func: Any, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """A softmax in a narrower format than its input's is rounded to it, but what flows back is not."""

    def apply(x: Tensor) -> Tensor:
        found = torch.softmax(x, dim, dtype=dtype)
        return found.to(torch.promote_types(found.dtype, x.dtype))

    return mode.family.softmax(apply, input, mode.size)


@_kind("layer_norm")
def _layer_norm(
    mode: Rules,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    shape = tuple(normalized_shape)
    apply = lambda x: functional.layer_norm(x, shape, weight, bias, eps)  # noqa: E731
    return mode.family.norm(apply, input, weight, len(shape), eps, True)


@_kind("rms_norm")
def _rms_norm(
    mode: Rules, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    shape = tuple(normalized_shape)
    apply = lambda x: functional.rms_norm(x, shape, weight, eps)  # noqa: E731
    least = torch.finfo(input.dtype).eps if eps is None else eps
    return mode.family.norm(apply, input, weight, len(shape), least, False)


@_kind("batch_norm")
def _batch_norm(
    mode: Rules,
    func: Any,
    input: Tensor,
    mean: Any,
    var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With the means and variances that it has learned: a multiplication."""
    if training:
        raise NoRule("the operator batch_norm with the statistics of its batch has no rule")
    factor = torch.rsqrt(var + eps) * (1 if weight is None else weight)
    factor = factor.reshape(1, -1, *[1] * (input.dim() - 2))
    return mode.family.scale(
        lambda x: functional.batch_norm(x, mean, var, weight, bias, False, momentum, eps), input, factor
    )


def _named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.__name__ = name
    return function
