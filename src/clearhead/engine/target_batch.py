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

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import MIN_TILE_ROWS
from clearhead.capture.attention.tiling import KernelLog, TilingConfig
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import HeadRows, Recorder
from clearhead.capture.tape import UNIT_ALIGNED_REQUIREMENTS, AttentionCall, Requirements, Tape
from clearhead.engine.memory_budget import start_budgeted_pass
from clearhead.errors import InputError
from clearhead.methods.base import (
    CROSS_STREAM_REGISTRY,
    METHOD_REGISTRY,
    AttributionMethod,
    CrossStreamMethod,
    Method,
    MethodScores,
    UnitContext,
    resolve_layer_range,
)
from clearhead.targets import Target, compute_class_target_values

#: How many numbers of a map are folded together where maps are whole (1 MiB in float32).
CPU_CACHE_TILE_ELEMENTS = 2**18


class TargetBatch:
    """One batch with its targets, equally many for each sample: what the recorder is called with, and what came out.

    With several targets everything has target × sample as its batch, the first target of all samples first.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        samples: Sequence[Sample],
        targets: Sequence[Sequence[Target]],
        seed: int = 0,
        tiling: TilingConfig | None = None,
    ) -> None:
        self.adapter, self.seed, self.num_samples, self.tiling = adapter, seed, len(samples), tiling
        self.targets_per_sample = len(targets[0])
        self.targets = [own[step] for step in range(self.targets_per_sample) for own in targets]
        self.source_samples = list(samples)
        #: Once for each target. Logits are looked up by these: of rows that `samples` keep the model is not told.
        self.repeated_samples = self.source_samples * self.targets_per_sample
        # each target sees its own part of the sample: what comes after it neither counts nor is looked at
        pairs = zip(self.repeated_samples, self.targets, strict=True)
        self.truncated_samples = [adapter.truncate_to_targets(sample, [target]) for sample, target in pairs]
        start_budgeted_pass(len(self.truncated_samples))
        self.model_inputs = adapter.collate(samples)
        self.leaves = adapter.find_grad_input_names(self.model_inputs)
        self.class_scores: Float[Tensor, "batch label"] | None = None
        self.target_values: Float[Tensor, " batch"] = torch.empty(0)
        #: The same on the CPU, brought there before anything goes back; unless nothing is said of this plan, as of one
        #: of many points.
        self.keep_cpu_copies = True
        self.cpu_logits: Float[Tensor, "batch label"] | None = None
        self.cpu_target_values: list[float] = []
        #: What holds while scores are made of the output, where the subject multiplies to make them.
        self.scoring_context: Callable[[], AbstractContextManager[object]] = nullcontext
        #: Is shown the numbers that are explained (target × sample), and the scores that they are made of, before
        #: anything goes back.
        self.before_backward: Callable[[Tensor, Tensor], None] | None = None

    @property
    def max_units(self) -> int:
        """The units of the longest sample, all its streams together."""
        return max(sum(map(len, sample.axes.values())) for sample in self.source_samples)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The format that methods work in."""
        return torch.float64 if self.adapter.dtype == torch.float64 else torch.float32

    @cached_property
    def dtype_and_device(self) -> dict[str, str]:
        """The model's own format, and where it is."""
        return {"dtype": str(self.adapter.dtype).removeprefix("torch."), "device": str(self.adapter.device)}

    @cached_property
    def readout_weights(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        weights = {
            stream: np.zeros(
                (len(self.truncated_samples), 1, max(len(sample.axes[stream]) for sample in self.truncated_samples))
            )
            for stream in self.truncated_samples[0].axes
        }
        for i, (sample, target) in enumerate(zip(self.truncated_samples, self.targets, strict=True)):
            for stream, rows in self.adapter.find_readouts(sample, target).items():
                weights[stream][i, 0, list(rows)] = list(rows.values())
        return {s: torch.from_numpy(part).to(self.compute_dtype).to(self.adapter.device) for s, part in weights.items()}

    @property
    def head_rows(self) -> HeadRows | None:
        """Which row of the model's head each of several targets comes from, where the subject can say."""
        spoken = (
            None if self.targets_per_sample == 1 else self.adapter.find_head_rows(self.repeated_samples, self.targets)
        )
        if spoken is None:
            return None
        head, rows = spoken
        return HeadRows(head, torch.tensor(rows).unflatten(0, (self.targets_per_sample, self.num_samples)))

    @cached_property
    def fingerprints(self) -> list[str]:
        """What tells one input from another, whatever it is called."""
        own = self.seeds if self.seed == 0 else [sample.derive_seed(0) for sample in self.truncated_samples]
        return [f"{one:014x}" for one in own]

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sample.derive_seed(self.seed) for sample in self.truncated_samples)

    def compute_target(self, output: Any) -> Float[Tensor, "*target batch"]:
        """One number per sample and target; a target of the caller's own sees the whole output."""
        own = {id(target.function): target.function for target in self.targets if target.function is not None}
        seen = self._cast_down(output) if own else output
        computed = {key: _call_target_function(function, seen, self.num_samples) for key, function in own.items()}
        by_class = any(target.function is None for target in self.targets)
        if by_class or getattr(output, "logits", None) is not None:
            with self.scoring_context() if self.adapter.score_is_product else nullcontext():
                self.class_scores = self.adapter.compute_class_scores(output, self.repeated_samples, self.targets)
        number = self._compute_target_values(computed)
        made_of = self.class_scores if getattr(output, "logits", None) is None else output.logits
        if self.before_backward is not None and made_of is not None:
            self.before_backward(number.unflatten(0, (self.targets_per_sample, self.num_samples)), made_of)
        self.target_values = self._cast_down(number.detach())
        self.class_scores = None if self.class_scores is None else self._cast_down(self.class_scores.detach())
        if self.keep_cpu_copies:
            self.cpu_logits = None if self.class_scores is None else self.class_scores.cpu()
            self.cpu_target_values = self.target_values.tolist()
        return (
            number if self.targets_per_sample == 1 else number.unflatten(0, (self.targets_per_sample, self.num_samples))
        )

    def _cast_down(self, part: Any) -> Any:
        """What a pass in float64 put out, in the format that the model has by itself, or near it."""
        if isinstance(part, Tensor):
            return part.to(self.compute_dtype) if part.dtype == torch.float64 else part
        if isinstance(part, Mapping):
            return type(part)(**{name: self._cast_down(one) for name, one in part.items()})
        return tuple(map(self._cast_down, part)) if type(part) is tuple else part

    def _compute_target_values(self, computed: Mapping[int, Tensor]) -> Float[Tensor, " batch"]:
        """The number of each target: those of the caller's own functions, and of classes scale by scale."""
        by_scale: dict[str, list[int]] = {}
        for i, target in enumerate(self.targets):
            by_scale.setdefault("own" if target.function is not None else target.scale, []).append(i)
        parts = [
            torch.stack([computed[id(self.targets[i].function)][i % self.num_samples] for i in places])
            if scale == "own"
            else self._compute_class_values(scale, places)
            for scale, places in by_scale.items()
        ]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([i for places in by_scale.values() for i in places]).argsort()
        return torch.cat(parts)[order.to(parts[0].device)]

    def _compute_class_values(self, scale: str, places: Sequence[int]) -> Float[Tensor, " some"]:
        """All at once; which classes they are about is found on the CPU, where a look costs no waiting for a GPU."""
        if self.adapter.is_regression and scale in ("probability", "log-odds"):
            raise InputError(
                f"the model is a regression model without classes, so it has no {scale}: use scale='logit'"
            )
        assert self.class_scores is not None
        if any(
            type(self.targets[i]).compute_value is not Target.compute_value for i in places
        ):  # a kind of target with its own rule
            rows = (
                self.class_scores.unbind()
            )  # the gradient of a row taken by its number would be a whole tensor of zeros
            return torch.stack([self.targets[i].compute_value(rows[i], self.adapter) for i in places])
        here = self.class_scores.detach().cpu()
        classes = [self.targets[i].find_classes(here[i], self.adapter) for i in places]
        some = self.class_scores if len(places) == len(self.class_scores) else self.class_scores[list(places)]
        return compute_class_target_values(some, classes, scale, self.adapter.multi_label)

    def to_unit_vectors(self, tape: Tape) -> Tape:
        """Embeddings, pixels and the like as one vector per unit."""
        for name in tape.STREAM_FIELDS:
            parts = getattr(tape, name)
            setattr(tape, name, None if parts is None else self.adapter.to_unit_vectors(parts, self.truncated_samples))
        tape.logits = self.class_scores
        tape.truncated_tokens = tuple(sample.num_truncated for sample in self.truncated_samples)
        return tape

    @cached_property
    def unit_contexts(self) -> dict[str, UnitContext]:
        """The coordinates that all methods of this batch share, along each axis."""
        return {stream: self._build_unit_context(stream) for stream in self.truncated_samples[0].axes}

    def _build_unit_context(self, stream: str) -> UnitContext:
        readout, axes = self.readout_weights[stream], tuple(sample.axes[stream] for sample in self.truncated_samples)
        lengths = torch.tensor([len(axis) for axis in axes])
        valid = torch.arange(readout.shape[2]) < lengths[:, None]
        return UnitContext(readout, valid.to(readout.device), self.seeds, axes, stream=stream)


