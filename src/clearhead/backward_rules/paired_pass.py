"""DeepLIFT's two forward passes: the pass at the input is traced, the pass at the reference compared with the trace.

The second pass runs the same operations in the same order, so each operation finds the inputs that it had in the first
pass, and `backward_rules/deeplift.py` gives its multipliers between the two. No axis of any tensor needs to be known.
Operations that are linear in all active arguments keep their ordinary gradient. Any other operation without a rule
raises `MissingRuleError` with its name; so does a model that runs other operations for the reference, or has other
constants (masks, indices, detached values) there. The modes are active in one thread, inside one `with`; the model is
not patched.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, resolve_name

from clearhead.backward_rules import deeplift
from clearhead.backward_rules.base import MissingRuleError, depends_on_input, flatten_args
from clearhead.backward_rules.deeplift_operators import DECOMPOSITIONS, DEEPLIFT_RULES
from clearhead.backward_rules.linear_operators import LINEAR_OPS

RULE_SET_NAME = "DeepLIFT"


@dataclass
class TracedOperation:
    """One operation of the pass at the input.

    Attributes:
        name: Name of the function of torch.
        inputs: The inputs that depend on the input of the model, of an operation that has a rule.
        versions: Torch's version counters of these inputs, which reveal a later in-place change.
        constants: The other arguments.
    """

    name: str
    #: Active inputs of an operation that has a rule.
    inputs: list[Tensor]
    #: Torch's version counters of the inputs, by which a later in-place change is noticed.
    versions: list[int]
    constants: list[Any]


class PairedMode(TorchFunctionMode):
    """Common part of both passes: finds each operation's rule, and dispatches to `on_rule` or `on_linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not any(map(depends_on_input, flatten_args((args, kwargs)))):
            return func(*args, **kwargs)
        name = func.__name__
        if kwargs.get("inplace") or name in OUT_OF_PLACE_NAMES:
            return self._run_out_of_place(func, args, kwargs)
        steps = _look_up(DECOMPOSITIONS, func, args, kwargs)
        if steps is not None:
            with torch.no_grad():
                value = func(*args, **kwargs)
            with self:
                return DeepLiftFunction.apply(steps().to(value.dtype), value)
        rule = _look_up(DEEPLIFT_RULES, func, (func, *args), kwargs)
        if rule is not None:
            return self.on_rule(func, args, kwargs, *rule)
        output = func(*args, **kwargs)
        if not any(map(depends_on_input, flatten_args(output))):
            return output
        if any(output is arg for arg in flatten_args((args, kwargs))) and not name.endswith("_"):
            return output
        if name not in LINEAR_OPS and name not in DEEPLIFT_RULES and name not in DECOMPOSITIONS:
            raise MissingRuleError(f"the operator {resolve_name(func) or name} has no rule in {RULE_SET_NAME}")
        self.on_linear(name, args, kwargs)
        return output

    def _run_out_of_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an in-place operation out of place, and copy the result into its first argument."""
        out_of_place = getattr(torch, OUT_OF_PLACE_NAMES.get(func.__name__, func.__name__), None) or func
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        with self:
            return args[0].copy_(out_of_place(args[0].clone(), *args[1:], **kwargs))

    def on_rule(
        self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]
    ) -> Any:
        """Run an operation that has a rule.

        Args:
            func: The function of torch that was called.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            inputs: The arguments that depend on the input of the model.
            formula: The rule: computes a value with the gradient of the rule, from a triple for each of the inputs
                (at the reference without graph, at the input, at the reference).

        Returns:
            The output of the operation.
        """
        raise NotImplementedError

    def on_linear(self, name: str, args: Any, kwargs: Any) -> None:
        """Handle an operation that is linear in all arguments that depend on the input.

        Args:
            name: Name of the operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        raise NotImplementedError


