"""Captures attention modules that are not from transformers: a registered function replaces their forward in a pass."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.capture.context import CaptureContext, suspended_capture
from clearhead.capture.sources.base import CaptureSource
from clearhead.capture.topology import ModelTopology
from clearhead.errors import InputError, UnsupportedError

#: Result of a registered function: the module's output, its attention (batch head query key) and, if any, its values.
CustomAttentionResult = tuple[Any, Tensor] | tuple[Any, Tensor, Tensor]
CustomAttentionForward = Callable[..., CustomAttentionResult]

_CUSTOM_FORWARDS: dict[type[nn.Module], CustomAttentionForward] = {}


def register_attention(module_class: type[nn.Module]) -> Callable[[CustomAttentionForward], CustomAttentionForward]:
    """Register a function that computes the attention of a class of modules, so that its calls can be captured.

    The function gets the module and the arguments of its forward. It computes the same output, and returns it together
    with the attention it used, batch × head × query × key, and the values, batch × head × key × width, if it has them:
    the tensors that were multiplied, not views or copies of them. The self-test compares the function with the module,
    checks that the output is computed from this attention and these values, and raises an error if it is not.

    Args:
        module_class: The class of the attention modules. Subclasses that inherit its forward are captured, too.

    Returns:
        A decorator for the function.

    Raises:
        InputError: `module_class` is not a class of modules.

    Example:
        A module with its own projections::

            @clearhead.register_attention(MyAttention)
            def attend(module, x, mask=None):
                q, k, v = module.project(x)
                attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
                return module.out((attention @ v).transpose(1, 2).flatten(2)), attention, v
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise InputError(
            f"register_attention takes a class of modules (register_attention(MyAttention)), not {module_class!r}"
        )

    def decorate(function: CustomAttentionForward) -> CustomAttentionForward:
        _CUSTOM_FORWARDS[module_class] = function
        return function

    return decorate


def find_custom_forward(module_class: type[nn.Module]) -> CustomAttentionForward | None:
    """Return the function registered for a class of modules, or for a base class whose forward it inherits."""
    for base in module_class.__mro__:
        if base in _CUSTOM_FORWARDS and module_class.forward is base.forward:
            return _CUSTOM_FORWARDS[base]
    return None


def find_custom_modules(topology: ModelTopology) -> dict[str, nn.Module]:
    """Return the modules that have a registered function, by name, except those inside of another such module.

    Args:
        topology: The modules of the model.

    Returns:
        Modules by full name; empty if none has a registered function.
    """
    custom_classes = {cls for cls in topology.module_classes if find_custom_forward(cls) is not None}
    if not custom_classes:
        return {}
    custom = {topology.names[id(module)]: module for module in topology.modules if type(module) in custom_classes}
    nested_ids = {id(child) for module in custom.values() for child in module.modules() if child is not module}
    return {name: module for name, module in custom.items() if id(module) not in nested_ids}


class CustomModules(CaptureSource):
    """Replaces the forward of modules that have a registered function by this function."""

    name = "registered"

    @contextmanager
    def capturing(self, context: CaptureContext) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, Any]] = []
        try:
            for name, module in find_custom_modules(context.topology).items():
                # accelerate sets a forward on the instance that moves tensors between devices and calls `_old_forward`
                attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
                instance_forward = module.__dict__.get(attribute)
                if instance_forward is not None and attribute == "forward":
                    raise UnsupportedError(
                        f"{context.model_name}: the forward of {name} was replaced on the module itself, or another "
                        "pass is capturing it, so the registered function cannot replace it"
                    )
                module.__dict__[attribute] = partial(_run_custom_forward, module, context)
                replaced.append((module, attribute, instance_forward))
            has_fast_path = any(issubclass(cls, nn.TransformerEncoderLayer) for cls in context.topology.module_classes)
            with _DisableEncoderFastPath() if has_fast_path else nullcontext():
                yield
        finally:
            for module, attribute, instance_forward in replaced:
                del module.__dict__[attribute]
                if instance_forward is not None:
                    module.__dict__[attribute] = instance_forward


CUSTOM_MODULES = CustomModules()


def _run_custom_forward(module: nn.Module, context: CaptureContext, *args: Any, **kwargs: Any) -> Any:
    """Run the registered function in place of the module's forward, and record its attention."""
    attend = find_custom_forward(type(module))
    if attend is None or not context.is_active:
        return type(module).forward(module, *args, **kwargs)
    with suspended_capture():  # attention modules inside of this one are not captured by themselves
        attend_result = _compute_custom_attention(attend, module, *args, **kwargs)
    attention, values = _check_attention_result(attend_result, module, context)
    context.record_call(CUSTOM_MODULES, module, attention, values)
    return context.maybe_zero_output(attend_result[0])


class _ThreadState(threading.local):
    replace_attention: Callable[[Tensor], Tensor] | None = None


_thread_state = _ThreadState()


