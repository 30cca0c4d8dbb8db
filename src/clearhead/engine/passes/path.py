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

from clearhead.capture.attention.tiling import KernelLog
from clearhead.capture.checks.self_test import CallSite, SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.tape import UNIT_ALIGNED_REQUIREMENTS, AttentionCall, Requirements, resolve_requirements
from clearhead.engine.baselines import Baselines
from clearhead.engine.memory_budget import limit_rows
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.passes.norm_inputs import capture_norm_inputs
from clearhead.engine.sampling import PathSampler
from clearhead.engine.target_batch import MethodRun, TargetBatch, run_recorded_pass
from clearhead.methods._path import NoBaseline, PathMethod, PathPoint, PathPointResult
from clearhead.methods.base import MethodScores
from clearhead.targets import Predicted, Target

#: How many numbers the attention maps of points that are run together may hold, and how many rows a batch of them.
MAX_PATH_MAP_ELEMENTS, MAX_PATH_ROWS = 2**27, 128
#: How many units points that are run together may have, where there are no maps.
MAX_PATH_UNITS = 16384
MAP_REQUIREMENTS = resolve_requirements(("attention", "attention_gradient"))


def run_path_passes(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """The input itself, then every point that is wanted, then what the methods make of it."""
    every = [fold for reading in method_runs for fold in _get_path_methods(reading)]
    asks: Requirements = resolve_requirements({"inputs"}.union(*(fold.requires_at_input for fold in every)))
    if any(fold.needs_norm_inputs for fold in every):
        seen = capture_norm_inputs(recorder, batch, self_test)
        for fold in every:
            fold.norm_inputs = {
                layer: one for (stream, layer), one in seen.items() if stream == fold.unit_context.stream
            }
    tape = run_recorded_pass(
        recorder, batch, [r for r in method_runs if not _explains_predicted_class(r)], self_test, asks
    )
    if others := [r for r in method_runs if _explains_predicted_class(r)]:
        run_recorded_pass(recorder, _with_predicted_target(batch), others, self_test, asks)
    way = PathRunner(recorder, batch, tape.inputs or {}, self_test, method_runs)
    tape.inputs = None  # methods are shown the way, and some models cannot say which unit's their pixels are
    wanted: dict[PathPoint, list[PathMethod]] = {}
    for reading in method_runs:
        for fold in _get_path_methods(reading):
            for point in dict.fromkeys(way.canonicalize(point) for point in fold.iter_points()):
                wanted.setdefault(point, []).append(fold)
    by_asks: dict[Requirements, list[PathPoint]] = {}
    for point, folds in wanted.items():
        by_asks.setdefault(frozenset().union(*(fold.requires_on_path for fold in folds)), []).append(point)
    for along, points in by_asks.items():
        for start in range(0, len(points), way.points_per_pass):
            way.run_points(points[start : start + way.points_per_pass], along, wanted)
    tape = batch.to_unit_vectors(tape)
    return [
        _add_completeness_gap(reading, reading.compute_scores(tape), batch.target_values) for reading in method_runs
    ]


def _get_path_methods(reading: MethodRun) -> list[PathMethod]:
    return [fold for fold in reading.per_stream.values() if isinstance(fold, PathMethod)]


def _explains_predicted_class(reading: MethodRun) -> bool:
    return any(fold.of_predicted for fold in _get_path_methods(reading))


def _with_predicted_target(plan: TargetBatch) -> TargetBatch:
    """The same batch, with the class that is predicted as its target."""
    targets = [
        [Target(Predicted(), target.scale)] * plan.targets_per_sample for target in plan.targets[: plan.num_samples]
    ]
    return TargetBatch(plan.adapter, plan.source_samples, targets, plan.seed, plan.tiling)


def _add_completeness_gap(
    reading: MethodRun, parts: dict[str, MethodScores], values: Float[Tensor, "batch"]
) -> dict[str, MethodScores]:
    """How far the scores of all streams together are from what they should add up to, where they should."""
    explained = [fold.attributed_total for fold in _get_path_methods(reading) if fold.attributed_total is not None]
    base = next((fold.base_value for fold in _get_path_methods(reading) if fold.base_value is not None), None)
    if not explained or base is None:
        return parts
    missed = values - base - torch.stack(explained).sum(0)
    gap = compute_completeness_gap(missed, [part.scores for part in parts.values()])
    return {
        stream: replace(part, diagnostics={**(part.diagnostics or {}), "completeness_gap": gap})
        for stream, part in parts.items()
    }


class PathRunner:
    """One batch, its vectors, and the passes at points of their paths."""

    def __init__(
        self,
        recorder: Recorder,
        batch: TargetBatch,
        inputs: Mapping[str, Tensor],
        self_test: SelfTest,
        method_runs: Sequence[MethodRun],
    ) -> None:
        self.recorder, self.batch, self.self_test, self.method_runs = recorder, batch, self_test, method_runs
        self.inputs = {leaf: part.chunk(batch.targets_per_sample)[0] for leaf, part in inputs.items()}
        self.token_inputs = [leaf for leaf in self.inputs if not batch.model_inputs[leaf].is_floating_point()]
        self.baselines = Baselines(batch, self.inputs, self.token_inputs, recorder)
        self.sampler = PathSampler(batch, self.inputs, self.token_inputs)
        self.fixed_targets = [self._fix_classes(i, target) for i, target in enumerate(batch.targets)]
        self.batches_by_point_count: dict[int, TargetBatch] = {}

    def _fix_classes(self, i: int, target: Target) -> Target:
        return (
            target
            if self.batch.class_scores is None
            else target.with_fixed_classes(self.batch.class_scores[i], self.batch.adapter)
        )

    @property
    def points_per_pass(self) -> int:
        """How many points are run at once. A caller's own target may count on the batch: then it is one."""
        plan = self.batch
        if any(target.function is not None for target in plan.targets):
            return 1
        width = {stream: frame.valid_mask.shape[1] for stream, frame in plan.unit_contexts.items()}
        rows = plan.num_samples * plan.targets_per_sample
        if plan.tiling is not None:
            return max(1, min(MAX_PATH_UNITS // (sum(width.values()) * rows), limit_rows(MAX_PATH_ROWS) // rows))
        cells = sum(
            width[place.query_stream] * width[place.key_stream] * place.num_heads for place in self.self_test.call_sites
        )
        return max(1, min(MAX_PATH_MAP_ELEMENTS // max(1, cells * rows), limit_rows(MAX_PATH_ROWS) // rows))

    def canonicalize(self, point: PathPoint) -> PathPoint:
        """The same point in the shortest words, so that methods that want the same share it."""
        return replace(point, stream=None) if len(self.batch.unit_contexts) == 1 else point

    def run_points(
        self,
        points: Sequence[PathPoint],
        requires: Requirements,
        methods_by_point: Mapping[PathPoint, Sequence[PathMethod]],
    ) -> None:
        """One pass at these points, and what it shows to whom."""
        plan, steps = self._get_repeated_batch(len(points)), self.batch.targets_per_sample
        placed = [self._interpolate(point) for point in points]
        vectors = {leaf: torch.cat([vector[leaf] for vector, _, _ in placed]) for leaf in self.inputs}
        factors = {
            stream: torch.cat([scaled.get(stream, _make_ones(self.batch)) for _, _, scaled in placed])
            for stream in {stream for _, _, scaled in placed for stream in scaled}
        }
        shown = [fold for point in points for fold in methods_by_point[point] if requires & UNIT_ALIGNED_REQUIREMENTS]
        places = [
            i
            for i, place in enumerate(self.self_test.call_sites)
            if any(self._receives_call(fold, place) for fold in shown)
        ]

        def show(call: AttentionCall, queries: slice | None = None, sweep: int = 0) -> None:
            gathered = call.to(self.batch.adapter.device)
            for i, point in enumerate(points):
                folds = [fold for fold in methods_by_point[point] if self._receives_call(fold, call)]
                if plan.tiling is not None:  # those that read maps are shown tiles
                    folds = [
                        fold
                        for fold in folds
                        if bool(fold.requires_on_path & MAP_REQUIREMENTS) == (queries is not None)
                    ]
                if folds:
                    own = _select_call_point(gathered, i, steps, len(points))
                    for fold in folds:
                        fold.on_point_call(point, own if fold.heads is None else own.select_heads(fold.heads), queries)

        tiles = plan.tiling
        if tiles is not None:
            tiles = replace(
                tiles,
                on_tile=show,
                tile_passes=int(bool(requires & MAP_REQUIREMENTS)),
                needs_masked_gradients=True,
                kernel_log=KernelLog(),
            )
        with scaled_first_layers(self.recorder, self.self_test, factors):
            tape = self.recorder.run(
                plan.model_inputs,
                plan.compute_target,
                requires,
                show,
                leaves=plan.leaves,
                call_indices=places,
                head_rows=plan.head_rows,
                vectors=vectors,
                tiling=tiles,
            )
        tape.inputs = None
        for reading in self.method_runs:
            if {id(fold) for fold in _get_path_methods(reading)} & {
                id(fold) for point in points for fold in methods_by_point[point]
            }:
                reading.add_kernel_log(tiles)
        tape = plan.to_unit_vectors(tape)
        tape.value = plan.target_values
        ways = {
            leaf: torch.cat([way[leaf] for _, way, _ in placed]).repeat(steps, *(1,) * (part.dim() - 1))
            for leaf, part in self.inputs.items()
        }
        arranged = plan.adapter.to_unit_vectors(ways, plan.truncated_samples) if tape.input_gradient is not None else {}
        for i, point in enumerate(points):
            own_tape = replace(
                tape,
                input_gradient=_select_point_by_name(tape.input_gradient, i, steps, len(points)),
                value=_select_point(tape.value, i, steps, len(points)),
                logits=None,
            )
            step = PathPointResult(point, own_tape, _select_point_by_name(arranged, i, steps, len(points)) or {})
            for fold in methods_by_point[point]:
                fold.on_point(step)

    def _get_repeated_batch(self, points: int) -> TargetBatch:
        """The batch as often as there are points."""
        if points not in self.batches_by_point_count:
            size, steps = self.batch.num_samples, self.batch.targets_per_sample
            targets = [[self.fixed_targets[step * size + i] for step in range(steps)] for i in range(size)]
            given, seed, tiles = self.batch.source_samples * points, self.batch.seed, self.batch.tiling
            self.batches_by_point_count[points] = TargetBatch(self.batch.adapter, given, targets * points, seed, tiles)
            self.batches_by_point_count[points].keep_cpu_copies = False
        return self.batches_by_point_count[points]

    def _receives_call(self, fold: PathMethod, call: AttentionCall | CallSite) -> bool:
        """Whether a method is shown this call: within its stream, the last one or those of its layers."""
        stream = fold.unit_context.stream
        if not fold.requires_on_path & UNIT_ALIGNED_REQUIREMENTS or (call.query_stream, call.key_stream) != (
            stream,
            stream,
        ):
            return False
        last = self.self_test.count_layers(stream, stream) - 1
        return call.layer in fold.unit_context.layers if fold.path_layers == "all" else call.layer == last

    def _interpolate(self, point: PathPoint) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """What each leaf is at a point, its way to the input, and by what the first layer of which stream is scaled."""
        vectors: dict[str, Tensor] = {}
        ways: dict[str, Tensor] = {}
        scaled: dict[str, Tensor] = {}
        along = self._compute_alpha(point)
        in_layers = (
            {stream for leaf in self.token_inputs for stream in self._streams_by_input[leaf]}
            if point.interpolate_at == "layers"
            else set()
        )
        for leaf, x in self.inputs.items():
            if point.stream is not None and point.stream not in self._streams_by_input[leaf]:
                vectors[leaf], ways[leaf] = x, torch.zeros_like(x)
                continue
            noisy = x + self.sampler.sample_noise(point, leaf) if point.noise_std else x
            if self._streams_by_input[leaf] & in_layers:
                vectors[leaf], ways[leaf] = noisy, noisy
                scaled |= dict.fromkeys(self._streams_by_input[leaf] & in_layers, along)
                continue
            baseline = self._get_baseline(point, leaf)
            ways[leaf] = noisy - baseline
            vectors[leaf] = (
                noisy if point.alpha == 1 else baseline + self.sampler.expand_to_rows(along, leaf) * ways[leaf]
            )
        return vectors, ways, scaled

    @property
    def _streams_by_input(self) -> dict[str, set[str]]:
        """Which streams each leaf is part of."""
        if not hasattr(self, "_streams_cache"):
            plan, samples = self.batch, self.batch.truncated_samples[: self.batch.num_samples]
            alone = set(plan.unit_contexts) if len(plan.unit_contexts) == 1 else set()
            self._streams_cache: dict[str, set[str]] = {leaf: alone for leaf in self.inputs if alone}
            for leaf in [] if alone else self.inputs:
                marked = {other: torch.full_like(x, float(other == leaf)) for other, x in self.inputs.items()}
                arranged = plan.adapter.to_unit_vectors(marked, samples)
                self._streams_cache[leaf] = {stream for stream, part in arranged.items() if part.any()}
        return self._streams_cache

    def _compute_alpha(self, point: PathPoint) -> Float[Tensor, "batch"]:
        along = self.sampler.sample_alpha(point) if point.alpha is None else _make_ones(self.batch) * point.alpha
        return along.to(_make_ones(self.batch))

    def _get_baseline(self, point: PathPoint, leaf: str) -> Tensor:
        if isinstance(point.baseline, NoBaseline):
            return torch.zeros_like(self.inputs[leaf])
        if not isinstance(point.baseline, tuple):
            return self.baselines.get(point.baseline, leaf)
        parts = [self.baselines.get(name, leaf) for name in point.baseline]
        which = self.sampler.expand_to_rows(self.sampler.sample_baseline_index(len(parts), point), leaf)
        made = parts[0]
        for number, part in enumerate(parts):
            made = torch.where(which == number, part, made)
        return made


def _make_ones(plan: TargetBatch) -> Float[Tensor, "batch"]:
    readout = plan.readout_weights[next(iter(plan.readout_weights))]
    return torch.ones(plan.num_samples, dtype=readout.dtype, device=readout.device)


def _select_point(part: Tensor | None, i: int, steps: int, points: int) -> Any:
    """What belongs to one point, of target × point × sample."""
    return None if part is None else part.unflatten(0, (steps, points, -1))[:, i].flatten(0, 1)


def _select_point_by_name(parts: dict[str, Tensor] | None, i: int, steps: int, points: int) -> dict[str, Tensor] | None:
    return None if parts is None else {name: _select_point(part, i, steps, points) for name, part in parts.items()}


def _select_call_point(call: AttentionCall, i: int, steps: int, points: int) -> AttentionCall:
    batched = {
        name: _select_point(part, i, steps, points) for name, part in call.iter_tensors() if name != "output_projection"
    }
    return replace(call, **batched)


@contextmanager
def scaled_first_layers(
    recorder: Recorder, self_test: SelfTest, factors: Mapping[str, Float[Tensor, "row"]]
) -> Iterator[None]:
    """Scale what enters the first layer of a stream, row by row: words with their positions, as the layers see them."""
    blocks, thread = recorder.session.topology.layer_of_module if factors else {}, threading.get_ident()
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
                return (_scale_rows(args[0], factor), *args[1:]), kwargs
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            return args, {**kwargs, name: _scale_rows(kwargs[name], factor)}

        return scale

    for stream, factor in factors.items():
        own = [i for i, p in enumerate(self_test.call_sites) if (p.query_stream, p.key_stream) == (stream, stream)]
        name = self_test.call_sites[own[0]].module
        before = sum(place.module == name for place in self_test.call_sites[: own[0]])
        block = blocks[id(recorder.model.get_submodule(name))]
        handles.append(block.register_forward_pre_hook(scaling(factor, before), with_kwargs=True))
    with remove_hooks_on_exit(handles):
        yield


def _scale_rows(hidden: Tensor, factor: Tensor) -> Tensor:
    return hidden * factor.to(hidden).reshape(-1, *(1,) * (hidden.dim() - 1))
