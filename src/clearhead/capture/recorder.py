"""One forward and one backward pass: what was asked for, handed over call by call, the last call first."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.capture.attention.tiled import repeated
from clearhead.capture.attention.tiling import Kernel, Tiles
from clearhead.capture.checks.detached_gradients import Whole
from clearhead.capture.checks.self_test import Place, SelfTest, expected_calls, self_test, streaming_test
from clearhead.capture.dispatch import Visit, Visits, plain, released
from clearhead.capture.peft_layers import wrapping_layer
from clearhead.capture.session import at_rest, hooks, lock_of, ordered_gradients, starting
from clearhead.capture.sources.attention_interface import NAME, Captured, capture
from clearhead.capture.tape import GRADIENTS, Asks, Call, Tape, check_asks
from clearhead.errors import InputError, Refusal

#: The model's output → one number per sample, or several (target × sample).
Value = Callable[[Any], Float[Tensor, "*target batch"]]
#: The name of an attention module, and which of its calls → the streams of its queries and of its keys; None for a
#: call that is left out, because nothing that is explained goes through it.
Streams = Callable[[str, int], tuple[str, str] | None]


class Unbatched(Exception):
    """An operation of the model cannot be differentiated for several targets at once."""


@dataclass
class Rows:
    """The module that makes an answer of each row by itself, and the row that each number comes from."""

    head: nn.Module
    of: "Int[Tensor, 'target batch']"
    heard: Tensor | None = None

    def listen(self) -> torch.utils.hooks.RemovableHandle:
        thread = threading.get_ident()

        def hear(module: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread and args:
                self.heard = args[0]

        return self.head.register_forward_pre_hook(hear)

    def each(self, number: "Float[Tensor, 'target batch']") -> "Float[Tensor, 'target batch row model'] | None":
        """∂number/∂row for every number, from one plain backward pass; None where a number has other rows, too."""
        heard, (targets, size) = self.heard, self.of.shape
        if heard is None or not heard.requires_grad or heard.dim() != 3 or len(heard) != size:
            return None
        (whole,) = torch.autograd.grad(number.sum(), heard, retain_graph=True)
        which, who = torch.arange(targets)[:, None], torch.arange(size)[None]
        found = whole.new_zeros(targets, *whole.shape)
        found[which, who, self.of] = whole[who, self.of]
        # a target that comes several times is in the sum as often
        times = (self.of[None] == self.of[:, None]).sum(0).to(whole)
        found = found / times[:, :, None, None]
        return found if torch.allclose(found.sum(0), whole) else None


class Recorder:
    """Records passes of one model. The first pass tests the recorder itself, and refuses loudly if it is not exact.

    `streams` says whose queries look at whose keys; `embeddings` are the modules that look words up, where the model
    itself does not say; `learned` are parameters that attention starts from beside the input; `scope` is what must hold
    while the model runs; `expected` says how many calls there should be, where the configuration does not.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Streams = lambda module, nth: ("text", "text"),
        embeddings: Sequence[nn.Module] | None = None,
        learned: Sequence[nn.Parameter] = (),
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
        expected: Callable[[], int | None] | None = None,
    ) -> None:
        self.model, self.streams, self.embeddings, self.learned = model, streams, embeddings, learned
        self.scope = scope
        self.expected = expected or partial(expected_calls, getattr(model, "config", None))
        self.lock = lock_of(model)
        self.tested: SelfTest | None = None
        self.streaming_errors: dict[str, float] = {}
        #: What made the outputs of attention when streaming was tested with each kernel.
        self.streaming_outputs: dict[str, set[str]] = {}
        #: How many queries a tile of a streaming pass has, and what makes calls without tiles: None for what suits the
        #: length and the hardware.
        self.tile_rows: int | None = None
        self.kernel: Kernel | None = None
        #: The format of what the graph starts from: None for the model's own.
        self.starts_in: torch.dtype | None = None

    def run(
        self,
        inputs: Mapping[str, Any],
        value: Value,
        asks: Iterable[str],
        visit: Visit = lambda call: None,
        leaves: Sequence[str] = ("input_ids",),
        places: Collection[int] | None = None,
        rows: Rows | None = None,
        vectors: Mapping[str, Tensor] | None = None,
        tiles: Tiles | None = None,
        kept: bool = True,
    ) -> Tape:
        """One pass. `visit` gets the asked-for calls from the last to the first, each once it is complete.

        `value` maps the model's output to one number per sample. Where it gives several (target × sample), one backward
        pass is made for all of them together, and calls come with target × sample as their batch.
        `leaves` name the inputs whose vectors get input gradients; `places` limits which calls are handed over, counted
        in the order of the forward pass (and so how far the backward pass goes). `rows` says which row of the model's
        head each of several numbers comes from, where each comes from one alone. `vectors` are what the graph starts
        from, by leaf, in place of the words that were looked up or the numbers that were given. With `tiles` maps are
        never whole (`tiled.py`): `tiles` is handed those of each call, and `visit` the call without them. `kept` is
        false where `visit` keeps nothing of the maps: their memory is used again then.
        """
        wanted = check_asks(asks)
        with self.lock:
            self.test(inputs, leaves)
            with (
                at_rest(self.model),
                torch.inference_mode(False),
                torch.set_grad_enabled(bool(wanted & GRADIENTS.keys())),
                starting(self.learned),
            ):
                with hooks([] if rows is None else [rows.listen()]):
                    output, calls, starts = self.forward(inputs, wanted, leaves, vectors=vectors, tiles=tiles)
                with released(calls):
                    starts |= {f"learned {i}": parameter for i, parameter in enumerate(self.learned)}
                    number = value(output)
                    chosen = sorted(range(len(calls)) if places is None else places)
                    visits = Visits(calls, placed(calls, self.streams), chosen, wanted, visit, tiles or Tiles(), kept)
                    started = {leaf: starts[leaf] for leaf in leaves if leaf in starts}
                    roots = started if "input_gradient" in wanted else {}
                    if number.dim() == 1:
                        gradients = _backward(number, visits, roots, starts)
                    elif tiles is not None:
                        gradients = _backward_at_once(number, visits, roots, starts, rows)
                    else:
                        gradients = _backward_together(number, visits, roots, rows)
                    visits.finish()
        started = {leaf: repeated(plain(start), visits.targets) for leaf, start in started.items()}
        return Tape(
            inputs=started if "inputs" in wanted else None,
            input_gradient=gradients if "input_gradient" in wanted else None,
            value=plain(number),
        )

    def record(self, inputs: Mapping[str, Any], value: Value, asks: Iterable[str], **how: Any) -> Tape:
        """The same pass with every call kept."""
        kept: list[Call] = []
        tape = self.run(inputs, value, asks, kept.append, **how)
        tape.calls = kept[::-1]
        return tape

    def test(
        self,
        inputs: Mapping[str, Any],
        leaves: Sequence[str] = ("input_ids",),
        padded: Mapping[str, Any] | None = None,
    ) -> SelfTest:
        """The self-test, once: count calls against layers, rebuild each output, compare logits with the real ones."""
        with self.lock:
            if self.tested is None:
                forward = partial(self.forward, asks=frozenset({"attention"}), leaves=leaves)
                placing = partial(placed, streams=self.streams)
                self.tested = self_test(self.model, forward, inputs, placing, self.expected(), padded)
        return self.tested

    def test_streaming(
        self, inputs: Mapping[str, Any], leaves: Sequence[str] = ("input_ids",), kernel: Kernel | None = None
    ) -> float:
        """The same of streaming passes, once for each kernel: in small tiles, logits must be the real ones."""
        name = "" if kernel is None else kernel.name
        with self.lock:
            tested = self.test(inputs, leaves)
            if name not in self.streaming_errors:
                tiles = Tiles(rows=3, kernel=kernel)
                forward = partial(self.forward, asks=frozenset({"attention"}), leaves=leaves, tiles=tiles)
                self.streaming_errors[name] = streaming_test(self.model, forward, inputs, tested)
                self.streaming_outputs[name] = tiles.ran.outputs
        return self.streaming_errors[name]

    def forward(
        self,
        inputs: Mapping[str, Any],
        asks: Asks,
        leaves: Sequence[str],
        implementation: str | None = None,
        silent: bool = False,
        vectors: Mapping[str, Tensor] | None = None,
        tiles: Tiles | None = None,
    ) -> tuple[Any, list[Captured], dict[str, Tensor]]:
        """The model's output, its attention calls, and the tensors that the graph starts from, by leaf.

        A word looked up that is no leaf (a decoder's, where only the source is asked about) is a start all the same.
        """
        implementation = implementation or (self.tested.implementation if self.tested else NAME)
        starts: dict[str, Tensor] = {}
        given, others = dict(inputs), vectors or {}
        looked_up = [leaf for leaf in leaves if leaf in given and not given[leaf].is_floating_point()]
        with ExitStack() as stack:
            stack.enter_context(hooks(ordered_gradients(self.model)))
            if looked_up:
                words = {leaf: given[leaf].numel() for leaf in looked_up}
                stack.enter_context(hooks(_start_at_embeddings(self.lookups(), words, starts, others, self.starts_in)))
            for leaf in leaves:
                if leaf in given and leaf not in looked_up:
                    vector = others.get(leaf, given[leaf]).to(given[leaf])
                    given[leaf] = starts[leaf] = _as_leaf(vector, self.starts_in)
            layers, projections = bool(asks & {"block_input", "hidden_state"}), "output_projection" in asks
            values = tiles is None or bool(asks & {"values", "output_projection"})
            how = (layers, projections, implementation, silent, tiles, values)
            calls = stack.enter_context(capture(self.model, *how, as_streamed=True))
            stack.enter_context(self.scope())
            if self.tested is not None and self.tested.cuts and torch.is_grad_enabled():
                stack.enter_context(Whole())
            output = self.model(**given)
        calls = [call for call in calls if self.streams(call.module, call.nth) is not None]
        if asks & {"values", "output_projection"} and any(call.values is None for call in calls):
            raise Refusal(
                f"{type(self.model).__name__} ignores transformers' attention interface: its attention can be "
                "recorded, but not its values and output projection"
            )
        return output, calls, starts

    def lookups(self) -> Sequence[nn.Module]:
        if self.embeddings is not None:
            return self.embeddings
        embeddings: Any = getattr(self.model, "get_input_embeddings", lambda: None)()
        if embeddings is None:
            raise Refusal(f"{type(self.model).__name__} has no input embeddings to start from")
        # An encoder–decoder looks words up through modules that share one weight: the first look-up is the source.
        same = [m for m in self.model.modules() if isinstance(m, nn.Embedding) and m.weight is embeddings.weight]
        # Adapters change the vectors of words: the graph starts after them, as it does in the merged model.
        return [wrapping_layer(module, self.model) for module in same] or [embeddings]


