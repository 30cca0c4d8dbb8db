"""Replacing attention: chosen rows of chosen heads and layers, after the softmax and before the values.

What is put in place stays in the graph, so gradients flow to whatever it was made from. Keys that a query cannot see
keep the weight zero, and a row keeps its sum. Live, later layers attend to what they then see; frozen, their attention
is pinned to what it was in a clean pass, and only the direct path is left.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest, hooks
from clearhead.capture.sources.attention_interface import Captured, capture, patching
from clearhead.capture.sources.custom_modules import replacing
from clearhead.capture.sources.returned_attentions import attention_modules
from clearhead.capture.tape import Asks
from clearhead.errors import InputError, Refusal

Weights = Float[Tensor, "batch head query key"]
Visible = Bool[Tensor, "#batch #head query key"]
#: The attention of a layer, which keys each query can see, and the layer → the weights to put in their place.
Replacing = Callable[[Weights, Visible, int], Weights]

#: Masks add so much, or less, to the scores of keys that are hidden.
HIDDEN = -1e4
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Patch:
    """What is put in place of attention, and where: None is everywhere.

    normalised: whether rows keep their sums; without it, a head whose weights are zero is silent
    """

    weights: Replacing
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    rows: Bool[Tensor, "batch query"] | None = None
    normalised: bool = True

    def into(self, attention: Weights, visible: Visible, layer: int) -> Weights:
        """The attention of one layer with the patch in its place."""
        if self.layers is not None and layer not in self.layers:
            return attention
        wanted = self.weights(attention, visible, layer).to(attention.dtype) * visible
        if self.normalised:
            sums = wanted.sum(-1, keepdim=True)
            wanted = wanted * (attention.sum(-1, keepdim=True) / torch.where(sums == 0, 1, sums))
        return torch.where(self._chosen(attention), wanted, attention)

    def _chosen(self, attention: Weights) -> Bool[Tensor, "#batch head #query 1"]:
        count = attention.shape[1]
        heads = range(count) if self.heads is None else self.heads
        if any(not 0 <= head < count for head in heads):
            raise InputError(f"heads={list(heads)} is not possible: the model has {count} heads, counted from 0")
        chosen = torch.zeros(1, count, 1, 1, dtype=torch.bool, device=attention.device)
        chosen[:, list(heads)] = True
        return chosen if self.rows is None else chosen & self.rows.to(attention.device)[:, None, :, None]


class _Patcher:
    """Puts patches in place, call by call, and remembers what it put there."""

    def __init__(self, patches: Sequence[Patch], clean: Sequence[Weights] | None) -> None:
        self.patches, self.clean = patches, clean
        self.placed: list[Weights] = []

    def attention(self, attention: Weights, visible: Visible) -> Weights:
        layer = len(self.placed)
        now = attention if self.clean is None else self.clean[layer].to(attention)
        for patch in self.patches:
            now = patch.into(now, visible, layer)
        self.placed.append(now)
        return now

    def call(self, output: Tensor, attention: Weights, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Weights]:
        """A call through the interface. What is not changed stays the same to the last bit: O + (A' − A)·V."""
        now = self.attention(attention, visible_keys(attention, mask))
        if now is attention:
            return output, attention
        per_head = values.repeat_interleave(attention.shape[1] // values.shape[1], dim=1)
        moved = ((now - attention).to(per_head.dtype) @ per_head).transpose(1, 2)
        return output + moved.reshape(output.shape), now

    def alone(self, attention: Weights) -> Weights:
        """A call that no mask is known of."""
        return self.attention(attention, visible_keys(attention, None))

    def check(self, calls: Sequence[Captured], model: nn.Module) -> None:
        """What was heard must be what was put in place."""
        name = type(model).__name__
        if len(calls) != len(self.placed):
            raise Refusal(
                f"the attention of {name} cannot be replaced: it was met at {len(self.placed)} places, but "
                f"{len(calls)} calls were recorded"
            )
        for call, placed in zip(calls, self.placed, strict=True):
            if call.attention.shape != placed.shape or not torch.equal(call.attention, placed.to(call.attention)):
                raise Refusal(f"the attention of {name} cannot be replaced: {call.module} went on with another one")


def visible_keys(attention: Weights, mask: Tensor | None) -> Visible:
    """The keys that a query may see: by the mask or, where none is known, those that any head gives weight to."""
    if mask is None:
        return (attention > 0).any(1, keepdim=True)
    mask = mask[..., : attention.shape[-1]]
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    return seen.expand(-1, -1, attention.shape[2], -1)


class _AtSoftmax(TorchFunctionMode):
    """For models that ignore the interface: replaces what the softmax of an attention module gives."""

    def __init__(self, patcher: _Patcher) -> None:
        super().__init__()
        self.patcher, self.thread = patcher, threading.get_ident()
        self.inside: nn.Module | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.inside is None or func not in _SOFTMAX or made.dim() != 4:
            return made
        return self.patcher.alone(made)

    def handles(self, model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        modules = attention_modules(model)
        return [
            *(module.register_forward_pre_hook(self._enter) for module in modules),
            *(module.register_forward_hook(self._leave) for module in modules),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.inside = module

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.inside = None


@contextmanager
def _placing(model: nn.Module, path: str, patcher: _Patcher) -> Iterator[None]:
    if path != "returned":
        with patching(patcher.call), replacing(patcher.alone):
            yield
        return
    mode = _AtSoftmax(patcher)
    with hooks(mode.handles(model)), mode:
        yield


def patched(
    recorder: Recorder,
    inputs: Mapping[str, Any],
    patches: Sequence[Patch],
    clean: Sequence[Weights] | None = None,
    leaves: Sequence[str] = (),
    asks: Asks = frozenset({"attention"}),
) -> tuple[Any, list[Captured], dict[str, Tensor]]:
    """The output of one pass with patches in place, its calls, and the vectors of `leaves` that the graph starts from.

    clean: the attention of every call in a clean pass, to pin what is not patched to (frozen); without it, later
    layers attend anew (live)
    """
    with recorder.lock:
        patcher = _Patcher(patches, clean)
        path = recorder.test(inputs).path
        with at_rest(recorder.model), torch.inference_mode(False), _placing(recorder.model, path, patcher):
            output, calls, starts = recorder.forward(inputs, asks, leaves)
        patcher.check(calls, recorder.model)
    return output, calls, starts


def learning(
    model: nn.Module, tested: SelfTest, inputs: Mapping[str, Any], patches: Sequence[Patch] = ()
) -> tuple[Any, list[Captured]]:
    """One pass of a model that is being trained, in whatever mode it is: gradients go to its parameters, too.

    tested: what was found out about the model that it is a copy of
    """
    patcher = _Patcher(patches, None)
    with (
        _placing(model, tested.path, patcher) if patches else nullcontext(),
        capture(model, implementation=tested.implementation) as calls,
    ):
        output = model(**inputs)
    return output, calls
