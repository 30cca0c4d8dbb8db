"""One forward and one backward pass: what was asked for, handed over call by call, the last call first."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import InputError, Refusal
from clearhead.recording import interface, returned
from clearhead.recording.interface import Captured
from clearhead.recording.scope import at_rest, hooks, lock_of
from clearhead.recording.self_test import SelfTest, self_test
from clearhead.recording.tape import DIFFERENTIABLE, GRADIENTS, Asks, Call, Tape, check_asks

Value = Callable[[Any], Float[Tensor, "batch"]]
Visit = Callable[[Call], None]


class Recorder:
    """Records passes of one model. The first pass tests the recorder itself, and refuses loudly if it is not exact."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lock = lock_of(model)
        self.tested: SelfTest | None = None

    def run(
        self,
        inputs: Mapping[str, Any],
        value: Value,
        asks: Iterable[str],
        visit: Visit = lambda call: None,
        leaf: str = "input_ids",
        layers: range | None = None,
        stream: str = "text",
    ) -> Tape:
        """One pass. `visit` gets the asked-for calls from the last to the first, each once it is complete.

        `value` maps the model's output to one number per sample; `leaf` names the input whose vectors get the input
        gradient; `layers` limits which calls are handed over (and how far the backward pass goes).
        """
        wanted = check_asks(asks)
        with self.lock:
            self.test(inputs, leaf)
            with (
                at_rest(self.model),
                torch.inference_mode(False),
                torch.set_grad_enabled(bool(wanted & GRADIENTS.keys())),
            ):
                output, calls, starts = self.forward(inputs, wanted, leaf)
                vectors = starts[0] if starts else None
                number = value(output)
                visits = _Visits(calls, layers or range(len(calls)), wanted, visit, stream)
                gradient = _backward(number, visits, vectors if "input_gradient" in wanted else None, starts[1:])
                visits.finish()
        return Tape(
            inputs=_plain(vectors) if "inputs" in wanted else None,
            input_gradient=gradient,
            value=_plain(number),
        )

    def record(self, inputs: Mapping[str, Any], value: Value, asks: Iterable[str], **how: Any) -> Tape:
        """The same pass with every call kept."""
        kept: list[Call] = []
        tape = self.run(inputs, value, asks, kept.append, **how)
        tape.calls = kept[::-1]
        return tape

    def test(self, inputs: Mapping[str, Any], leaf: str = "input_ids") -> SelfTest:
        """The self-test, once: count calls against layers, rebuild each output, compare logits with the real ones."""
        with self.lock:
            if self.tested is None:
                self.tested = self_test(
                    self.model, partial(self.forward, asks=frozenset({"attention"}), leaf=leaf), inputs
                )
        return self.tested

    def forward(
        self, inputs: Mapping[str, Any], asks: Asks, leaf: str, path: str | None = None
    ) -> tuple[Any, list[Captured], list[Tensor]]:
        """The model's output, its attention calls, and the tensors that the graph starts from."""
        path = path or (self.tested.path if self.tested else "interface")
        layers = bool(asks & {"block_input", "hidden_state"})
        seen: list[Tensor] = []
        with ExitStack() as stack:
            given = dict(inputs)
            if leaf == "input_ids":
                stack.enter_context(hooks(_start_at_embeddings(self.model, seen)))
            else:
                given[leaf] = _as_leaf(given[leaf])
                seen.append(given[leaf])
            if path == "interface":
                projections = "output_projection" in asks
                calls = stack.enter_context(interface.capture(self.model, layers, projections))
                output = self.model(**given)
            else:
                if asks & {"values", "output_projection"}:
                    raise Refusal(
                        f"{type(self.model).__name__} ignores transformers' attention interface: its attention can be "
                        "recorded, but not its values and output projection"
                    )
                reader = stack.enter_context(returned.capture(self.model, layers))
                output = self.model(**given, output_attentions=True)
                calls = reader.calls(output)
        return output, calls, seen


