"""The kind "path": tapes at scaled, noisy or baseline inputs, as many at once as there is room for.

The class explained is the one of the input itself, all along the way. What several methods want to see is run once.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import Ran
from clearhead.capture.checks.self_test import Place, SelfTest
from clearhead.capture.layers import blocks_of
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import hooks
from clearhead.capture.tape import ALONG_UNITS, Asks, Call, check_asks
from clearhead.engine.baselines import Baselines
from clearhead.engine.memory_budget import at_most
from clearhead.engine.passes.completeness import completeness_gap
from clearhead.engine.passes.norm_inputs import normed
from clearhead.engine.sampling import Draws
from clearhead.engine.target_batch import Plan, Reading, recorded
from clearhead.methods._path import Nothing, PathFold, Point, Step
from clearhead.methods.base import Scores
from clearhead.targets import Predicted, Target

#: How many numbers the attention maps of points that are run together may hold, and how many rows a batch of them.
ROOM, ROWS = 2**27, 128
#: How many units points that are run together may have, where there are no maps.
UNITS = 16384
MAPS = check_asks(("attention", "attention_gradient"))


def from_path(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """The input itself, then every point that is wanted, then what the methods make of it."""
    every = [fold for reading in readings for fold in _folds(reading)]
    asks: Asks = check_asks({"inputs"}.union(*(fold.clean for fold in every)))
    if any(fold.reads_norms for fold in every):
        seen = normed(recorder, plan, tested)
        for fold in every:
            fold.norms = {layer: one for (stream, layer), one in seen.items() if stream == fold.frame.stream}
    tape = recorded(recorder, plan, [r for r in readings if not _of_predicted(r)], tested, asks)
    if others := [r for r in readings if _of_predicted(r)]:
        recorded(recorder, _predicted(plan), others, tested, asks)
    way = Way(recorder, plan, tape.inputs or {}, tested, readings)
    tape.inputs = None  # methods are shown the way, and some models cannot say which unit's their pixels are
    wanted: dict[Point, list[PathFold]] = {}
    for reading in readings:
        for fold in _folds(reading):
            for point in dict.fromkeys(way.known(point) for point in fold.points()):
                wanted.setdefault(point, []).append(fold)
    by_asks: dict[Asks, list[Point]] = {}
    for point, folds in wanted.items():
        by_asks.setdefault(frozenset().union(*(fold.along for fold in folds)), []).append(point)
    for along, points in by_asks.items():
        for start in range(0, len(points), way.together):
            way.walk(points[start : start + way.together], along, wanted)
    tape = plan.arranged(tape)
    return [_with_gap(reading, reading.finish(tape), plan.values) for reading in readings]


def _folds(reading: Reading) -> list[PathFold]:
    return [fold for fold in reading.folds.values() if isinstance(fold, PathFold)]


def _of_predicted(reading: Reading) -> bool:
    return any(fold.of_predicted for fold in _folds(reading))


def _predicted(plan: Plan) -> Plan:
    """The same batch, with the class that is predicted as its target."""
    targets = [[Target(Predicted(), target.scale)] * plan.steps for target in plan.targets[: plan.size]]
    return Plan(plan.subject, plan.given, targets, plan.seed, plan.streaming)


def _with_gap(reading: Reading, parts: dict[str, Scores], values: Float[Tensor, "batch"]) -> dict[str, Scores]:
    """How far the scores of all streams together are from what they should add up to, where they should."""
    explained = [fold.explained for fold in _folds(reading) if fold.explained is not None]
    base = next((fold.base_value for fold in _folds(reading) if fold.base_value is not None), None)
    if not explained or base is None:
        return parts
    missed = values - base - torch.stack(explained).sum(0)
    gap = completeness_gap(missed, [part.scores for part in parts.values()])
    return {
        stream: replace(part, checks={**(part.checks or {}), "completeness_gap": gap}) for stream, part in parts.items()
    }


class Way:
    """One batch, its vectors, and the passes at points of their paths."""

    def __init__(
        self,
        recorder: Recorder,
        plan: Plan,
        inputs: Mapping[str, Tensor],
        tested: SelfTest,
        readings: Sequence[Reading],
    ) -> None:
        self.recorder, self.plan, self.tested, self.readings = recorder, plan, tested, readings
        self.inputs = {leaf: part.chunk(plan.steps)[0] for leaf, part in inputs.items()}
        self.words = [leaf for leaf in self.inputs if not plan.batch[leaf].is_floating_point()]
        self.baselines = Baselines(plan, self.inputs, self.words, recorder)
        self.draws = Draws(plan, self.inputs, self.words)
        self.targets = [self._pinned(i, target) for i, target in enumerate(plan.targets)]
        self.plans: dict[int, Plan] = {}

    def _pinned(self, i: int, target: Target) -> Target:
        return target if self.plan.scores is None else target.pinned(self.plan.scores[i], self.plan.subject)

    @property
    def together(self) -> int:
        """How many points are run at once. A caller's own target may count on the batch: then it is one."""
        plan = self.plan
        if any(target.custom is not None for target in plan.targets):
            return 1
        width = {stream: frame.valid.shape[1] for stream, frame in plan.frames.items()}
        rows = plan.size * plan.steps
        if plan.streaming is not None:
            return max(1, min(UNITS // (sum(width.values()) * rows), at_most(ROWS) // rows))
        cells = sum(width[place.query_stream] * width[place.key_stream] * place.heads for place in self.tested.places)
        return max(1, min(ROOM // max(1, cells * rows), at_most(ROWS) // rows))

    def known(self, point: Point) -> Point:
        """The same point in the shortest words, so that methods that want the same share it."""
        return replace(point, only=None) if len(self.plan.frames) == 1 else point

    def walk(self, points: Sequence[Point], asks: Asks, wanted: Mapping[Point, Sequence[PathFold]]) -> None:
        """One pass at these points, and what it shows to whom."""
        plan, steps = self._plan(len(points)), self.plan.steps
        placed = [self._placed(point) for point in points]
        vectors = {leaf: torch.cat([vector[leaf] for vector, _, _ in placed]) for leaf in self.inputs}
        factors = {
            stream: torch.cat([scaled.get(stream, _ones(self.plan)) for _, _, scaled in placed])
            for stream in {stream for _, _, scaled in placed for stream in scaled}
        }
        shown = [fold for point in points for fold in wanted[point] if asks & ALONG_UNITS]
        places = [i for i, place in enumerate(self.tested.places) if any(self._shows(fold, place) for fold in shown)]

        def show(call: Call, queries: slice | None = None, sweep: int = 0) -> None:
            gathered = call.to(self.plan.subject.device)
            for i, point in enumerate(points):
                folds = [fold for fold in wanted[point] if self._shows(fold, call)]
                if plan.streaming is not None:  # those that read maps are shown tiles
                    folds = [fold for fold in folds if bool(fold.along & MAPS) == (queries is not None)]
                if folds:
                    own = _of_point(gathered, i, steps, len(points))
                    for fold in folds:
                        fold.at_call(point, own if fold.heads is None else own.with_heads(fold.heads), queries)

        tiles = plan.streaming
        if tiles is not None:
            tiles = replace(tiles, fold=show, sweeps=int(bool(asks & MAPS)), hidden=True, ran=Ran())
        with scaled_layers(self.recorder, self.tested, factors):
            tape = self.recorder.run(
                plan.batch,
                plan.value,
                asks,
                show,
                leaves=plan.leaves,
                places=places,
                rows=plan.rows,
                vectors=vectors,
                tiles=tiles,
            )
        tape.inputs = None
        for reading in self.readings:
            if {id(fold) for fold in _folds(reading)} & {id(fold) for point in points for fold in wanted[point]}:
                reading.streamed(tiles)
        tape = plan.arranged(tape)
        tape.value = plan.values
        ways = {
            leaf: torch.cat([way[leaf] for _, way, _ in placed]).repeat(steps, *(1,) * (part.dim() - 1))
            for leaf, part in self.inputs.items()
        }
        arranged = plan.subject.arranged(ways, plan.samples) if tape.input_gradient is not None else {}
        for i, point in enumerate(points):
            own_tape = replace(
                tape,
                input_gradient=_each(tape.input_gradient, i, steps, len(points)),
                value=_one(tape.value, i, steps, len(points)),
                logits=None,
            )
            step = Step(point, own_tape, _each(arranged, i, steps, len(points)) or {})
            for fold in wanted[point]:
                fold.at(step)

    def _plan(self, points: int) -> Plan:
        """The batch as often as there are points."""
        if points not in self.plans:
            size, steps = self.plan.size, self.plan.steps
            targets = [[self.targets[step * size + i] for step in range(steps)] for i in range(size)]
            given, seed, tiles = self.plan.given * points, self.plan.seed, self.plan.streaming
            self.plans[points] = Plan(self.plan.subject, given, targets * points, seed, tiles)
            self.plans[points].told = False
        return self.plans[points]

    def _shows(self, fold: PathFold, call: Call | Place) -> bool:
        """Whether a method is shown this call: within its stream, the last one or those of its layers."""
        stream = fold.frame.stream
        if not fold.along & ALONG_UNITS or (call.query_stream, call.key_stream) != (stream, stream):
            return False
        last = self.tested.layers(stream, stream) - 1
        return call.layer in fold.frame.layers if fold.at_layers == "all" else call.layer == last

    def _placed(self, point: Point) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """What each leaf is at a point, its way to the input, and by what the first layer of which stream is scaled."""
        vectors: dict[str, Tensor] = {}
        ways: dict[str, Tensor] = {}
        scaled: dict[str, Tensor] = {}
        along = self._along(point)
        in_layers = {stream for leaf in self.words for stream in self._streams[leaf]} if point.at == "layers" else set()
        for leaf, x in self.inputs.items():
            if point.only is not None and point.only not in self._streams[leaf]:
                vectors[leaf], ways[leaf] = x, torch.zeros_like(x)
                continue
            noisy = x + self.draws.noise(point, leaf) if point.noise else x
            if self._streams[leaf] & in_layers:
                vectors[leaf], ways[leaf] = noisy, noisy
                scaled |= dict.fromkeys(self._streams[leaf] & in_layers, along)
                continue
            baseline = self._baseline(point, leaf)
            ways[leaf] = noisy - baseline
            vectors[leaf] = noisy if point.along == 1 else baseline + self.draws.spread(along, leaf) * ways[leaf]
        return vectors, ways, scaled

    @property
    def _streams(self) -> dict[str, set[str]]:
        """Which streams each leaf is part of."""
        if not hasattr(self, "_found"):
            plan, samples = self.plan, self.plan.samples[: self.plan.size]
            alone = set(plan.frames) if len(plan.frames) == 1 else set()
            self._found: dict[str, set[str]] = {leaf: alone for leaf in self.inputs if alone}
            for leaf in [] if alone else self.inputs:
                marked = {other: torch.full_like(x, float(other == leaf)) for other, x in self.inputs.items()}
                arranged = plan.subject.arranged(marked, samples)
                self._found[leaf] = {stream for stream, part in arranged.items() if part.any()}
        return self._found

    def _along(self, point: Point) -> Float[Tensor, "batch"]:
        along = self.draws.along(point) if point.along is None else _ones(self.plan) * point.along
        return along.to(_ones(self.plan))

    def _baseline(self, point: Point, leaf: str) -> Tensor:
        if isinstance(point.baseline, Nothing):
            return torch.zeros_like(self.inputs[leaf])
        if not isinstance(point.baseline, tuple):
            return self.baselines.of(point.baseline, leaf)
        parts = [self.baselines.of(name, leaf) for name in point.baseline]
        which = self.draws.spread(self.draws.one_of(len(parts), point), leaf)
        made = parts[0]
        for number, part in enumerate(parts):
            made = torch.where(which == number, part, made)
        return made


def _ones(plan: Plan) -> Float[Tensor, "batch"]:
    readout = plan.readouts[next(iter(plan.readouts))]
    return torch.ones(plan.size, dtype=readout.dtype, device=readout.device)


def _one(part: Tensor | None, i: int, steps: int, points: int) -> Any:
    """What belongs to one point, of target × point × sample."""
    return None if part is None else part.unflatten(0, (steps, points, -1))[:, i].flatten(0, 1)


def _each(parts: dict[str, Tensor] | None, i: int, steps: int, points: int) -> dict[str, Tensor] | None:
    return None if parts is None else {name: _one(part, i, steps, points) for name, part in parts.items()}


def _of_point(call: Call, i: int, steps: int, points: int) -> Call:
    batched = {name: _one(part, i, steps, points) for name, part in call.tensors() if name != "output_projection"}
    return replace(call, **batched)


@contextmanager
def scaled_layers(recorder: Recorder, tested: SelfTest, factors: Mapping[str, Float[Tensor, "row"]]) -> Iterator[None]:
    """Scale what enters the first layer of a stream, row by row: words with their positions, as the layers see them."""
    blocks, thread = blocks_of(recorder.model) if factors else {}, threading.get_ident()
    handles = []

    def scaling(factor: Tensor, run: int) -> Any:
        left = [run]  # a layer that is shared, or reads two texts, runs several times: one run is this stream's first

        def scale(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:
                return None
            left[0] -= 1
            if left[0] != -1:
                return None
            if args:
                return (_scaled(args[0], factor), *args[1:]), kwargs
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            return args, {**kwargs, name: _scaled(kwargs[name], factor)}

        return scale

    for stream, factor in factors.items():
        own = [i for i, p in enumerate(tested.places) if (p.query_stream, p.key_stream) == (stream, stream)]
        name = tested.places[own[0]].module
        before = sum(place.module == name for place in tested.places[: own[0]])
        block = blocks[id(recorder.model.get_submodule(name))]
        handles.append(block.register_forward_pre_hook(scaling(factor, before), with_kwargs=True))
    with hooks(handles):
        yield


def _scaled(hidden: Tensor, factor: Tensor) -> Tensor:
    return hidden * factor.to(hidden).reshape(-1, *(1,) * (hidden.dim() - 1))
