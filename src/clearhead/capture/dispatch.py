"""Calls handed over in the order in which methods fold them, whatever the order in which their gradients arrive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.attention.deferred import Aside
from clearhead.capture.attention.tiled import Gradients, Streamed, repeated
from clearhead.capture.attention.tiling import TORCH, Tiles
from clearhead.capture.checks.self_test import Place
from clearhead.capture.sources.attention_interface import Captured
from clearhead.capture.tape import DIFFERENTIABLE, Asks, Call
from clearhead.errors import Refusal

Visit = Callable[[Call], None]


class Visits:
    """Hands calls over from the last to the first, each once everything asked about it has arrived."""

    def __init__(
        self,
        calls: list[Captured],
        places: Sequence[Place],
        chosen: Sequence[int],
        asks: Asks,
        visit: Visit,
        tiles: Tiles,
        kept: bool = True,
    ) -> None:
        self.calls, self.places, self.asks, self.visit, self.tiles = calls, places, asks, visit, tiles
        self.kept = kept
        self.wanted = [f"{name}_gradient" for name in DIFFERENTIABLE if f"{name}_gradient" in asks]
        self.arrived: dict[int, dict[str, Tensor]] = {place: {} for place in chosen}
        self.left = list(chosen)
        self.targets = 1
        self.swept: set[int] = set()
        self.passed: set[int] = set()  # the streamed calls that the backward pass has come through
        for place, call in enumerate(calls):
            if call.memory is not None:
                call.memory.seen = place not in self.arrived or "attention_gradient" not in self.wanted
        for place in chosen:
            if (streamed := calls[place].streamed) is not None:
                streamed.arrives = partial(self._reaches, place, streamed)

    def sources(self) -> list[tuple[int, str, Any]]:
        """The tensors (or edges of the graph) whose gradients are waited for."""
        found: list[tuple[int, str, Any]] = []
        for place in self.left:
            for ask in self.wanted:
                call = self.calls[place]
                node = getattr(call, ask.removesuffix("_gradient"))
                if call.streamed is not None and ask == "attention_gradient":
                    node = call.streamed.edge  # a gradient that is to reach it passes the attention
                if node is None or (isinstance(node, Tensor) and not node.requires_grad):
                    raise Refusal(
                        f"{ask.replace('_', ' ')} of {call.module} cannot be recorded: "
                        "it is not part of the computation that leads from the input to the target"
                    )
                found.append((place, ask, node))
        return found

    def hear(self, place: int, ask: str, gradient: Tensor) -> None:
        """A gradient comes to a tensor: those of several targets at once, where they are batched."""
        if torch._C._are_functorch_transforms_active():
            _Heard.apply(gradient, partial(self.arrive, place, ask))
        else:
            self.arrive(place, ask, gradient)

    def comes_by_itself(self, place: int, ask: str) -> bool:
        """Whether a gradient is brought by the attention itself, so that nothing need wait for it."""
        return ask == "attention_gradient" and self.calls[place].streamed is not None

    def arrive(self, place: int, ask: str, gradient: Tensor) -> None:
        self.arrived[place][ask] = gradient
        while self.left and len(self.arrived[self.left[-1]]) == len(self.wanted):
            self._hand_over(self.left.pop())

    def finish(self) -> None:
        """Calls that the target does not depend on get no gradient: theirs is zero."""
        while self.left:
            self._hand_over(self.left.pop())

    def _record(self, place: int) -> Call:
        call, where = self.calls[place], self.places[place]
        kind = call.kind if where.query_stream == where.key_stream else "cross"
        return Call(where.layer, call.module, kind, where.query_stream, where.key_stream)

    def _reaches(self, place: int, streamed: Streamed, gradient: Tensor) -> Gradients:
        """The backward pass comes to a streamed call: its tiles are made once for all, if its turn has come.

        Calls are folded from the last to the first. One that is reached before those after it (streams that run side by
        side) hands its gradients on, and is swept again when they are through.
        """
        wanted = "attention_gradient" in self.wanted
        found = self._sweep(place, gradient, backward=True) if wanted and self.left[-1:] == [place] else None
        found = found or streamed.gradients(gradient)
        self.passed.add(place)
        if wanted:
            self.arrive(place, "attention_gradient", gradient)
        elif place not in self.left:
            streamed.release()
        return found

    def _sweep(self, place: int, gradient: Tensor | None, backward: bool = False) -> Gradients | None:
        """Everything that methods fold from one call, and `backward` its gradients, too."""
        streamed, record = self.calls[place].streamed, self._record(place)
        assert streamed is not None
        self.swept.add(place)
        made = streamed.sums(gradient, self.tiles.reductions(record), self.targets, backward)
        if made is not None:
            assert streamed.kernel is not None
            self.tiles.ran.maps |= {streamed.kernel.name} if made[1] else set()
            self.tiles.reduced(record, made[1])
            return made[0]
        self.tiles.ran.maps |= {TORCH} if self.tiles.sweeps else set()
        found = None
        for number in range(self.tiles.sweeps):
            fold = partial(self._fold, place, number)
            first = streamed.sweep(gradient, fold, backward and not number and not streamed.apart, self.targets)
            found = found or first
        return found

    def _fold(self, place: int, number: int, rows: slice, attention: Tensor, gradient: Tensor | None) -> None:
        record = self._record(place)
        record.attention = repeated(plain(attention), self.targets)
        if "attention_gradient" in self.asks:
            record.attention_gradient = torch.zeros_like(record.attention) if gradient is None else plain(gradient)
        self.tiles.fold(record, rows, number)

    def _aside(self, streamed: Streamed, gradient: Tensor | None) -> Aside:
        aside = streamed.aside()
        if gradient is None and "attention_gradient" in self.asks:
            batch, heads, queries, _ = aside.outline.shape
            gradient = aside.value.new_zeros(self.targets * batch, queries, heads, aside.value.shape[3])
        return Aside(aside, gradient, self.targets)

    def _hand_over(self, place: int) -> None:
        call, arrived, record = self.calls[place], self.arrived.pop(place), self._record(place)
        if call.streamed is not None:
            if place not in self.swept:
                self._sweep(place, arrived.get("attention_gradient"))
            if self.tiles.sets_aside:
                record.aside = self._aside(call.streamed, arrived.get("attention_gradient"))
            if place in self.passed:  # otherwise what was unpacked is wanted once more
                call.streamed.release()
        for name in DIFFERENTIABLE:
            node = getattr(call, name) if name != "attention" or call.streamed is None else None
            if node is not None and name in self.asks:
                shown = plain(node) if name != "attention" or call.seeing is None else plain(node) * call.seeing
                own = repeated(shown, self.targets)
                setattr(record, name, own)
                if f"{name}_gradient" in self.wanted:
                    gradient = arrived.get(f"{name}_gradient")
                    setattr(record, f"{name}_gradient", torch.zeros_like(own) if gradient is None else plain(gradient))
        if "values" in self.asks:
            record.values = repeated(plain(call.values_per_head()), self.targets)
        if "output_projection" in self.asks:
            record.output_projection = plain(call.output_projection)
        self.calls[place] = Captured(call.module, call.attention.new_empty(0))  # the maps are free from here on
        self.visit(record)
        if call.memory is not None and not self.kept:
            call.memory.seen = True


@contextmanager
def released(calls: Sequence[Captured]) -> Iterator[None]:
    """After the `with` these calls hold nothing, also if a pass breaks off: the graph holds them, and they would hold
    the graph, in a circle that Python's collector does not see."""
    streamed = [call.streamed for call in calls if call.streamed is not None]
    try:
        yield
    finally:
        for one in streamed:
            one.release()


def plain(tensor: Tensor | None) -> Any:
    """Out of the graph, and wide enough to add up in."""
    if tensor is None:
        return None
    return tensor.detach().float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()


class _Heard(torch.autograd.Function):
    """The gradients of several targets at one tensor, as target × sample."""

    @staticmethod
    def forward(gradient: Tensor, arrive: Callable[[Tensor], None]) -> Tensor:
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, gradient: Tensor, arrive: Callable[[Tensor], None]) -> tuple[Tensor, int]:
        every = gradient.expand(info.batch_size, *gradient.shape) if dims[0] is None else gradient.movedim(dims[0], 0)
        arrive(every.flatten(0, 1))
        return every, 0