class _Visits:
    """Hands calls over from the last to the first, each once everything asked about it has arrived."""

    def __init__(self, calls: list[Captured], layers: range, asks: Asks, visit: Visit, stream: str) -> None:
        self.calls, self.layers, self.asks, self.visit, self.stream = calls, layers, asks, visit, stream
        self.wanted = [f"{name}_gradient" for name in DIFFERENTIABLE if f"{name}_gradient" in asks]
        self.arrived: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
        self.left = sorted(layers)

    def sources(self) -> list[tuple[int, str, Tensor]]:
        """The graph nodes whose gradients are waited for."""
        found: list[tuple[int, str, Tensor]] = []
        for layer in self.layers:
            for ask in self.wanted:
                node = getattr(self.calls[layer], ask.removesuffix("_gradient"))
                if node is None or not node.requires_grad:
                    raise Refusal(
                        f"{ask.replace('_', ' ')} of {self.calls[layer].module} cannot be recorded: "
                        "it is not part of the computation that leads from the input to the target"
                    )
                found.append((layer, ask, node))
        return found

    def arrive(self, layer: int, ask: str, gradient: Tensor) -> None:
        self.arrived[layer][ask] = gradient
        while self.left and len(self.arrived[self.left[-1]]) == len(self.wanted):
            self._hand_over(self.left.pop())

    def finish(self) -> None:
        """Calls that the target does not depend on get no gradient: theirs is zero."""
        while self.left:
            self._hand_over(self.left.pop())

    def _hand_over(self, layer: int) -> None:
        call, arrived = self.calls[layer], self.arrived.pop(layer)
        record = Call(layer, call.module, call.kind, self.stream, self.stream)
        for name in DIFFERENTIABLE:
            node = getattr(call, name)
            if node is not None and name in self.asks:
                setattr(record, name, _plain(node))
                if f"{name}_gradient" in self.wanted:
                    gradient = arrived.get(f"{name}_gradient")
                    setattr(
                        record, f"{name}_gradient", _plain(torch.zeros_like(node) if gradient is None else gradient)
                    )
        if "values" in self.asks:
            record.values = _plain(call.values_per_head())
        if "output_projection" in self.asks:
            record.output_projection = _plain(call.output_projection)
        self.calls[layer] = Captured(call.module, call.attention.new_empty(0))  # the maps are free from here on
        self.visit(record)


def _backward(
    number: Float[Tensor, "batch"], visits: _Visits, leaf: Tensor | None, others: Sequence[Tensor] = ()
) -> Tensor | None:
    """Gradients with respect to what was asked for, and nothing else: never a weight's.

    `others` are further starts of the graph: a decoder's first self-attention lies on no way from the encoder.
    """
    sources = visits.sources()
    if leaf is None and not sources:
        return None
    # A gradient that reaches the lowest call has passed all the others, so only it (or the input) need be asked for.
    if not number.requires_grad:
        raise InputError(
            "the target does not depend on the input through differentiable operations, so it has no gradient: "
            "compute it from the model's output, without detach() or item()"
        )
    lowest = [node for layer, _, node in sources if layer == min(visits.layers)]
    roots = [*([leaf] if leaf is not None else lowest), *others]
    with hooks([node.register_hook(partial(visits.arrive, layer, ask)) for layer, ask, node in sources]):
        gradients = torch.autograd.grad(number.sum(), roots, allow_unused=True)
    if leaf is None:
        return None
    return _plain(torch.zeros_like(leaf) if gradients[0] is None else gradients[0])


def _start_at_embeddings(model: nn.Module, seen: list[Tensor]) -> list[Any]:
    """Make the word embeddings the start of the graph; positions and types are added after them."""

    thread = threading.get_ident()

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return output  # somebody else's pass through the same model
        seen.append(_as_leaf(output))
        return seen[-1]

    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise Refusal(f"{type(model).__name__} has no input embeddings to start from")
    # An encoder–decoder looks words up through modules that share one weight: the first look-up is the source.
    same = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is embeddings.weight]
    return [module.register_forward_hook(start) for module in same or [embeddings]]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled())


def _plain(tensor: Tensor | None) -> Any:
    """Out of the graph, and wide enough to add up in."""
    if tensor is None:
        return None
    return tensor.detach().float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()
