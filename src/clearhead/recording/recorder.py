"""One forward and one backward pass: what was asked for, handed over call by call, the last call first."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import InputError, Refusal
from clearhead.recording.interface import NAME, Captured, capture
from clearhead.recording.scope import at_rest, hooks, lock_of
from clearhead.recording.self_test import Place, SelfTest, self_test
from clearhead.recording.tape import DIFFERENTIABLE, GRADIENTS, Asks, Call, Tape, check_asks

#: The model's output → one number per sample, or several (target × sample).
Value = Callable[[Any], Float[Tensor, "*target batch"]]
Visit = Callable[[Call], None]
#: The name of an attention module, and which of its calls → the streams of its queries and of its keys.
Streams = Callable[[str, int], tuple[str, str]]


class Recorder:
    """Records passes of one model. The first pass tests the recorder itself, and refuses loudly if it is not exact.

    `streams` says whose queries look at whose keys; `embeddings` are the modules that look words up, where the model
    itself does not say.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Streams = lambda module, nth: ("text", "text"),
        embeddings: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self.streams, self.embeddings = model, streams, embeddings
        self.lock = lock_of(model)
        self.tested: SelfTest | None = None

    def run(
        self,
        inputs: Mapping[str, Any],
        value: Value,
        asks: Iterable[str],
        visit: Visit = lambda call: None,
        leaves: Sequence[str] = ("input_ids",),
        places: Collection[int] | None = None,
    ) -> Tape:
        """One pass. `visit` gets the asked-for calls from the last to the first, each once it is complete.

        `value` maps the model's output to one number per sample. Where it gives several (target × sample), one backward
        pass is made for all of them together, and calls come with target × sample as their batch.
        `leaves` name the inputs whose vectors get input gradients; `places` limits which calls are handed over, counted
        in the order of the forward pass (and so how far the backward pass goes).
        """
        wanted = check_asks(asks)
        with self.lock:
            self.test(inputs, leaves)
            with (
                at_rest(self.model),
                torch.inference_mode(False),
                torch.set_grad_enabled(bool(wanted & GRADIENTS.keys())),
            ):
                output, calls, starts = self.forward(inputs, wanted, leaves)
                number = value(output)
                chosen = sorted(range(len(calls)) if places is None else places)
                visits = _Visits(calls, placed(calls, self.streams), chosen, wanted, visit)
                vectors = {leaf: starts[leaf] for leaf in leaves if leaf in starts}
                roots = vectors if "input_gradient" in wanted else {}
                backward = _backward if number.dim() == 1 else _backward_together
                gradients = backward(number, visits, roots, starts)
                visits.finish()
        vectors = {leaf: _repeated(_plain(start), visits.targets) for leaf, start in vectors.items()}
        return Tape(
            inputs=vectors if "inputs" in wanted else None,
            input_gradient=gradients if "input_gradient" in wanted else None,
            value=_plain(number),
        )

    def record(self, inputs: Mapping[str, Any], value: Value, asks: Iterable[str], **how: Any) -> Tape:
        """The same pass with every call kept."""
        kept: list[Call] = []
        tape = self.run(inputs, value, asks, kept.append, **how)
        tape.calls = kept[::-1]
        return tape

    def test(self, inputs: Mapping[str, Any], leaves: Sequence[str] = ("input_ids",)) -> SelfTest:
        """The self-test, once: count calls against layers, rebuild each output, compare logits with the real ones."""
        with self.lock:
            if self.tested is None:
                forward = partial(self.forward, asks=frozenset({"attention"}), leaves=leaves)
                self.tested = self_test(self.model, forward, inputs, partial(placed, streams=self.streams))
        return self.tested

    def forward(
        self, inputs: Mapping[str, Any], asks: Asks, leaves: Sequence[str], implementation: str | None = None
    ) -> tuple[Any, list[Captured], dict[str, Tensor]]:
        """The model's output, its attention calls, and the tensors that the graph starts from, by leaf.

        A word looked up that is no leaf (a decoder's, where only the source is asked about) is a start all the same.
        """
        implementation = implementation or (self.tested.implementation if self.tested else NAME)
        starts: dict[str, Tensor] = {}
        given = dict(inputs)
        looked_up = [leaf for leaf in leaves if leaf in given and not given[leaf].is_floating_point()]
        with ExitStack() as stack:
            if looked_up:
                stack.enter_context(hooks(_start_at_embeddings(self._lookups(), looked_up, starts)))
            for leaf in leaves:
                if leaf in given and leaf not in looked_up:
                    given[leaf] = starts[leaf] = _as_leaf(given[leaf])
            layers, projections = bool(asks & {"block_input", "hidden_state"}), "output_projection" in asks
            calls = stack.enter_context(capture(self.model, layers, projections, implementation))
            output = self.model(**given)
        if asks & {"values", "output_projection"} and any(call.values is None for call in calls):
            raise Refusal(
                f"{type(self.model).__name__} ignores transformers' attention interface: its attention can be "
                "recorded, but not its values and output projection"
            )
        return output, calls, starts

    def _lookups(self) -> Sequence[nn.Module]:
        if self.embeddings is not None:
            return self.embeddings
        embeddings: Any = getattr(self.model, "get_input_embeddings", lambda: None)()
        if embeddings is None:
            raise Refusal(f"{type(self.model).__name__} has no input embeddings to start from")
        # An encoder–decoder looks words up through modules that share one weight: the first look-up is the source.
        same = [m for m in self.model.modules() if isinstance(m, nn.Embedding) and m.weight is embeddings.weight]
        return same or [embeddings]


