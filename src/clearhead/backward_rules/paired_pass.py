"""Two passes that are held against each other, operation by operation: the input's is watched, the reference's lifted.

The second pass goes through the same operations in the same order, so each finds what went into it the first time, and
`backward_rules/deeplift.py` says how to differentiate it between the two. No axis of any tensor needs to be known. What
is linear in all that depends on the input is differentiated as ever; any other operation without a rule is refused by
its name, and so is a model that takes another way for the reference, or whose constants (masks, indices, detached
values) are others there. The mode holds in one thread, inside one `with`, and nothing is patched.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, resolve_name

from clearhead.backward_rules import deeplift
from clearhead.backward_rules.base import NoRule, active, flat
from clearhead.backward_rules.deeplift_operators import COMPOSED, RULES
from clearhead.backward_rules.linear_operators import LINEAR

NAME = "DeepLIFT"


@dataclass
class Operation:
    """One operation of the watched pass: what went in, and the constants beside it."""

    name: str
    inputs: list[Tensor]
    versions: list[int]
    constants: list[Any]


class Side(TorchFunctionMode):
    """What both passes have in common: which operations there are, and which of them have a rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not any(map(active, flat((args, kwargs)))):
            return func(*args, **kwargs)
        name = func.__name__
        if kwargs.get("inplace") or name in IN_PLACE:
            return self._in_place(func, args, kwargs)
        steps = _read(COMPOSED, func, args, kwargs)
        if steps is not None:
            with torch.no_grad():
                value = func(*args, **kwargs)
            with self:
                return Lifted.apply(steps().to(value.dtype), value)
        rule = _read(RULES, func, (func, *args), kwargs)
        if rule is not None:
            return self.ruled(func, args, kwargs, *rule)
        output = func(*args, **kwargs)
        made = [part for part in flat(output) if active(part)]
        same = any(output is part for part in flat((args, kwargs))) and not name.endswith("_")
        if not made or same:  # nothing that depends on the input, or nothing new
            return output
        if name not in LINEAR and name not in RULES and name not in COMPOSED:
            raise NoRule(f"the operator {resolve_name(func) or name} has no rule in {NAME}")
        self.linear(name, args, kwargs)
        return output

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Into a new tensor, and from there into the old one."""
        plain = getattr(torch, IN_PLACE.get(func.__name__, func.__name__), None) or func
        rest = {key: value for key, value in kwargs.items() if key != "inplace"}
        with self:
            return args[0].copy_(plain(args[0].clone(), *args[1:], **rest))

    def ruled(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]) -> Any:
        """An operation that has a rule."""
        raise NotImplementedError

    def linear(self, name: str, args: Any, kwargs: Any) -> None:
        """An operation that is linear in all that depends on the input."""
        raise NotImplementedError


class Watched(Side):
    """The pass at the input: everything that goes into an operation is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def ruled(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]) -> Any:
        kept = [part.detach() for part in inputs]
        constants = _constants((args, kwargs))
        self.operations.append(Operation(func.__name__, kept, [part._version for part in kept], constants))
        return func(*args, **kwargs)

    def linear(self, name: str, args: Any, kwargs: Any) -> None:
        self.operations.append(Operation(name, [], [], _constants((args, kwargs))))


class LiftedSide(Side):
    """The pass at the reference, differentiated between the two; `steady` as in `backward_rules/deeplift.py`."""

    def __init__(self, watched: Watched, steady: bool = True) -> None:
        super().__init__()
        self.watched, self.place = watched.operations, 0
        self.rules = nullcontext if steady else deeplift.plain

    def ruled(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]) -> Any:
        with torch.no_grad():
            value = func(*args, **kwargs)
        then = self._same(func.__name__, args, kwargs)
        if [part.shape for part in then.inputs] != [part.shape for part in inputs]:
            raise NoRule(_another_way(func.__name__))
        if [part._version for part in then.inputs] != then.versions:
            raise NoRule(f"what goes into the operator {func.__name__} is changed in place later on")
        sides = zip(inputs, then.inputs, strict=True)
        with self.rules():
            linear = formula(*(tuple(map(deeplift.wide, (now.detach(), before, now))) for now, before in sides))
        if isinstance(value, tuple):  # a maximum comes with its place
            return type(value)((Lifted.apply(linear.to(value[0].dtype), value[0]), *value[1:]))
        return Lifted.apply(linear.to(value.dtype), value)

    def linear(self, name: str, args: Any, kwargs: Any) -> None:
        self._same(name, args, kwargs)

    def _same(self, name: str, args: Any, kwargs: Any) -> Operation:
        """The same operation of the watched pass."""
        if self.place >= len(self.watched) or self.watched[self.place].name != name:
            raise NoRule(_another_way(name))
        then = self.watched[self.place]
        self.place += 1
        constants = _constants((args, kwargs))
        if len(constants) != len(then.constants) or not all(map(_equal, constants, then.constants)):
            raise NoRule(
                f"the operator {name} is given something that depends on the input without a gradient (a choice, an "
                f"index, a detached value), for which {NAME} has no rule"
            )
        return then


class Lifted(torch.autograd.Function):
    """The value of an operation, with the derivative of its rule."""

    @staticmethod
    def forward(ctx: Any, linear: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0], None


def refuse_unseen(number: Tensor) -> None:
    """Functions that a model differentiates by code of its own pass no mode: they are found on the way back."""
    waiting, known = [number.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, BackwardCFunction) and not isinstance(node, Lifted._backward_cls):
            own = type(node).__name__.removesuffix("Backward")
            raise NoRule(f"the operator {own} is a function with a derivative of its own, and has no rule in {NAME}")
        waiting += [before for before, _ in node.next_functions]


#: Operations that write into their first input, and the one that does not.
IN_PLACE = {
    **{f"{name}_": name for name in ("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "clamp", "pow")},
    **{f"{name}_": name for name in ("mul", "div", "sub", "add", "abs", "reciprocal", "log", "neg", "softmax")},
    "__imul__": "mul",
    "__idiv__": "div",
    "__itruediv__": "div",
    "__isub__": "sub",
    "__iadd__": "add",
    "__ipow__": "pow",
}


def _read(table: dict[str, Callable[..., Any]], func: Any, args: Any, kwargs: Any) -> Any:
    """What a table says about an operation and its arguments."""
    name = func.__name__
    if name not in table:
        return None
    try:
        given = inspect.signature(table[name]).bind(*args, **kwargs)
    except TypeError:
        raise NoRule(f"the operator {resolve_name(func) or name} has no rule in {NAME} with these arguments") from None
    return table[name](*given.args, **given.kwargs)


def _constants(parts: Any) -> list[Any]:
    """What an operation is given that has no gradient; weights are the same at all times."""
    return [
        part
        for part in flat(parts)
        if (isinstance(part, Tensor) and not part.requires_grad and not isinstance(part, nn.Parameter))
        or isinstance(part, bool | int | float)
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one is other:
            return True
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and bool(((one == other) | ((one != one) & (other != other))).all())
    return type(one) is type(other) and one == other


def _another_way(name: str) -> str:
    return f"the model takes another way for the reference than for the input: the operator {name} is in one alone"
