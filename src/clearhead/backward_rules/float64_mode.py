"""Operations in float64, whatever format a model has: for families of rules that amplify rounding (`Family.wide`), and
for the ordinary pass beside one of theirs (`Wide`).

What depends on the input is in float64 from the start of the graph on; every number that an operation takes beside it
goes to float64, too, and none that depends on the input goes back, but what a model writes into a buffer of its own
(`b[:] = x`), which keeps its format. Weights of linear maps go to float64 where they are used (`operators.py`): else a
graph would hold a copy of each.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.backward_rules.base import active, flat

WIDE = torch.float64
#: Operations that say something about a tensor, or ask for something, and compute nothing.
ABOUT = frozenset(("__get__", "__set__", "register_hook", "requires_grad_", "retain_grad"))
#: Operations that take another tensor's format.
ASIDE = frozenset(("to", "type_as", "copy_"))
#: Operations that take the weights of a model.
WEIGHING = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d"))
#: Operations that write into what they are called on, beside those whose names end with an underscore.
WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))
NARROWING = frozenset(("float", "half", "bfloat16"))


class Wide(TorchFunctionMode):
    """Operations that are differentiated as ever, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = list(filter(active, flat((args, kwargs)))) if torch.is_grad_enabled() else []
        if not parts and not mixed(func, args, kwargs):
            return func(*args, **kwargs)
        func, args, kwargs = widened(func, args, kwargs)
        return _weighed(func, args, kwargs) if func.__name__ in WEIGHING and parts else func(*args, **kwargs)


def _weighed(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A map whose weights go to float64 once more on the way back, in place of a copy that the graph would hold."""
    weights: dict[int, Tensor] = {}

    def wide(part: Any) -> Any:
        found = _in(WIDE, part)
        if isinstance(part, Tensor) and found is not part:
            weights[found.untyped_storage().data_ptr()] = part
        return found

    def pack(saved: Tensor) -> Any:
        weight = weights.get(saved.untyped_storage().data_ptr())
        return saved if weight is None else (weight, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].to(WIDE).as_strided(*kept[1:])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return func(*map(wide, args), **{name: wide(part) for name, part in kwargs.items()})


def has_wide(device: torch.device) -> bool:
    return device.type != "mps"


def mixed(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether something in float64 that does not depend on the input (zeros like what does) meets other formats."""
    if func.__name__ in ABOUT | ASIDE:
        return False
    formats = {part.dtype for part in flat((args, kwargs)) if isinstance(part, Tensor) and part.is_floating_point()}
    return WIDE in formats and len(formats) > 1


def widened(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """An operation on something that depends on the input, and its arguments, in float64."""
    name = func.__name__
    if name in ABOUT or not has_wide(next(part.device for part in flat((args, kwargs)) if isinstance(part, Tensor))):
        return func, args, kwargs
    if name in NARROWING:
        return Tensor.double, args[:1], {}
    if name in WRITING or (name.endswith("_") and not name.endswith("__")):
        own = args[0].dtype  # others may hold what is written into, too
        return func, (args[0], *_in(own, args[1:])), _in(own, kwargs)
    if name in WEIGHING and any(map(active, args)):
        return func, tuple(_in(WIDE, part) if active(part) else part for part in args), kwargs
    return func, _in(WIDE, args), _in(WIDE, kwargs)


def _in(dtype: torch.dtype, part: Any) -> Any:
    """Numbers, and what is said about their format, in arguments of any shape."""
    if isinstance(part, Tensor):
        return part.to(dtype) if part.is_floating_point() else part
    if isinstance(part, torch.dtype):
        return dtype if part.is_floating_point else part
    if isinstance(part, dict):
        return {name: _in(dtype, one) for name, one in part.items()}
    if type(part) in (tuple, list):
        return type(part)(_in(dtype, one) for one in part)
    return part