class MethodRun:
    """One method at work on one batch: a fold for each stream, or one across all where streams look at each other."""

    def __init__(self, method: Method, batch: TargetBatch, self_test: SelfTest) -> None:
        self.method, self.requires = method, method.declaration.requires
        self.kernel_logs: list[KernelLog] = []  # what streaming passes did for it, and do when they are asked later
        self.num_heads_by_module = {place.module: place.num_heads for place in self_test.call_sites}
        layers = method.get_option("layers", method.declaration.layers)
        pairs = {(place.query_stream, place.key_stream) for place in self_test.call_sites}
        self.layer_ranges = {pair: resolve_layer_range(layers, self_test.count_layers(*pair)) for pair in pairs}
        frames = {stream: self._adapt_context(frame) for stream, frame in batch.unit_contexts.items()}
        options = method.constructor_kwargs
        self.cross_stream: CrossStreamMethod | None = None
        self.per_stream: dict[str, AttributionMethod] = {}
        if self_test.has_cross_attention and method.name in CROSS_STREAM_REGISTRY:
            modules = {place.module for place in self_test.call_sites}
            self.cross_stream = CROSS_STREAM_REGISTRY[method.name](
                unit_contexts=frames,
                layers=self.layer_ranges,
                residual_towers=frozenset(module for module in modules if batch.adapter.is_residual_tower(module)),
                simultaneous_groups={
                    module: block
                    for module in modules
                    if (block := batch.adapter.find_simultaneous_group(module)) is not None
                },
                **options,
            )
        else:
            self.per_stream = {
                stream: METHOD_REGISTRY[method.name](unit_context=frame, **options) for stream, frame in frames.items()
            }

    def _adapt_context(self, frame: UnitContext) -> UnitContext:
        if self.method.get_option("rows") == "all":
            width = frame.valid_mask.shape[1]
            every = torch.eye(width, dtype=frame.readout.dtype, device=frame.readout.device)
            frame = replace(frame, readout=every.expand(len(frame.valid_mask), width, width))
        return replace(frame, layers=self.layer_ranges.get((frame.stream, frame.stream), range(0)))

    @property
    def any_instance(self) -> AttributionMethod | CrossStreamMethod:
        return self.cross_stream or next(iter(self.per_stream.values()))

    def needs_layer(self, query_stream: str, key_stream: str, layer: int) -> bool:
        return bool(self.requires & UNIT_ALIGNED_REQUIREMENTS) and layer in self.layer_ranges[query_stream, key_stream]

    def process_call(self, call: AttentionCall) -> None:
        if self.needs_layer(call.query_stream, call.key_stream, call.layer):
            self._select_instance(call).process_call(call)

    def _select_instance(self, call: AttentionCall) -> Any:
        """The fold that a call belongs to, with the heads that were chosen."""
        fold = self.cross_stream or self.per_stream[call.query_stream]
        if self.method.get_option("heads") is not None:
            fold.heads = _resolve_heads(self.method.get_option("heads"), self.num_heads_by_module[call.module])
        return fold

    @property
    def supports_tiling(self) -> bool:
        """Whether it needs no whole map: it reads none, or tile by tile, or asks for sums after the pass."""
        if self.method.pass_type not in ("tape", "path"):
            return False
        return not self.requires & {"attention", "attention_gradient"} or self.tile_passes > 0 or self.defers_reductions

    @property
    def tile_passes(self) -> int:
        return max((0 if fold.needs_full_maps else fold.tile_passes for fold in self._instances), default=0)

    @property
    def defers_reductions(self) -> bool:
        return any(fold.defers_reductions for fold in self._instances)

    @property
    def needs_masked_gradients(self) -> bool:
        return any(fold.needs_masked_gradients for fold in self._instances)

    @property
    def _instances(self) -> list[AttributionMethod | CrossStreamMethod]:
        return [*self.per_stream.values()] if self.cross_stream is None else [self.cross_stream]

    def accumulate_tile(self, call: AttentionCall, queries: slice, tile_pass: int) -> None:
        if self.tile_passes and self.needs_layer(call.query_stream, call.key_stream, call.layer):
            self._select_instance(call).accumulate_tile(call, queries, tile_pass)

    def needs_maps(self, call: AttentionCall) -> bool:
        """Whether it wants something of the maps of this call."""
        return bool(self.tile_passes) and self.needs_layer(call.query_stream, call.key_stream, call.layer)

    def add_kernel_log(self, tiling: TilingConfig | None) -> None:
        """A pass was made for it, in tiles or not."""
        if tiling is not None:
            self.kernel_logs.append(tiling.kernel_log)

    @property
    def kernel_name(self) -> str:
        """What the certificate says."""
        return reduce(or_, self.kernel_logs).name if self.kernel_logs else "materialised"

    def request_reduction(self, call: AttentionCall) -> MapReduction | None:
        """The sum of the maps that is enough, if one is."""
        fold = self._select_instance(call)
        wanted: MapReduction | None = fold.request_reduction(call)
        return None if wanted is None else replace(wanted, heads=fold.heads)

    def receive_reduction(self, call: AttentionCall, reduced: Tensor) -> None:
        self._select_instance(call).receive_reduction(call, reduced)

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        if self.cross_stream is not None:
            return {
                stream: _check_scores(part, self.cross_stream, stream)
                for stream, part in self.cross_stream.compute_scores(tape).items()
            }
        return {
            stream: _check_scores(fold.compute_scores(tape), fold, stream) for stream, fold in self.per_stream.items()
        }


