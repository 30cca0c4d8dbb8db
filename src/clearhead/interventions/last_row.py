"""The last layer for one row of each sample: what lies below is computed once, and of the layer only this row.

Where one row of the last layer is all that the answer is made from, other weights in that row change nothing below
it and no other row. The model then runs on that row alone, as a sequence of one: layers below the last hand on what
they get, the last is given the row that it had, and its attention what the new weights make of its values.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clearhead.capture.layers import blocks_of
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest, attention_implementation, hooks
from clearhead.capture.sources.attention_interface import NAME, attending
from clearhead.capture.tape import check_asks
from clearhead.interventions.attention_patch import Patch, Visible, Weights, patched


class LastRow:
    """One batch, and the row of each of its samples that is read."""

    def __init__(self, recorder: Recorder, inputs: Mapping[str, Any], rows: Int[Tensor, "batch"]) -> None:
        self.recorder, who, self.thread = recorder, torch.arange(len(rows)), threading.get_ident()
        self.model = recorder.model
        places = recorder.test(inputs).places
        blocks = blocks_of(self.model)
        self.attends = places[-1].module
        self.layers = [blocks[id(self.model.get_submodule(place.module))] for place in places]
        self.tuples: dict[int, int] = {}  # how many parts a layer returns, where it returns several
        watching = [layer.register_forward_hook(self._watch) for layer in {id(x): x for x in self.layers}.values()]
        seen: list[Visible] = []

        def look(attention: Weights, visible: Visible, layer: int) -> Weights:
            seen.append(visible)
            return attention

        asks = check_asks(("attention", "values", "block_input"))
        looking = [Patch(look, layers=[len(places) - 1], normalised=False)]
        with recorder.lock, torch.no_grad(), hooks(watching):
            self.clean, calls, _ = patched(recorder, inputs, looking, asks=asks)
        last = calls[-1]
        assert last.block_input is not None
        self.visible: Bool[Tensor, "batch key"] = seen[0].expand(len(rows), -1, -1, -1)[who, 0, rows]
        self.attention: Float[Tensor, "batch head key"] = last.attention[who, :, rows]
        self.values: Float[Tensor, "batch head key width"] = last.values_per_head()
        self.state: Float[Tensor, "batch model"] = last.block_input[who, rows]
        width = inputs["input_ids"].shape[1]
        self.inputs = {
            name: part[who, rows][:, None] if _along(part, width) else part
            for name, part in inputs.items()
            if name != "logits_to_keep"  # there is one row, and it is kept
        }

    def output(self, weights: Float[Tensor, "batch draw head key"]) -> Any:
        """What the model puts out with these weights: its batch is sample × draw, the draws of the first sample first.

        Gradients flow to the weights.
        """
        context = (weights.transpose(1, 2) @ self.values).transpose(1, 2)  # batch draw head width
        batch, draws, heads, size = context.shape
        attended = context.reshape(batch * draws, 1, heads, size)
        repeated = {
            name: part.repeat_interleave(draws, 0) if isinstance(part, Tensor) else part
            for name, part in self.inputs.items()
        }
        state = self.state.repeat_interleave(draws, 0)[:, None]
        idle, attention = _Idle(attended), self.model.get_submodule(self.attends)
        with (
            self.recorder.lock,
            at_rest(self.model),
            self.recorder.scope(),
            self._shortened(state),
            attention_implementation(self.model, NAME),
            attending(idle.answer),
            hooks([attention.register_forward_pre_hook(idle.start)]),
            idle,
        ):
            return self.model(**repeated)

    @contextmanager
    def _shortened(self, state: Float[Tensor, "row 1 model"]) -> Iterator[None]:
        """Inside the `with`, layers below the last hand on what they get, and the last is given `state`."""
        waiting = Counter(id(layer) for layer in self.layers[:-1])
        own = {id(layer): layer for layer in self.layers}
        before = {key: layer.__dict__.get("forward") for key, layer in own.items()}
        try:
            for layer in own.values():
                layer.__dict__["forward"] = partial(self._stand_in, layer, layer.forward, waiting, state)
            yield
        finally:
            for key, layer in own.items():
                del layer.__dict__["forward"]
                if before[key] is not None:
                    layer.__dict__["forward"] = before[key]

    def _stand_in(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        waiting: Counter[int],
        state: Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **named)  # somebody else's pass through the same model
        if not waiting[id(layer)]:
            return forward(state, *args[1:], **named) if args else forward(**{**named, "hidden_states": state})
        waiting[id(layer)] -= 1
        handed = args[0] if args else named["hidden_states"]
        parts = self.tuples.get(id(layer))
        return handed if parts is None else (handed, *[None] * (parts - 1))

    def _watch(self, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple):
            self.tuples[id(layer)] = len(output)


class _Idle(TorchFunctionMode):
    """The last attention while it is told what to answer: nobody looks at its queries, keys and values, so they are
    computed for one row and repeated."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.given, self.waiting, self.thread = answer, False, threading.get_ident()

    def start(self, module: nn.Module, args: Any) -> None:
        self.waiting = threading.get_ident() == self.thread

    def answer(self, query: Tensor) -> Tensor:
        self.waiting = False
        return self.given

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self.waiting or func is not functional.linear:
            return func(*args, **(kwargs or {}))
        rows, *others = args
        made = func(rows[:1], *others, **(kwargs or {}))
        return made.expand(len(rows), *made.shape[1:])


def _along(part: Any, width: int) -> bool:
    return isinstance(part, Tensor) and part.dim() > 1 and part.shape[1] == width