def placed(calls: Sequence[Captured], streams: Streams) -> list[Place]:
    """Whose queries look at whose keys in each call, and in which of the layers that these two share."""
    counts: Counter[tuple[str, str]] = Counter()
    places = []
    for call in calls:
        pair = streams(call.module, call.nth)
        assert pair is not None
        batch, heads, queries, keys = call.attention.shape
        places.append(Place(call.module, *pair, counts[pair], (batch, queries, keys), heads))
        counts[pair] += 1
    return places


def _backward(
    number: Float[Tensor, "batch"], visits: Visits, roots: Mapping[str, Tensor], starts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients with respect to what was asked for, and nothing else: never a weight's."""
    ends = _ends(number, visits, roots, starts)
    if not ends:
        return {}
    with hooks(_heard(visits)):
        gradients = torch.autograd.grad(number.sum(), ends, allow_unused=True)
    pairs = zip(roots.items(), gradients, strict=False)
    return {name: plain(torch.zeros_like(r) if g is None else g) for (name, r), g in pairs}


def _ends(number: Tensor, visits: Visits, roots: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> list[Any]:
    """What gradients are asked for, so that they reach all that is waited for; nothing where nothing is."""
    sources = visits.sources()
    if not roots and not sources:
        return []
    _require_gradient(number)
    # A gradient that reaches the first call has passed all the others, so only it (or the input) need be asked for.
    # With several starts it has not: a decoder's first self-attention lies on no way from the encoder.
    lowest = [node for place, _, node in sources if place == min(visits.left)]
    alone = len(starts) == 1
    return [*roots.values(), *([] if roots and alone else lowest if alone else starts.values())]


def _heard(visits: Visits) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks by which gradients arrive that nothing else brings."""
    waited = [source for source in visits.sources() if not visits.comes_by_itself(*source[:2])]
    return [node.register_hook(partial(visits.hear, place, ask)) for place, ask, node in waited]


def _backward_at_once(
    number: Float[Tensor, "target batch"],
    visits: Visits,
    roots: Mapping[str, Tensor],
    starts: Mapping[str, Tensor],
    rows: Rows | None,
) -> dict[str, Tensor]:
    """All targets in one backward pass of a streaming pass, whose tiles are made once for all of them."""
    visits.targets = len(number)
    ends = _ends(number, visits, roots, starts)
    if not ends:
        return {}
    each = None if rows is None else rows.each(number)
    of = number.sum(1) if each is None or rows is None else rows.heard
    assert of is not None
    each = torch.eye(len(number), dtype=number.dtype, device=number.device) if each is None else each

    def gradients(one: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(of, ends, one, allow_unused=True)
        return {name: gradient for name, gradient in zip(roots, found, strict=False) if gradient is not None}

    with hooks(_heard(visits)):
        try:
            found = torch.vmap(gradients)(each)
        except (RuntimeError, NotImplementedError) as problem:
            raise Unbatched from problem
    zeros = {name: torch.zeros_like(root).expand(len(number), *root.shape) for name, root in roots.items()}
    return {name: plain(found.get(name, zeros[name]).flatten(0, 1)) for name in roots}


def _backward_together(
    number: Float[Tensor, "target batch"], visits: Visits, roots: Mapping[str, Tensor], rows: Rows | None
) -> dict[str, Tensor]:
    """All targets in one backward pass, with the target as an axis of its own."""
    visits.targets = len(number)
    sources = visits.sources()
    if not roots and not sources:
        return {}
    _require_gradient(number)
    nodes = [*roots.values(), *(node for _, _, node in sources)]
    each = None if rows is None else rows.each(number)
    if each is not None and rows is not None and rows.heard is not None:
        found = _gradients_together(rows.heard, nodes, each)  # the head's part is done: its rows have a word each
    else:
        each = torch.eye(len(number), dtype=number.dtype, device=number.device)
        found = _gradients_together(number.sum(1), nodes, each)
    for (place, ask, _), gradient in zip(sources, found[len(roots) :], strict=True):
        if gradient is not None:
            visits.arrived[place][ask] = gradient.flatten(0, 1)
    pairs = zip(roots.items(), found, strict=False)
    return {
        name: plain(repeated(torch.zeros_like(r), len(number)) if g is None else g.flatten(0, 1))
        for (name, r), g in pairs
    }


def _gradients_together(of: Tensor, nodes: Sequence[Tensor], each: Tensor) -> Sequence[Tensor | None]:
    """One batched backward pass, or one for each where an operation of the model cannot be batched."""

    def gradients(one: Tensor) -> dict[int, Tensor]:
        found = torch.autograd.grad(of, nodes, one, retain_graph=True, allow_unused=True)
        return {i: gradient for i, gradient in enumerate(found) if gradient is not None}

    try:
        # torch.vmap and not is_grads_batched, whose tensors no rule of a function of our own can be given for
        together = torch.vmap(gradients)(each)
    except (RuntimeError, NotImplementedError):
        single = [gradients(one) for one in each]
        together = {i: torch.stack([found[i] for found in single]) for i in single[0]}
    return [together.get(i) for i in range(len(nodes))]


def _require_gradient(number: Tensor) -> None:
    if not number.requires_grad:
        raise InputError(
            "the target does not depend on the input through differentiable operations, so it has no gradient: "
            "compute it from the model's output, without detach() or item()"
        )


def _start_at_embeddings(
    lookups: Sequence[nn.Module],
    words: Mapping[str, int],
    starts: dict[str, Tensor],
    others: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> list[torch.utils.hooks.RemovableHandle]:
    """Make the word embeddings the start of the graph; positions and types are added after them.

    `words` says how many there are of each leaf, in the order in which the model looks them up.
    """
    thread, waiting = threading.get_ident(), list(words)

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return output  # somebody else's pass through the same model
        leaf = waiting.pop(0) if waiting else f"look-up {len(starts)}"
        found = output.shape[:-1].numel()
        if found != words.get(leaf, found):
            raise Refusal(f"{words[leaf]} words are given as {leaf}, but {found} are looked up where these should be")
        starts[leaf] = _as_leaf(others.get(leaf, output).to(output), dtype)
        return starts[leaf].clone()  # some models add positions to it in place (BLIP)

    return [module.register_forward_hook(start) for module in lookups]


def _as_leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype, copy=True).requires_grad_(torch.is_grad_enabled())
