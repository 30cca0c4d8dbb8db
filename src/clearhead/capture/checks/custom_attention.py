"""Checks of registered attention functions: they must match their modules, and all attention must be captured."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.sources.custom_modules import CUSTOM_MODULES, find_custom_modules
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

if TYPE_CHECKING:
    from clearhead.capture.checks.self_test import CallSite
    from clearhead.capture.context import CapturedCall

#: Class names of attention modules, and of modules that only have the word in their name.
_ATTENTION_PATTERN = re.compile(r"attention|attn", re.IGNORECASE)
_NON_ATTENTION_PATTERN = re.compile(r"norm|dropout|mask|bias|output|position", re.IGNORECASE)


def is_non_transformers_model(topology: ModelTopology) -> bool:
    """Whether no module is a `PreTrainedModel`, so that only registered functions tell how the model attends."""
    from transformers import PreTrainedModel

    return not any(issubclass(cls, PreTrainedModel) for cls in topology.module_classes)


def check_custom_attention(
    topology: ModelTopology,
    forward: Callable[..., tuple[Any, "list[CapturedCall]", dict[str, Tensor]]],
    inputs: Mapping[str, Any],
    locate_calls: "Callable[[Sequence[CapturedCall]], list[CallSite]]",
    tolerance: float,
) -> None:
    """Compare each registered function with its module, and check that outputs come from the returned attention.

    Args:
        topology: The modules of the model.
        forward: Captured forward pass.
        inputs: Keyword arguments of the model.
        locate_calls: Returns the call site of each call.
        tolerance: Largest relative difference that counts as equal.

    Raises:
        UnsupportedError: A check failed; the message says which and what to change.
    """
    model = topology.model
    module_runs: list[_ModuleRun] = []
    unregistered: dict[str, str] = {}
    hooks = [*_register_io_hooks(topology, module_runs), *_register_unknown_attention_hooks(topology, unregistered)]
    with torch.enable_grad(), remove_hooks_on_exit(hooks):
        output, calls, _ = forward(inputs)
    for run in module_runs:
        _check_output(model, run.module, run.output, run.module(*run.args, **run.kwargs), tolerance)
    if is_non_transformers_model(topology):
        _check_all_called(topology, calls, unregistered)
    else:
        calls = [call for call in calls if call.source is CUSTOM_MODULES]
    for call in calls:
        _check_probabilities(model, call)
    _check_output_depends_on_attention(model, calls, output, tolerance)
    _check_sequential(model, calls, locate_calls(calls))


@dataclass(frozen=True)
class _ModuleRun:
    """Arguments of a registered module, and the output that its registered function computed."""

    module: nn.Module
    args: Any
    kwargs: Any
    output: Any


def _register_io_hooks(topology: ModelTopology, runs: list[_ModuleRun]) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Register hooks that keep the arguments and outputs of registered modules."""

    def keep_run(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # cloned: the model may change them in place
        runs.append(_ModuleRun(module, _clone_tensors(args), _clone_tensors(kwargs), _clone_tensors(output)))

    for module in find_custom_modules(topology).values():
        yield module.register_forward_hook(keep_run, with_kwargs=True)


def _register_unknown_attention_hooks(
    topology: ModelTopology, unregistered: dict[str, str]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Register hooks that keep name and class of modules named attention that run without a registered function."""
    custom_modules = list(find_custom_modules(topology).values())
    custom_ids = {id(child) for module in custom_modules for child in module.modules()}
    # registered modules, what they contain, and what contains them
    covered_ids = {
        id(module) for module in topology.modules if any(id(child) in custom_ids for child in module.modules())
    }

    def keep_name(name: str, module: nn.Module, args: Any, output: Any) -> None:
        unregistered[name] = type(module).__name__

    for module in topology.modules:
        class_name = type(module).__name__
        is_attention = _ATTENTION_PATTERN.search(class_name) and not _NON_ATTENTION_PATTERN.search(class_name)
        if is_attention and id(module) not in covered_ids:
            yield module.register_forward_hook(partial(keep_name, topology.names[id(module)]))


def _check_output(model: nn.Module, module: nn.Module, output: Any, expected_output: Any, tolerance: float) -> None:
    """Check that a registered function computes what its module does, in shape and within the tolerance."""
    tensors = list(iter_float_tensors(output))
    expected = list(iter_float_tensors(expected_output))
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected]:
        difference = f"{_format_shapes(tensors)} instead of {_format_shapes(expected)}"
    else:
        gap = max((_compute_relative_gap(*pair) for pair in zip(tensors, expected, strict=True)), default=0.0)
        if gap <= tolerance:
            return
        difference = f"relative gap {gap:.1e}"
    raise UnsupportedError(
        f"{type(model).__name__}: the function registered for {type(module).__name__} computes a different output than "
        f"the module itself ({difference})"
    )


def _check_all_called(
    topology: ModelTopology, calls: "Sequence[CapturedCall]", unregistered: Mapping[str, str]
) -> None:
    """Check that every registered module ran, and that no module named attention ran unregistered."""
    model_name = type(topology.model).__name__
    captured = {call.module for call in calls}
    missing = [name for name in find_custom_modules(topology) if name not in captured]
    if missing:
        raise UnsupportedError(
            f"{model_name}: {missing[0]} computes attention, but its forward method was not called. If the model calls "
            "another method of this module, call its forward instead; if the model does not use the module, remove it"
        )
    unknown = [f"{name} ({class_name})" for name, class_name in unregistered.items() if name not in captured]
    if unknown:
        raise UnsupportedError(
            f"{model_name}: {unknown[0]} is named attention, but clearhead does not recognise its class: "
            "register it with clearhead.register_attention"
        )


def _check_probabilities(model: nn.Module, call: "CapturedCall") -> None:
    """Check that attention is never negative, and sums to at most one per query (less where keys are dropped)."""
    attention = call.attention.detach()
    if not (bool((attention >= 0).all()) and bool((attention.sum(-1) <= 1.01).all())):
        raise UnsupportedError(
            f"{type(model).__name__}: the attention returned for {call.module} is not a probability distribution "
            f"(values from {float(attention.min()):.2g} to {float(attention.max()):.2g}): return it after the softmax"
        )


def _check_output_depends_on_attention(
    model: nn.Module, calls: "Sequence[CapturedCall]", output: Any, tolerance: float
) -> None:
    """Check that each output is A·V.

    With O = A·V and any function y of O:  Aᵀ·∂y/∂A = Aᵀ·(∂y/∂O·Vᵀ) = ∂y/∂V·Vᵀ, head by head.
    """
    with torch.enable_grad():
        differentiable = [tensor for tensor in iter_float_tensors(output) if tensor.requires_grad]
        y = sum((_project_to_scalar(tensor) for tensor in differentiable), torch.zeros(()))
    if not differentiable:
        raise UnsupportedError(
            f"{type(model).__name__}: its output does not depend on its input through differentiable operations"
        )
    nodes = [node for call in calls for node in (call.attention, call.values) if node is not None]
    for call in calls:
        if not call.attention.requires_grad:
            raise _make_unused_tensor_error(model, calls, call.attention, "attention")
    node_gradients = torch.autograd.grad(y, nodes, allow_unused=True, retain_graph=True)
    gradients = dict(zip(map(id, nodes), node_gradients, strict=True))
    for call in calls:
        attention_gradient = gradients[id(call.attention)]
        if attention_gradient is None:
            raise _make_unused_tensor_error(model, calls, call.attention, "attention")
        if call.values is None:
            continue
        value_gradient = gradients[id(call.values)]
        if value_gradient is None:
            raise _make_unused_tensor_error(model, calls, call.values, "values")
        per_head = call.attention.mT @ attention_gradient
        per_kv_head = per_head.unflatten(1, (call.values.shape[1], -1)).sum(2)  # heads of a group share their values
        gap = _compute_relative_gap(per_kv_head, value_gradient @ call.values.mT)
        if not gap <= 10 * tolerance:
            raise UnsupportedError(
                f"{type(model).__name__}: the output of {call.module} is not its attention times its values (relative "
                f"gap {gap:.1e}): return the two tensors that were multiplied"
            )


def _make_unused_tensor_error(
    model: nn.Module, calls: "Sequence[CapturedCall]", node: Tensor, name: str
) -> UnsupportedError:
    """Return the error for a returned tensor that the model's output was not computed from."""
    module = next(call.module for call in calls if call.attention is node or call.values is node)
    return UnsupportedError(
        f"{type(model).__name__}: its output does not depend on the tensor returned as the {name} of {module}: return "
        "the tensor that the output was computed from, not a copy, a view or a second computation of it"
    )


def _check_sequential(model: nn.Module, calls: "Sequence[CapturedCall]", call_sites: "Sequence[CallSite]") -> None:
    """Check that each call depends on the previous one: parallel heads are one call, not several layers."""
    calls_by_streams: dict[tuple[str, str], list[CapturedCall]] = {}
    for call, site in zip(calls, call_sites, strict=True):
        calls_by_streams.setdefault((site.query_stream, site.key_stream), []).append(call)
    for stream_calls in calls_by_streams.values():
        for previous, current in pairwise(stream_calls):
            with torch.enable_grad():
                y = _project_to_scalar(current.attention)
            (gradient,) = torch.autograd.grad(y, previous.attention, allow_unused=True, retain_graph=True)
            if gradient is None:
                raise UnsupportedError(
                    f"{type(model).__name__}: {previous.module} and {current.module} attend in parallel, so they are "
                    "heads of one call, not two layers: register the module that holds them, with their attention "
                    "along the head axis"
                )


def _project_to_scalar(tensor: Tensor) -> Tensor:
    """A linear combination of all elements, with fixed weights."""
    weights = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64).sin().to(tensor.dtype)
    return (tensor * weights.reshape(tensor.shape)).sum()


def iter_float_tensors(output: Any) -> Iterator[Tensor]:
    """Iterate over the floating-point tensors in an output: a tensor, a mapping, a sequence, or an object.

    Args:
        output: Output of a module, nested at will.

    Yields:
        The tensors, depth first; other values are skipped.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from iter_float_tensors(value)
    elif isinstance(output, tuple | list):
        for item in output:
            yield from iter_float_tensors(item)
    elif hasattr(output, "__dict__"):
        yield from iter_float_tensors(vars(output))


def _clone_tensors(value: Any) -> Any:
    """Copy and detach all tensors in nested mappings and sequences; sequences become tuples."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _clone_tensors(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_clone_tensors(item) for item in value)
    return value


def _compute_relative_gap(tensor: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest absolute value of `reference`."""
    return float((tensor - reference).detach().abs().max() / reference.detach().abs().max().clamp(min=1e-12))


def _format_shapes(tensors: Sequence[Tensor]) -> str:
    """Format the shapes of tensors for an error message."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