def placed(calls: Sequence[Captured], streams: Streams) -> list[Place]:
    """Whose queries look at whose keys in each call, and in which of the layers that these two share."""
    counts: Counter[tuple[str, str]] = Counter()
    places = []
    for call in calls:
        pair = streams(call.module, call.nth)
        batch, heads, queries, keys = call.attention.shape
        places.append(Place(call.module, *pair, counts[pair], (batch, queries, keys), heads))
        counts[pair] += 1
    return places


class _Visits:
    """Hands calls over from the last to the first, each once everything asked about it has arrived."""

    def __init__(
        self, calls: list[Captured], places: Sequence[Place], chosen: Sequence[int], asks: Asks, visit: Visit
    ) -> None:
        self.calls, self.places, self.asks, self.visit = calls, places, asks, visit
        self.wanted = [f"{name}_gradient" for name in DIFFERENTIABLE if f"{name}_gradient" in asks]
        self.arrived: dict[int, dict[str, Tensor]] = {place: {} for place in chosen}
        self.left = list(chosen)
        self.targets = 1

    def sources(self) -> list[tuple[int, str, Tensor]]:
        """The graph nodes whose gradients are waited for."""
        found: list[tuple[int, str, Tensor]] = []
        for place in self.left:
            for ask in self.wanted:
                node = getattr(self.calls[place], ask.removesuffix("_gradient"))
                if node is None or not node.requires_grad:
                    raise Refusal(
                        f"{ask.replace('_', ' ')} of {self.calls[place].module} cannot be recorded: "
                        "it is not part of the computation that leads from the input to the target"
                    )
                found.append((place, ask, node))
        return found

    def arrive(self, place: int, ask: str, gradient: Tensor) -> None:
        self.arrived[place][ask] = gradient
        while self.left and len(self.arrived[self.left[-1]]) == len(self.wanted):
            self._hand_over(self.left.pop())

    def finish(self) -> None:
        """Calls that the target does not depend on get no gradient: theirs is zero."""
        while self.left:
            self._hand_over(self.left.pop())

    def _hand_over(self, place: int) -> None:
        call, where, arrived = self.calls[place], self.places[place], self.arrived.pop(place)
        kind = call.kind if where.query_stream == where.key_stream else "cross"
        record = Call(where.layer, call.module, kind, where.query_stream, where.key_stream)
        for name in DIFFERENTIABLE:
            node = getattr(call, name)
            if node is not None and name in self.asks:
                own = _repeated(_plain(node), self.targets)
                setattr(record, name, own)
                if f"{name}_gradient" in self.wanted:
                    gradient = arrived.get(f"{name}_gradient")
                    setattr(record, f"{name}_gradient", torch.zeros_like(own) if gradient is None else _plain(gradient))
        if "values" in self.asks:
            record.values = _repeated(_plain(call.values_per_head()), self.targets)
        if "output_projection" in self.asks:
            record.output_projection = _plain(call.output_projection)
        self.calls[place] = Captured(call.module, call.attention.new_empty(0))  # the maps are free from here on
        self.visit(record)