def run_recorded_pass(
    recorder: Recorder,
    batch: TargetBatch,
    method_runs: Sequence[MethodRun],
    self_test: SelfTest,
    requires: Requirements,
) -> Tape:
    """One pass over the batch, whose calls all methods are handed that want them, or tiles of them."""
    places = [
        i
        for i, place in enumerate(self_test.call_sites)
        if any(reading.needs_layer(place.query_stream, place.key_stream, place.layer) for reading in method_runs)
    ]
    device = batch.adapter.device

    def gathered(call: AttentionCall) -> AttentionCall:
        # a model may be spread over several devices: what it left on each is brought together
        return call if all(part.device == device for _, part in call.iter_tensors()) else call.to(device)

    def visit(call: AttentionCall) -> None:
        here = gathered(call)
        for sweep, queries in _iter_cache_sized_tiles(here, sweeps) if tiles is None else ():
            part = here.select_queries(queries)
            for reading in method_runs:
                reading.accumulate_tile(part, queries, sweep)
        for reading in method_runs:
            reading.process_call(here)

    def fold(call: AttentionCall, queries: slice, sweep: int) -> None:
        here = gathered(call)
        for reading in method_runs:
            reading.accumulate_tile(here, queries, sweep)

    def reductions(call: AttentionCall) -> list[MapReduction] | None:
        found = [reading.request_reduction(call) for reading in method_runs if reading.needs_maps(call)]
        return None if None in found else [one for one in found if one is not None]

    def reduced(call: AttentionCall, sums: list[Tensor]) -> None:
        wanting = [reading for reading in method_runs if reading.needs_maps(call)]
        for reading, total in zip(wanting, sums, strict=True):
            reading.receive_reduction(call, total.to(device))

    tiles = None
    sweeps = max((reading.tile_passes for reading in method_runs), default=0)
    if batch.tiling is not None:
        tiles = replace(
            batch.tiling,
            on_tile=fold,
            tile_passes=sweeps,
            needs_masked_gradients=any(reading.needs_masked_gradients for reading in method_runs),
            request_reductions=reductions,
            on_reduced=reduced,
            defers_reductions=any(reading.defers_reductions for reading in method_runs),
            kernel_log=KernelLog(),
        )
    how: dict[str, Any] = {
        "leaves": batch.leaves,
        "call_indices": places,
        "head_rows": batch.head_rows,
        "tiling": tiles,
    }
    kept = not all(reading.supports_tiling for reading in method_runs)
    tape = recorder.run(batch.model_inputs, batch.compute_target, requires, visit, **how, keep_maps=kept)
    for reading in method_runs:
        reading.add_kernel_log(tiles)
    return tape


