"""Runs a model's operations in float64, whatever dtype the model has.

Used for rule sets that amplify rounding errors (`RuleSet.needs_float64`), and for the ordinary pass that is compared
with such a pass (`Float64Mode`).

Tensors that depend on the input are float64 from the start of the graph. The other floating-point arguments of their
operations are cast to float64, too. Casts back are ignored, except where a model writes into its own buffer
(`b[:] = x`), which keeps its dtype. Weights of linear maps are cast where they are used (`operators.py`): otherwise the
graph would hold a copy of each.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.backward_rules.base import depends_on_input, flatten_args

FLOAT64 = torch.float64
#: Operations that read or set attributes and hooks of a tensor, and compute nothing.
METADATA_OPS = frozenset(("__get__", "__set__", "register_hook", "requires_grad_", "retain_grad"))
#: Operations that change a tensor's dtype to that of another.
CAST_OPS = frozenset(("to", "type_as", "copy_"))
#: Operations that receive weights of the model.
WEIGHT_OPS = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d"))
#: In-place operations whose names do not end with a single underscore.
INPLACE_OPS = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))
DOWNCAST_OPS = frozenset(("float", "half", "bfloat16"))


class Float64Mode(TorchFunctionMode):
    """Runs operations that depend on the input in float64, with their ordinary gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_active = torch.is_grad_enabled() and any(map(depends_on_input, flatten_args((args, kwargs))))
        if not is_active and not mixes_dtypes(func, args, kwargs):
            return func(*args, **kwargs)
        func, args, kwargs = cast_call_to_float64(func, args, kwargs)
        if func.__name__ in WEIGHT_OPS and is_active:
            return _call_with_float64_weights(func, args, kwargs)
        return func(*args, **kwargs)


def _call_with_float64_weights(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Call a linear map in float64 without a float64 copy of its weights in the graph.

    The graph saves the original weights; the backward pass casts them again.
    """
    weights: dict[int, Tensor] = {}

    def cast_and_register(arg: Any) -> Any:
        cast = _cast_args(FLOAT64, arg)
        if isinstance(arg, Tensor) and cast is not arg:
            weights[cast.untyped_storage().data_ptr()] = arg
        return cast

    def pack(saved: Tensor) -> Any:
        weight = weights.get(saved.untyped_storage().data_ptr())
        if weight is None:
            return saved
        return weight, saved.size(), saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weight, *layout = packed
        return weight.to(FLOAT64).as_strided(*layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return func(*map(cast_and_register, args), **{name: cast_and_register(arg) for name, arg in kwargs.items()})


def supports_float64(device: torch.device) -> bool:
    """Whether torch computes in float64 on a device; it does not on MPS.

    Args:
        device: Any device of torch.

    Returns:
        False on MPS only.
    """
    return device.type != "mps"


def mixes_dtypes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation receives tensors of float64 and of another floating-point dtype.

    This happens without a gradient, too: zeros made like a tensor that depends on the input are float64.
    """
    if func.__name__ in METADATA_OPS | CAST_OPS:
        return False
    dtypes = {arg.dtype for arg in flatten_args((args, kwargs)) if isinstance(arg, Tensor) and arg.is_floating_point()}
    return FLOAT64 in dtypes and len(dtypes) > 1


def cast_call_to_float64(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return an operation and its arguments so that it computes in float64.

    Args:
        func: The operation, with at least one tensor among its arguments.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The operation to call, its positional and its keyword arguments.
    """
    name = func.__name__
    device = next(arg.device for arg in flatten_args((args, kwargs)) if isinstance(arg, Tensor))
    if name in METADATA_OPS or not supports_float64(device):
        return func, args, kwargs
    if name in DOWNCAST_OPS:
        return Tensor.double, args[:1], {}
    if name in INPLACE_OPS or (name.endswith("_") and not name.endswith("__")):
        buffer_dtype = args[0].dtype  # the buffer keeps its dtype: other code may hold it, too
        return func, (args[0], *_cast_args(buffer_dtype, args[1:])), _cast_args(buffer_dtype, kwargs)
    if name in WEIGHT_OPS and any(map(depends_on_input, args)):
        return func, tuple(_cast_args(FLOAT64, arg) if depends_on_input(arg) else arg for arg in args), kwargs
    return func, _cast_args(FLOAT64, args), _cast_args(FLOAT64, kwargs)


def _cast_args(dtype: torch.dtype, arg: Any) -> Any:
    """Cast floating-point tensors, and replace floating-point dtypes, in nested arguments."""
    if isinstance(arg, Tensor) and arg.is_floating_point():
        return arg.to(dtype)
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return dtype
    if isinstance(arg, dict):
        return {name: _cast_args(dtype, item) for name, item in arg.items()}
    if type(arg) in (tuple, list):
        return type(arg)(_cast_args(dtype, item) for item in arg)
    return arg