def _backward(
    number: Float[Tensor, "batch"], visits: _Visits, roots: Mapping[str, Tensor], starts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients with respect to what was asked for, and nothing else: never a weight's."""
    sources = visits.sources()
    if not roots and not sources:
        return {}
    _require_gradient(number)
    # A gradient that reaches the first call has passed all the others, so only it (or the input) need be asked for.
    # With several starts it has not: a decoder's first self-attention lies on no way from the encoder.
    lowest = [node for place, _, node in sources if place == min(visits.left)]
    alone = len(starts) == 1
    ends = [*roots.values(), *([] if roots and alone else lowest if alone else starts.values())]
    with hooks([node.register_hook(partial(visits.arrive, place, ask)) for place, ask, node in sources]):
        gradients = torch.autograd.grad(number.sum(), ends, allow_unused=True)
    pairs = zip(roots.items(), gradients, strict=False)
    return {name: _plain(torch.zeros_like(r) if g is None else g) for (name, r), g in pairs}


def _backward_together(
    number: Float[Tensor, "target batch"], visits: _Visits, roots: Mapping[str, Tensor], starts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All targets in one backward pass, with the target as an axis of its own."""
    visits.targets = len(number)
    sources = visits.sources()
    if not roots and not sources:
        return {}
    _require_gradient(number)
    each = torch.eye(len(number), dtype=number.dtype, device=number.device)
    nodes = [*roots.values(), *(node for _, _, node in sources)]
    found = torch.autograd.grad(number.sum(1), nodes, each, allow_unused=True, is_grads_batched=True)
    for (place, ask, _), gradient in zip(sources, found[len(roots) :], strict=True):
        if gradient is not None:
            visits.arrived[place][ask] = gradient.flatten(0, 1)
    pairs = zip(roots.items(), found, strict=False)
    return {
        name: _plain(_repeated(torch.zeros_like(r), len(number)) if g is None else g.flatten(0, 1))
        for (name, r), g in pairs
    }


def _require_gradient(number: Tensor) -> None:
    if not number.requires_grad:
        raise InputError(
            "the target does not depend on the input through differentiable operations, so it has no gradient: "
            "compute it from the model's output, without detach() or item()"
        )


def _start_at_embeddings(
    lookups: Sequence[nn.Module], leaves: Sequence[str], starts: dict[str, Tensor]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Make the word embeddings the start of the graph; positions and types are added after them."""
    thread, waiting = threading.get_ident(), list(leaves)

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return output  # somebody else's pass through the same model
        leaf = waiting.pop(0) if waiting else f"look-up {len(starts)}"
        starts[leaf] = _as_leaf(output)
        return starts[leaf]

    return [module.register_forward_hook(start) for module in lookups]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled())


def _repeated(tensor: Tensor, count: int) -> Tensor:
    """The same for each target: target × sample as one axis (without a copy where there is one sample)."""
    return tensor if count == 1 else tensor.expand(count, *tensor.shape).flatten(0, 1)


def _plain(tensor: Tensor | None) -> Any:
    """Out of the graph, and wide enough to add up in."""
    if tensor is None:
        return None
    return tensor.detach().float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()