def _iter_cache_sized_tiles(call: AttentionCall, sweeps: int) -> Iterator[tuple[int, slice]]:
    """The queries of each tile of maps that are whole, sweep by sweep: what is made of a tile stays in a CPU's cache.

    None where nothing is gained: what is no tile yet is then one.
    """
    maps = call.attention
    if maps is None or maps.device.type != "cpu" or maps.numel() <= 2 * CPU_CACHE_TILE_ELEMENTS:
        return
    count = maps.shape[2]
    size = max(MIN_TILE_ROWS, CPU_CACHE_TILE_ELEMENTS * count // maps.numel())
    for sweep in range(sweeps):
        for start in range(0, count, size):
            yield sweep, slice(start, min(start + size, count))


def _check_scores(part: MethodScores, fold: AttributionMethod | CrossStreamMethod, stream: str) -> MethodScores:
    """A method from outside may return anything."""
    frame = fold.unit_contexts[stream]
    batch, width = frame.valid_mask.shape
    rows = frame.readout.shape[1]
    shape = tuple(getattr(getattr(part, "scores", None), "shape", ()))
    if shape not in ((batch, rows, width), (batch, 1, width)):
        raise InputError(
            f"{fold.declaration.name} must return Scores of batch × row × unit, {(batch, rows, width)}, not {shape}"
        )
    return part


def _resolve_heads(heads: Sequence[int], count: int) -> list[int]:
    wrong = [head for head in heads if not -count <= head < count]
    if wrong or not heads:
        raise InputError(f"heads={list(heads)} is not valid: the model has {count} heads, counted from 0")
    return [head % count for head in heads]


def _call_target_function(function: Callable[[Any], Tensor], output: Any, count: int) -> Float[Tensor, "batch"]:
    value = function(output)
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target function must return one number per sample, ({count},), but returned {shape}")
    return value