@contextmanager
def replaced_custom_attention(replace_attention: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with`, registered modules use `replace_attention(attention)` in this thread's captured passes.

    Args:
        replace_attention: Receives the attention weights (batch, head, query, key), and returns others of that shape.

    Yields:
        Nothing: the `with` contains the passes.

    Raises:
        UnsupportedError: In a pass, if a registered function does not compute its attention itself.
    """
    outer_replacement = _thread_state.replace_attention
    _thread_state.replace_attention = replace_attention
    try:
        yield
    finally:
        _thread_state.replace_attention = outer_replacement


def _compute_custom_attention(attend: CustomAttentionForward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a registered function; if its attention is replaced, run it again with the replacement from there on."""
    replace_attention = _thread_state.replace_attention
    if replace_attention is None:
        return attend(module, *args, **kwargs)
    with _OperationTrace() as trace:
        attend_result = attend(module, *args, **kwargs)
    attention = None
    if isinstance(attend_result, tuple) and len(attend_result) > 1:
        attention = attend_result[1]
    operation_index = max((i for i, result in enumerate(trace.results) if result is attention), default=None)
    if operation_index is None:
        raise UnsupportedError(
            f"the attention of {type(module).__name__} cannot be replaced: the function registered for it does not "
            "compute it, but received it as an argument"
        )
    with _OperationTrace(operation_index, replace_attention(attend_result[1])):
        return attend(module, *args, **kwargs)


class _OperationTrace(TorchFunctionMode):
    """Keeps the result of each torch operation; can replace the result of one of them."""

    def __init__(self, replaced_index: int | None = None, replacement: Tensor | None = None) -> None:
        super().__init__()
        self.replaced_index = replaced_index
        self.replacement = replacement
        self.results: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if len(self.results) == self.replaced_index:
            result = self.replacement
        self.results.append(result)
        return result


_RESULT_SHAPES = {"attention": "batch × head × query × key", "values": "batch × head × key × width"}


def _check_attention_result(
    attend_result: Any, module: nn.Module, context: CaptureContext
) -> tuple[Tensor, Tensor | None]:
    """Return attention and, if any, values of a registered function's result; raise an error if a shape is wrong."""
    function = f"the function registered for {type(module).__name__} ({context.get_module_name(module)})"
    if not isinstance(attend_result, tuple) or len(attend_result) not in (2, 3):
        raise UnsupportedError(
            f"{function} must return output, attention and, if it has them, values, not {type(attend_result).__name__}"
        )
    for (name, accepted), tensor in zip(_RESULT_SHAPES.items(), attend_result[1:], strict=False):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnsupportedError(
                f"{function} must return {name} as {accepted}, but returned {shape}: keep an axis of length one if "
                "there is one head, or one query"
            )
    if len(attend_result) == 2:
        return attend_result[1], None
    return attend_result[1], attend_result[2]


class _DisableEncoderFastPath(TorchFunctionMode):
    """Does nothing, but its presence keeps nn.TransformerEncoder from its fused layers, which call no attention.

    They are used where no gradient is required. torch's own switch would affect running passes of all threads.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@register_attention(nn.MultiheadAttention)
def _multihead_attention_forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> CustomAttentionResult:
    """Attention of torch's own module, whose forward returns a copy of its weights, or never materialises them.

    `is_causal` is only a hint about `attn_mask`, and is ignored.
    """
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError(
            "nn.MultiheadAttention with bias_k or add_zero_attn attends to keys that are not units of the input"
        )
    is_unbatched = query.dim() == 2
    batch_axis = 0 if is_unbatched or module.batch_first else 1
    query, key, value = (_to_batch_first(tensor, is_unbatched, batch_axis) for tensor in (query, key, value))
    projection_weights, biases = _get_qkv_projections(module)
    projected = map(nn.functional.linear, (query, key, value), projection_weights, biases)
    q, k, v = (tensor.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for tensor in projected)
    scores = q @ k.mT / module.head_dim**0.5
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unflatten(-1, (1, 1, -1))
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (len(q), -1))
    for mask in (attn_mask, key_padding_mask):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(mask, float("-inf"))
        else:
            scores = scores + mask
    attention = scores.softmax(-1)
    output = module.out_proj((attention @ v).transpose(1, 2).flatten(2))
    weights = None
    if need_weights:
        weights = attention.mean(1) if average_attn_weights else attention
    if not is_unbatched:
        return (output.transpose(0, batch_axis), weights), attention, v
    if weights is not None:
        weights = weights[0]
    return (output[0], weights), attention, v


def _to_batch_first(tensor: Tensor, is_unbatched: bool, batch_axis: int) -> Tensor:
    """Move the batch axis to the front, or add one of length one."""
    return tensor[None] if is_unbatched else tensor.transpose(0, batch_axis)


def _get_qkv_projections(module: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights and biases of queries, keys and values, which the module stores packed or as separate parameters."""
    biases: Sequence[Tensor | None] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3), biases
    return (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), biases
