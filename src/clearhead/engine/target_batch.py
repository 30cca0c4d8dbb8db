"""One batch with its targets: what the recorder is called with, and the coordinates that methods work in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Sample, Subject
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiled import LEAST_ROWS
from clearhead.capture.attention.tiling import Ran, Tiles
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder, Rows
from clearhead.capture.tape import ALONG_UNITS, Asks, Call, Tape
from clearhead.engine.memory_budget import note
from clearhead.errors import InputError
from clearhead.methods.base import ACROSS, REGISTRY, AcrossFold, Fold, Frame, Method, Scores, layer_range
from clearhead.targets import Target, values_of

#: How many numbers of a map are folded together where maps are whole (1 MiB in float32).
CACHED = 2**18


class Plan:
    """One batch with its targets, equally many for each sample: what the recorder is called with, and what came out.

    With several targets everything has target × sample as its batch, the first target of all samples first.
    """

    def __init__(
        self,
        subject: Subject,
        samples: Sequence[Sample],
        targets: Sequence[Sequence[Target]],
        seed: int = 0,
        streaming: Tiles | None = None,
    ) -> None:
        self.subject, self.seed, self.size, self.streaming = subject, seed, len(samples), streaming
        self.steps = len(targets[0])
        self.targets = [own[step] for step in range(self.steps) for own in targets]
        self.given = list(samples)
        #: Once for each target. Logits are looked up by these: of rows that `samples` keep the model is not told.
        self.each = self.given * self.steps
        # each target sees its own part of the sample: what comes after it neither counts nor is looked at
        pairs = zip(self.each, self.targets, strict=True)
        self.samples = [subject.cut(sample, [target]) for sample, target in pairs]
        note(len(self.samples))
        self.batch = subject.collate(samples)
        self.leaves = subject.leaves(self.batch)
        self.scores: Float[Tensor, "batch label"] | None = None
        self.values: Float[Tensor, " batch"] = torch.empty(0)
        #: The same on the CPU, brought there before anything goes back; unless nothing is said of this plan, as of one
        #: of many points.
        self.told = True
        self.logits: Float[Tensor, "batch label"] | None = None
        self.numbers: list[float] = []
        #: What holds while scores are made of the output, where the subject multiplies to make them.
        self.multiplying: Callable[[], AbstractContextManager[object]] = nullcontext
        #: Is shown the numbers that are explained (target × sample), and the scores that they are made of, before
        #: anything goes back.
        self.starting: Callable[[Tensor, Tensor], None] | None = None

    @property
    def width(self) -> int:
        """The units of the longest sample, all its streams together."""
        return max(sum(map(len, sample.axes.values())) for sample in self.given)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The format that methods work in."""
        return torch.float64 if self.subject.dtype == torch.float64 else torch.float32

    @cached_property
    def made_in(self) -> dict[str, str]:
        """The model's own format, and where it is."""
        return {"dtype": str(self.subject.dtype).removeprefix("torch."), "device": str(self.subject.device)}

    @cached_property
    def readouts(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        weights = {
            stream: np.zeros((len(self.samples), 1, max(len(sample.axes[stream]) for sample in self.samples)))
            for stream in self.samples[0].axes
        }
        for i, (sample, target) in enumerate(zip(self.samples, self.targets, strict=True)):
            for stream, rows in self.subject.readouts(sample, target).items():
                weights[stream][i, 0, list(rows)] = list(rows.values())
        return {s: torch.from_numpy(part).to(self.dtype).to(self.subject.device) for s, part in weights.items()}

    @property
    def rows(self) -> Rows | None:
        """Which row of the model's head each of several targets comes from, where the subject can say."""
        spoken = None if self.steps == 1 else self.subject.head_rows(self.each, self.targets)
        if spoken is None:
            return None
        head, rows = spoken
        return Rows(head, torch.tensor(rows).unflatten(0, (self.steps, self.size)))

    @cached_property
    def fingerprints(self) -> list[str]:
        """What tells one input from another, whatever it is called."""
        own = self.seeds if self.seed == 0 else [sample.seed(0) for sample in self.samples]
        return [f"{one:014x}" for one in own]

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sample.seed(self.seed) for sample in self.samples)

    def value(self, output: Any) -> Float[Tensor, "*target batch"]:
        """One number per sample and target; a target of the caller's own sees the whole output."""
        own = {id(target.custom): target.custom for target in self.targets if target.custom is not None}
        seen = self._narrow(output) if own else output
        computed = {key: _own_value(function, seen, self.size) for key, function in own.items()}
        by_class = any(target.custom is None for target in self.targets)
        if by_class or getattr(output, "logits", None) is not None:
            with self.multiplying() if self.subject.multiplies else nullcontext():
                self.scores = self.subject.scores(output, self.each, self.targets)
        number = self._numbers(computed)
        made_of = self.scores if getattr(output, "logits", None) is None else output.logits
        if self.starting is not None and made_of is not None:
            self.starting(number.unflatten(0, (self.steps, self.size)), made_of)
        self.values = self._narrow(number.detach())
        self.scores = None if self.scores is None else self._narrow(self.scores.detach())
        if self.told:
            self.logits = None if self.scores is None else self.scores.cpu()
            self.numbers = self.values.tolist()
        return number if self.steps == 1 else number.unflatten(0, (self.steps, self.size))

    def _narrow(self, part: Any) -> Any:
        """What a pass in float64 put out, in the format that the model has by itself, or near it."""
        if isinstance(part, Tensor):
            return part.to(self.dtype) if part.dtype == torch.float64 else part
        if isinstance(part, Mapping):
            return type(part)(**{name: self._narrow(one) for name, one in part.items()})
        return tuple(map(self._narrow, part)) if type(part) is tuple else part

    def _numbers(self, computed: Mapping[int, Tensor]) -> Float[Tensor, " batch"]:
        """The number of each target: those of the caller's own functions, and of classes scale by scale."""
        by_scale: dict[str, list[int]] = {}
        for i, target in enumerate(self.targets):
            by_scale.setdefault("own" if target.custom is not None else target.scale, []).append(i)
        parts = [
            torch.stack([computed[id(self.targets[i].custom)][i % self.size] for i in places])
            if scale == "own"
            else self._of_classes(scale, places)
            for scale, places in by_scale.items()
        ]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([i for places in by_scale.values() for i in places]).argsort()
        return torch.cat(parts)[order.to(parts[0].device)]

    def _of_classes(self, scale: str, places: Sequence[int]) -> Float[Tensor, " some"]:
        """All at once; which classes they are about is found on the CPU, where a look costs no waiting for a GPU."""
        if self.subject.regression and scale in ("probability", "log-odds"):
            raise InputError(f"the model measures and has no classes, so no {scale}: use scale='logit'")
        assert self.scores is not None
        if any(type(self.targets[i]).value is not Target.value for i in places):  # a kind of target with its own rule
            rows = self.scores.unbind()  # the gradient of a row taken by its number would be a whole tensor of zeros
            return torch.stack([self.targets[i].value(rows[i], self.subject) for i in places])
        here = self.scores.detach().cpu()
        classes = [self.targets[i].classes(here[i], self.subject) for i in places]
        some = self.scores if len(places) == len(self.scores) else self.scores[list(places)]
        return values_of(some, classes, scale, self.subject.multi_label)

    def arranged(self, tape: Tape) -> Tape:
        """Embeddings, pixels and the like as one vector per unit."""
        for name in tape.BY_STREAM:
            parts = getattr(tape, name)
            setattr(tape, name, None if parts is None else self.subject.arranged(parts, self.samples))
        tape.logits = self.scores
        tape.truncated_tokens = tuple(sample.dropped for sample in self.samples)
        return tape

    @cached_property
    def frames(self) -> dict[str, Frame]:
        """The coordinates that all methods of this batch share, along each axis."""
        return {stream: self._frame(stream) for stream in self.samples[0].axes}

    def _frame(self, stream: str) -> Frame:
        readout, axes = self.readouts[stream], tuple(sample.axes[stream] for sample in self.samples)
        lengths = torch.tensor([len(axis) for axis in axes])
        valid = torch.arange(readout.shape[2]) < lengths[:, None]
        return Frame(readout, valid.to(readout.device), self.seeds, axes, stream=stream)


