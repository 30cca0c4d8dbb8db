"""What the self-test asks of attention that was registered: is it what the module used, and is all of it recorded?"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead.capture.session import hooks
from clearhead.capture.sources.custom_modules import registered
from clearhead.errors import Refusal

if TYPE_CHECKING:
    from clearhead.capture.checks.self_test import Place
    from clearhead.capture.sources.attention_interface import Captured

#: What is called attention, and what is not, though its name holds the word.
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_NO_ATTENTION = re.compile(r"norm|dropout|mask|bias|output|position", re.IGNORECASE)


def is_foreign(model: nn.Module) -> bool:
    """Whether nothing in the model is from transformers, so that nobody but its author knows how it attends."""
    from transformers import PreTrainedModel

    return not any(isinstance(module, PreTrainedModel) for module in model.modules())


def check_own(
    model: nn.Module,
    forward: Callable[..., tuple[Any, "list[Captured]", dict[str, Tensor]]],
    inputs: Mapping[str, Any],
    placed: "Callable[[Sequence[Captured]], list[Place]]",
    tolerance: float,
) -> None:
    """Compare each stand-in with its module, and check that outputs come from the attention that it returned."""
    ran: list[tuple[nn.Module, Any, Any, Any]] = []
    strange: dict[str, str] = {}
    with torch.enable_grad(), hooks([*_remembering(model, ran), *_noticing(model, strange)]):
        output, calls, _ = forward(inputs)
    for module, args, kwargs, attended in ran:
        _check_output(model, module, attended, module(*args, **kwargs), tolerance)
    own = [call for call in calls if call.registered or is_foreign(model)]
    if is_foreign(model):
        _check_all_heard(model, own, strange)
    for call in own:
        _check_shares(model, call)
    _check_used(model, own, output, tolerance)
    _check_in_a_row(model, own, placed(own))


def _remembering(model: nn.Module, ran: list[Any]) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks that keep what each registered module was given and what its stand-in made of it."""

    def remember(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ran.append((module, _copied(args), _copied(kwargs), _copied(output)))  # a model may add to them in place

    for module in registered(model).values():
        yield module.register_forward_hook(remember, with_kwargs=True)


def _noticing(model: nn.Module, strange: dict[str, str]) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks that keep the names of modules called attention that run, though nothing is registered for them."""
    known = list(registered(model).values())
    inside = {id(part) for module in known for part in module.modules()}
    around = {id(module) for module in model.modules() if any(id(part) in inside for part in module.modules())}

    def notice(name: str, module: nn.Module, args: Any, output: Any) -> None:
        strange[name] = type(module).__name__

    for name, module in model.named_modules():
        said = type(module).__name__
        if _ATTENTION.search(said) and not _NO_ATTENTION.search(said) and id(module) not in around:
            yield module.register_forward_hook(partial(notice, name))


def _check_output(model: nn.Module, module: nn.Module, attended: Any, real: Any, tolerance: float) -> None:
    one, other = list(tensors_of(attended)), list(tensors_of(real))
    same = [part.shape for part in one] == [part.shape for part in other]
    gap = max((_gap(a, b) for a, b in zip(one, other, strict=True)), default=0.0) if same else float("nan")
    if not gap <= tolerance:
        why = f"relative gap {gap:.1e}" if same else f"{_shapes(one)} instead of {_shapes(other)}"
        raise Refusal(
            f"{type(model).__name__}: the function registered for {type(module).__name__} gives another output than "
            f"the module itself ({why})"
        )


def _check_all_heard(model: nn.Module, calls: "Sequence[Captured]", strange: Mapping[str, str]) -> None:
    heard = {call.module for call in calls}
    silent = [name for name in registered(model) if name not in heard]
    if silent:
        raise Refusal(
            f"{type(model).__name__}: {silent[0]} attends, but was not called: something bypasses its forward; if the "
            "model does not use it, remove it from the model"
        )
    unknown = [f"{name} ({kind})" for name, kind in strange.items() if name not in heard]
    if unknown:
        raise Refusal(
            f"{type(model).__name__}: {unknown[0]} is called attention, but how it attends is not known: register its "
            "class with clearhead.register_attention"
        )


def _check_shares(model: nn.Module, call: "Captured") -> None:
    """Attention is never negative, and a query's sums to one (to less, where part of it goes nowhere)."""
    attention = call.attention.detach()
    if not (bool((attention >= 0).all()) and bool((attention.sum(-1) <= 1.01).all())):
        raise Refusal(
            f"{type(model).__name__}: what is returned as the attention of {call.module} are no shares of one (from "
            f"{float(attention.min()):.2g} to {float(attention.max()):.2g}): return it after the softmax"
        )


def _check_used(model: nn.Module, calls: "Sequence[Captured]", output: Any, tolerance: float) -> None:
    """With O = A·V and any y of O:  Aᵀ·∂y/∂A = Aᵀ·(∂y/∂O·Vᵀ) = ∂y/∂V·Vᵀ, head by head."""
    with torch.enable_grad():
        parts = [part for part in tensors_of(output) if part.requires_grad]
        y = sum((_projected(part) for part in parts), torch.zeros(()))
    if not parts:
        raise Refusal(f"{type(model).__name__}: its output does not depend on its input in a way that has gradients")
    nodes = [node for call in calls for node in (call.attention, call.values) if node is not None]
    for name, node in (("attention", call.attention) for call in calls):
        if not node.requires_grad:
            raise _not_used(model, calls, node, name)
    gradients = dict(
        zip(map(id, nodes), torch.autograd.grad(y, nodes, allow_unused=True, retain_graph=True), strict=True)
    )
    for call in calls:
        to_attention = gradients[id(call.attention)]
        if to_attention is None:
            raise _not_used(model, calls, call.attention, "attention")
        if call.values is None:
            continue
        to_values = gradients[id(call.values)]
        if to_values is None:
            raise _not_used(model, calls, call.values, "values")
        per_head = call.attention.mT @ to_attention
        one = per_head.unflatten(1, (call.values.shape[1], -1)).sum(2)  # heads of a group share their values
        gap = _gap(one, to_values @ call.values.mT)
        if not gap <= 10 * tolerance:
            raise Refusal(
                f"{type(model).__name__}: the output of {call.module} is not its attention times its values (relative "
                f"gap {gap:.1e}): return the two tensors that were multiplied"
            )


def _not_used(model: nn.Module, calls: "Sequence[Captured]", node: Tensor, name: str) -> Refusal:
    module = next(call.module for call in calls if call.attention is node or call.values is node)
    return Refusal(
        f"{type(model).__name__}: its output does not depend on what is returned as the {name} of {module}: return the "
        "very tensor that the output was computed from, not a copy, a view or a second computation of it"
    )


def _check_in_a_row(model: nn.Module, calls: "Sequence[Captured]", places: "Sequence[Place]") -> None:
    """Each call must build on the one before it: heads that run side by side are one call, not several layers."""
    by_streams: dict[tuple[str, str], list[Captured]] = {}
    for call, place in zip(calls, places, strict=True):
        by_streams.setdefault((place.query_stream, place.key_stream), []).append(call)
    for row in by_streams.values():
        for before, after in pairwise(row):
            with torch.enable_grad():
                y = _projected(after.attention)
            (found,) = torch.autograd.grad(y, before.attention, allow_unused=True, retain_graph=True)
            if found is None:
                raise Refusal(
                    f"{type(model).__name__}: {before.module} and {after.module} attend side by side, so they are "
                    "heads of one call, not two layers: register the module that holds them, with their attention "
                    "along the head axis"
                )


def _projected(part: Tensor) -> Tensor:
    """Some number that depends on every entry."""
    weights = torch.arange(1, part.numel() + 1, device=part.device, dtype=torch.float64).sin().to(part.dtype)
    return (part * weights.reshape(part.shape)).sum()


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The real numbers in an output, whatever they are packed in."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    parts: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, Mapping | tuple | list):
        for part in parts:
            yield from tensors_of(part)
    elif hasattr(output, "__dict__"):
        yield from tensors_of(vars(output))


def _copied(parts: Any) -> Any:
    if isinstance(parts, Tensor):
        return parts.detach().clone()
    if isinstance(parts, Mapping):
        return {name: _copied(part) for name, part in parts.items()}
    return tuple(_copied(part) for part in parts) if isinstance(parts, tuple | list) else parts


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the size of `other`."""
    return float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1e-12))


def _shapes(parts: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(part.shape)) for part in parts) or "no tensors"