class InputTraceMode(PairedMode):
    """The pass at the input: records the inputs and constants of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[TracedOperation] = []

    def on_rule(
        self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]
    ) -> Any:
        """Run the operation, and record its detached inputs, their versions and its constants."""
        detached = [tensor.detach() for tensor in inputs]
        versions = [tensor._version for tensor in detached]
        constants = _collect_constants((args, kwargs))
        self.operations.append(TracedOperation(func.__name__, detached, versions, constants))
        return func(*args, **kwargs)

    def on_linear(self, name: str, args: Any, kwargs: Any) -> None:
        """Record the constants, which have to be the same in the pass at the reference."""
        self.operations.append(TracedOperation(name, [], [], _collect_constants((args, kwargs))))


class DeepLiftMode(PairedMode):
    """The pass at the reference, whose backward pass gives DeepLIFT's multipliers between reference and input.

    Args:
        input_trace: The finished pass at the input.
        form: The form of the rules of softmax and norms (`deeplift.py`).
    """

    def __init__(self, input_trace: InputTraceMode, form: deeplift.RuleForm = "path") -> None:
        super().__init__()
        self.traced_operations = input_trace.operations
        self.next_index = 0
        self.form = form

    def on_rule(
        self, func: Any, args: Any, kwargs: Any, inputs: tuple[Any, ...], formula: Callable[..., Tensor]
    ) -> Any:
        """Return the operation's value; its gradient is that of `formula` between reference and input."""
        with torch.no_grad():
            value = func(*args, **kwargs)
        traced = self._match_operation(func.__name__, args, kwargs)
        if [tensor.shape for tensor in traced.inputs] != [tensor.shape for tensor in inputs]:
            raise MissingRuleError(_format_path_mismatch(func.__name__))
        if [tensor._version for tensor in traced.inputs] != traced.versions:
            raise MissingRuleError(f"an input of the operator {func.__name__} is changed in place later")
        sides = [
            tuple(map(deeplift.upcast_half, (at_reference.detach(), at_input, at_reference)))
            for at_reference, at_input in zip(inputs, traced.inputs, strict=True)
        ]
        with deeplift.use_rule_form(self.form):
            linear = formula(*sides)
        if isinstance(value, tuple):  # a maximum is returned with its index
            return type(value)((DeepLiftFunction.apply(linear.to(value[0].dtype), value[0]), *value[1:]))
        return DeepLiftFunction.apply(linear.to(value.dtype), value)

    def on_linear(self, name: str, args: Any, kwargs: Any) -> None:
        """Compare name and constants with the pass at the input; the ordinary gradient is exact."""
        self._match_operation(name, args, kwargs)

    def _match_operation(self, name: str, args: Any, kwargs: Any) -> TracedOperation:
        """Return the same operation of the pass at the input.

        Raises:
            MissingRuleError: If that pass ran another operation here, or ran it with other constants.
        """
        if self.next_index >= len(self.traced_operations) or self.traced_operations[self.next_index].name != name:
            raise MissingRuleError(_format_path_mismatch(name))
        traced = self.traced_operations[self.next_index]
        self.next_index += 1
        constants = _collect_constants((args, kwargs))
        if len(constants) != len(traced.constants) or not all(map(_is_equal, constants, traced.constants)):
            raise MissingRuleError(
                f"the operator {name} receives a value that depends on the input without a gradient (a choice, an "
                f"index, a detached value), for which {RULE_SET_NAME} has no rule"
            )
        return traced


class DeepLiftFunction(torch.autograd.Function):
    """Returns the value of an operation, and passes the gradient to the output of its rule."""

    @staticmethod
    def forward(ctx: Any, linear: Tensor, value: Tensor) -> Tensor:
        """Return `value`; `linear`, the output of the rule, only connects it to the graph."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient to `linear`, which is linear in Δin, and none to `value`."""
        return gradient[0], None


def reject_custom_functions(target_value: Tensor) -> None:
    """Reject custom autograd functions of the model, which no mode intercepts, by walking the graph of a target value.

    Args:
        target_value: A tensor in the graph of the forward pass.

    Raises:
        MissingRuleError: If the graph contains a `torch.autograd.Function` other than clearhead's own.
    """
    stack = [target_value.grad_fn]
    visited = set()
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, BackwardCFunction) and not isinstance(node, DeepLiftFunction._backward_cls):
            function_name = type(node).__name__.removesuffix("Backward")
            raise MissingRuleError(
                f"the operator {function_name} is a custom autograd function, and has no rule in {RULE_SET_NAME}"
            )
        stack += [input_node for input_node, _ in node.next_functions]


#: In-place operation → the operation that returns a new tensor.
OUT_OF_PLACE_NAMES = {
    **{f"{name}_": name for name in ("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "clamp", "pow")},
    **{f"{name}_": name for name in ("mul", "div", "sub", "add", "abs", "reciprocal", "log", "neg", "softmax")},
    "__imul__": "mul",
    "__idiv__": "div",
    "__itruediv__": "div",
    "__isub__": "sub",
    "__iadd__": "add",
    "__ipow__": "pow",
}


def _look_up(table: dict[str, Callable[..., Any]], func: Any, args: Any, kwargs: Any) -> Any:
    """Return a table's entry for an operation, called with its arguments; None if there is no entry.

    Raises:
        MissingRuleError: If the entry does not accept these arguments.
    """
    name = func.__name__
    if name not in table:
        return None
    try:
        bound = inspect.signature(table[name]).bind(*args, **kwargs)
    except TypeError:
        raise MissingRuleError(
            f"the operator {resolve_name(func) or name} has no rule in {RULE_SET_NAME} with these arguments"
        ) from None
    return table[name](*bound.args, **bound.kwargs)


def _collect_constants(args: Any) -> list[Any]:
    """The arguments without a gradient: tensors and numbers. Weights are left out: both passes share them."""
    return [
        arg
        for arg in flatten_args(args)
        if (isinstance(arg, Tensor) and not arg.requires_grad and not isinstance(arg, nn.Parameter))
        or isinstance(arg, bool | int | float)
    ]


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two constants are equal; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a is b:
            return True
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and a == b


def _format_path_mismatch(name: str) -> str:
    """Message for an operation that only one of the two passes runs at this position."""
    return (
        f"the model runs other operations for the reference than for the input: the operator {name} is in only one of "
        "the two passes"
    )