class Reading:
    """One method at work on one batch: a fold for each stream, or one across all where streams look at each other."""

    def __init__(self, method: Method, plan: Plan, tested: SelfTest) -> None:
        self.method, self.asks = method, method.declaration.asks
        self.ran: list[Ran] = []  # what streaming passes did for it, and do when they are asked later
        self.heads = {place.module: place.heads for place in tested.places}
        layers = method.option("layers", method.declaration.layers)
        pairs = {(place.query_stream, place.key_stream) for place in tested.places}
        self.layers = {pair: layer_range(layers, tested.layers(*pair)) for pair in pairs}
        frames = {stream: self._framed(frame) for stream, frame in plan.frames.items()}
        options = method.own_options
        self.across: AcrossFold | None = None
        self.folds: dict[str, Fold] = {}
        if tested.crosses and method.name in ACROSS:
            modules = {place.module for place in tested.places}
            self.across = ACROSS[method.name](
                frames=frames,
                layers=self.layers,
                towers=frozenset(module for module in modules if plan.subject.in_tower(module)),
                blocks={module: block for module in modules if (block := plan.subject.block_of(module)) is not None},
                **options,
            )
        else:
            self.folds = {stream: REGISTRY[method.name](frame=frame, **options) for stream, frame in frames.items()}

    def _framed(self, frame: Frame) -> Frame:
        if self.method.option("rows") == "all":
            width = frame.valid.shape[1]
            every = torch.eye(width, dtype=frame.readout.dtype, device=frame.readout.device)
            frame = replace(frame, readout=every.expand(len(frame.valid), width, width))
        return replace(frame, layers=self.layers.get((frame.stream, frame.stream), range(0)))

    @property
    def any_fold(self) -> Fold | AcrossFold:
        return self.across or next(iter(self.folds.values()))

    def wants(self, query_stream: str, key_stream: str, layer: int) -> bool:
        return bool(self.asks & ALONG_UNITS) and layer in self.layers[query_stream, key_stream]

    def visit(self, call: Call) -> None:
        if self.wants(call.query_stream, call.key_stream, call.layer):
            self._fold_of(call).fold(call)

    def _fold_of(self, call: Call) -> Any:
        """The fold that a call belongs to, with the heads that were chosen."""
        fold = self.across or self.folds[call.query_stream]
        if self.method.option("heads") is not None:
            fold.heads = _head_list(self.method.option("heads"), self.heads[call.module])
        return fold

    @property
    def streams(self) -> bool:
        """Whether it needs no whole map: it reads none, or tile by tile, or asks for sums after the pass."""
        if self.method.kind not in ("tape", "path"):
            return False
        return not self.asks & {"attention", "attention_gradient"} or self.sweeps > 0 or self.sets_aside

    @property
    def sweeps(self) -> int:
        return max((0 if fold.needs_whole else fold.sweeps for fold in self._every), default=0)

    @property
    def sets_aside(self) -> bool:
        return any(fold.sets_aside for fold in self._every)

    @property
    def reads_hidden(self) -> bool:
        return any(fold.reads_hidden for fold in self._every)

    @property
    def _every(self) -> list[Fold | AcrossFold]:
        return [*self.folds.values()] if self.across is None else [self.across]

    def tile(self, call: Call, queries: slice, sweep: int) -> None:
        if self.sweeps and self.wants(call.query_stream, call.key_stream, call.layer):
            self._fold_of(call).fold_tile(call, queries, sweep)

    def reads_maps(self, call: Call) -> bool:
        """Whether it wants something of the maps of this call."""
        return bool(self.sweeps) and self.wants(call.query_stream, call.key_stream, call.layer)

    def streamed(self, tiles: Tiles | None) -> None:
        """A pass was made for it, in tiles or not."""
        if tiles is not None:
            self.ran.append(tiles.ran)

    @property
    def kernel(self) -> str:
        """What the certificate says."""
        return reduce(or_, self.ran).name if self.ran else "materialised"

    def wanted_sum(self, call: Call) -> Reduce | None:
        """The sum of the maps that is enough, if one is."""
        fold = self._fold_of(call)
        wanted: Reduce | None = fold.wanted_sum(call)
        return None if wanted is None else replace(wanted, heads=fold.heads)

    def fold_sum(self, call: Call, total: Tensor) -> None:
        self._fold_of(call).fold_sum(call, total)

    def finish(self, tape: Tape) -> dict[str, Scores]:
        if self.across is not None:
            return {stream: _checked(part, self.across, stream) for stream, part in self.across.finish(tape).items()}
        return {stream: _checked(fold.finish(tape), fold, stream) for stream, fold in self.folds.items()}


