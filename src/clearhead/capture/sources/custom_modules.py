"""Recording modules that are not from transformers: a registered function stands in for their forward meanwhile."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.errors import InputError, Refusal

if TYPE_CHECKING:
    from clearhead.capture.sources.attention_interface import Listener

#: What a stand-in returns: the module's output, its attention (batch head query key) and, where known, its values.
Attended = tuple[Any, Tensor] | tuple[Any, Tensor, Tensor]
Attend = Callable[..., Attended]

_REGISTERED: dict[type[nn.Module], Attend] = {}


def register_attention(kind: type[nn.Module]) -> Callable[[Attend], Attend]:
    """Tell clearhead how a class of modules attends, so that its calls can be recorded.

    The function gets the module and the arguments of its forward, computes the same output, and returns it together
    with the attention it used, batch × head × query × key, and the values, batch × head × key × width, if it has them:
    the very tensors that were multiplied, not views or copies of them. The self-test compares the function with the
    module, checks that the output was made from this attention and these values, and refuses if it was not.

        @clearhead.register_attention(MyAttention)
        def attend(module, x, mask=None):
            q, k, v = module.project(x)
            attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return module.out((attention @ v).transpose(1, 2).flatten(2)), attention, v
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(f"register_attention takes a class of modules (register_attention(MyAttention)), not {kind!r}")

    def decorate(function: Attend) -> Attend:
        _REGISTERED[kind] = function
        return function

    return decorate


def stand_in_of(module: nn.Module) -> Attend | None:
    """The function that is registered for a module; one that a class inherits counts while its forward is inherited."""
    for kind in type(module).__mro__:
        if kind in _REGISTERED and type(module).forward is kind.forward:
            return _REGISTERED[kind]
    return None


def registered(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that functions stand in for, by name. What lies inside one of them is part of it."""
    found = {name: module for name, module in model.named_modules() if stand_in_of(module) is not None}
    inside = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if id(module) not in inside}


@contextmanager
def heard(model: nn.Module, listener: "Listener") -> Iterator[None]:
    """Let the stand-ins of registered modules run in this thread's pass inside the `with`."""
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, module in registered(model).items():
            # accelerate puts a forward of its own on the module, which moves tensors between devices and calls this.
            slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            before = module.__dict__.get(slot)
            if before is not None and slot == "forward":
                raise Refusal(
                    f"{type(model).__name__}: the forward of {name} was replaced on the module itself, or another pass "
                    "records it now, so no function can stand in for it"
                )
            module.__dict__[slot] = partial(_stand_in, module, listener)
            replaced.append((module, slot, before))
        fuses = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())
        with _NotFused() if fuses else nullcontext():
            yield
    finally:
        for module, slot, before in replaced:
            del module.__dict__[slot]
            if before is not None:
                module.__dict__[slot] = before


def _stand_in(module: nn.Module, listener: "Listener", *args: Any, **kwargs: Any) -> Any:
    attend = stand_in_of(module)
    if attend is None or not listener.listening:
        return type(module).forward(module, *args, **kwargs)
    with listener.away():  # attention inside this one is part of it
        attended = _attended(attend, module, *args, **kwargs)
    attention, values = _checked(attended, module, listener)
    listener.hear(module, attention, values, registered=True)
    return listener.passed_on(attended[0])


_active = threading.local()


@contextmanager
def replacing(other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In recorded passes of this thread inside the `with`, registered modules attend with `other(their attention)`."""
    outer: Callable[[Tensor], Tensor] | None = getattr(_active, "other", None)
    _active.other = other
    try:
        yield
    finally:
        _active.other = outer


def _attended(attend: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the function gives; where attention is replaced, it runs again with the other one from there on."""
    other: Callable[[Tensor], Tensor] | None = getattr(_active, "other", None)
    if other is None:
        return attend(module, *args, **kwargs)
    with _Steps() as steps:
        attended = attend(module, *args, **kwargs)
    wanted = attended[1] if isinstance(attended, tuple) and len(attended) > 1 else None
    place = max((i for i, made in enumerate(steps.made) if made is wanted), default=None)
    if place is None:
        raise Refusal(
            f"the attention of {type(module).__name__} cannot be replaced: the function registered for it does not "
            "compute it, but was given it"
        )
    with _Steps(place, other(attended[1])):
        return attend(module, *args, **kwargs)


class _Steps(TorchFunctionMode):
    """Remembers what each operation gave; of one of them, it gives another tensor in its place."""

    def __init__(self, place: int | None = None, other: Tensor | None = None) -> None:
        super().__init__()
        self.place, self.other = place, other
        self.made: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        made = self.other if len(self.made) == self.place else made
        self.made.append(made)
        return made


def _checked(attended: Any, module: nn.Module, listener: "Listener") -> tuple[Tensor, Tensor | None]:
    """Attention and, where there are, values, of the right shape."""
    who = f"the function registered for {type(module).__name__} ({listener.name_of(module)})"
    if not isinstance(attended, tuple) or len(attended) not in (2, 3):
        raise Refusal(f"{who} must return output, attention and, if it has them, values, not {type(attended).__name__}")
    for name, part in zip(("attention", "values"), attended[1:], strict=False):
        if not isinstance(part, Tensor) or part.dim() != 4:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            wanted = "batch × head × query × key" if name == "attention" else "batch × head × key × width"
            raise Refusal(
                f"{who} must return {name} as {wanted}, but returned {shape}: compute with an axis of one where there "
                "is one head, or one query"
            )
    return attended[1], attended[2] if len(attended) == 3 else None


class _NotFused(TorchFunctionMode):
    """Changes nothing, but is there: so nn.TransformerEncoder does not fuse whole layers, in which no attention is
    called, where no gradient is asked for. torch's own switch does it for all threads, in the midst of their passes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@register_attention(nn.MultiheadAttention)
def _multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """torch's own multi-head attention, which otherwise returns a copy of its weights or fuses them away.

    `is_causal` only says of `attn_mask` what it is.
    """
    if module.bias_k is not None or module.add_zero_attn:
        raise Refusal("nn.MultiheadAttention with bias_k or add_zero_attn looks at keys that are no unit of the input")
    alone = query.dim() == 2
    first = 0 if alone or module.batch_first else 1  # which axis is, or becomes, the batch's
    query, key, value = (_batch_first(part, alone, first) for part in (query, key, value))
    weights, biases = _projections(module)
    projected = map(nn.functional.linear, (query, key, value), weights, biases)
    q, k, v = (part.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for part in projected)
    scores = q @ k.mT / module.head_dim**0.5
    hidden = None if key_padding_mask is None else key_padding_mask.unflatten(-1, (1, 1, -1))
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (len(q), -1))
    for mask in (attn_mask, hidden):
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    attention = scores.softmax(-1)
    output = module.out_proj((attention @ v).transpose(1, 2).flatten(2))
    returned = (attention.mean(1) if average_attn_weights else attention) if need_weights else None
    if alone:
        return (output[0], None if returned is None else returned[0]), attention, v
    return (output.transpose(0, first), returned), attention, v


def _batch_first(part: Tensor, alone: bool, first: int) -> Tensor:
    return part[None] if alone else part.transpose(0, first)


def _projections(module: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights and biases of queries, keys and values, packed together or not."""
    packed = module.in_proj_weight
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return (packed.chunk(3) if packed is not None else apart), biases