def recorded(
    recorder: Recorder,
    plan: Plan,
    readings: Sequence[Reading],
    tested: SelfTest,
    asks: Asks,
) -> Tape:
    """One pass over the batch, whose calls all methods are handed that want them, or tiles of them."""
    places = [
        i
        for i, place in enumerate(tested.places)
        if any(reading.wants(place.query_stream, place.key_stream, place.layer) for reading in readings)
    ]
    device = plan.subject.device

    def gathered(call: Call) -> Call:
        # a model may be spread over several devices: what it left on each is brought together
        return call if all(part.device == device for _, part in call.tensors()) else call.to(device)

    def visit(call: Call) -> None:
        here = gathered(call)
        for sweep, queries in _cuts(here, sweeps) if tiles is None else ():
            part = here.of_queries(queries)
            for reading in readings:
                reading.tile(part, queries, sweep)
        for reading in readings:
            reading.visit(here)

    def fold(call: Call, queries: slice, sweep: int) -> None:
        here = gathered(call)
        for reading in readings:
            reading.tile(here, queries, sweep)

    def reductions(call: Call) -> list[Reduce] | None:
        found = [reading.wanted_sum(call) for reading in readings if reading.reads_maps(call)]
        return None if None in found else [one for one in found if one is not None]

    def reduced(call: Call, sums: list[Tensor]) -> None:
        wanting = [reading for reading in readings if reading.reads_maps(call)]
        for reading, total in zip(wanting, sums, strict=True):
            reading.fold_sum(call, total.to(device))

    tiles = None
    sweeps = max((reading.sweeps for reading in readings), default=0)
    if plan.streaming is not None:
        tiles = replace(
            plan.streaming,
            fold=fold,
            sweeps=sweeps,
            hidden=any(reading.reads_hidden for reading in readings),
            reductions=reductions,
            reduced=reduced,
            sets_aside=any(reading.sets_aside for reading in readings),
            ran=Ran(),
        )
    how: dict[str, Any] = {"leaves": plan.leaves, "places": places, "rows": plan.rows, "tiles": tiles}
    kept = not all(reading.streams for reading in readings)
    tape = recorder.run(plan.batch, plan.value, asks, visit, **how, kept=kept)
    for reading in readings:
        reading.streamed(tiles)
    return tape


def _cuts(call: Call, sweeps: int) -> Iterator[tuple[int, slice]]:
    """The queries of each tile of maps that are whole, sweep by sweep: what is made of a tile stays in a CPU's cache.

    None where nothing is gained: what is no tile yet is then one.
    """
    maps = call.attention
    if maps is None or maps.device.type != "cpu" or maps.numel() <= 2 * CACHED:
        return
    count = maps.shape[2]
    size = max(LEAST_ROWS, CACHED * count // maps.numel())
    for sweep in range(sweeps):
        for start in range(0, count, size):
            yield sweep, slice(start, min(start + size, count))


def _checked(part: Scores, fold: Fold | AcrossFold, stream: str) -> Scores:
    """A method from outside may return anything."""
    frame = fold.frames[stream]
    batch, width = frame.valid.shape
    rows = frame.readout.shape[1]
    shape = tuple(getattr(getattr(part, "scores", None), "shape", ()))
    if shape not in ((batch, rows, width), (batch, 1, width)):
        raise InputError(
            f"{fold.declaration.name} must return Scores of batch × row × unit, {(batch, rows, width)}, not {shape}"
        )
    return part


def _head_list(heads: Sequence[int], count: int) -> list[int]:
    wrong = [head for head in heads if not -count <= head < count]
    if wrong or not heads:
        raise InputError(f"heads={list(heads)} is not possible: the model has {count} heads, counted from 0")
    return [head % count for head in heads]


def _own_value(function: Callable[[Any], Tensor], output: Any, count: int) -> Float[Tensor, "batch"]:
    value = function(output)
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target function must return one number per sample, ({count},), but returned {shape}")
    return value
