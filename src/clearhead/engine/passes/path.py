"""Passes at points between a baseline and the input, or at noisy inputs: as many points at once as memory allows.

The explained class is that of the input itself at every point. Points that several methods need are run once.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import KernelLog
from clearhead.capture.checks.self_test import CallSite, SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.tape import CALL_REQUIREMENTS, AttentionCall, Requirements, Tape, resolve_requirements
from clearhead.engine.baselines import Baselines
from clearhead.engine.memory_budget import limit_rows, start_budgeted_pass
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.passes.clean import run_clean_pass
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.passes.norm_inputs import captured_norm_inputs
from clearhead.engine.sampling import PathSampler
from clearhead.engine.target_batch import TargetBatch, TargetFunction
from clearhead.methods._path import NoBaseline, PathMethod, PathPoint, PathPointResult
from clearhead.methods.base import MethodScores
from clearhead.methods.pass_type import PassType
from clearhead.targets import Predicted, Target

#: Largest number of elements of the attention maps of all points of one pass.
MAX_PATH_MAP_ELEMENTS = 2**27
#: Largest number of rows (points × samples × targets) of one pass.
MAX_PATH_ROWS = 128
#: Largest number of units of one pass that materialises no attention maps.
MAX_PATH_UNITS = 16384
MAP_REQUIREMENTS = resolve_requirements(("attention", "attention_gradient"))


class PathStrategy(PassStrategy):
    """Methods that evaluate the model at points of a path."""

    pass_type = PassType.PATH
    uses_clean_pass = True
    supports_tiling = True

    def get_clean_requirements(self, method_run: MethodRun) -> Requirements:
        """The inputs, and what a method requires at the input itself for the target of the batch."""
        requires = {"inputs"}
        for instance in _get_path_methods(method_run):
            if not instance.of_predicted:
                requires |= instance.requires_at_input
        return resolve_requirements(requires)

    def during_clean_pass(
        self, context: PassContext, method_runs: Sequence[MethodRun]
    ) -> AbstractContextManager[object]:
        """Capture the inputs of norms for the methods that need them."""
        methods = [method for run in method_runs for method in _get_path_methods(run) if method.needs_norm_inputs]
        return captured_norm_inputs(context, methods) if methods else nullcontext()

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """The points, and a pass for the predicted class, if a method needs it in addition to the target."""
        counts = []
        predicted_runs = _select_predicted_runs(method_runs)
        if predicted_runs:
            requires = _get_requirements_at_input(predicted_runs)
            counts.append(PassCount("predicted class", predicted_runs, 1, 1, context.batch.num_samples, requires))
        points_per_pass = compute_points_per_pass(context, method_runs)
        methods_by_point = _assign_points(context.batch, method_runs)
        for requires, points in _group_points(context.batch, method_runs).items():
            receiver_ids = {id(method) for point in points for method in methods_by_point[point]}
            counts.append(
                PassCount(
                    f"{len(points)} points",
                    [run for run in method_runs if receiver_ids & set(map(id, run.instances))],
                    forward=-(-len(points) // points_per_pass),
                    backward=-(-len(points) // points_per_pass),
                    rows=min(len(points), points_per_pass) * context.batch.num_samples,
                    requires=requires,
                    num_inputs=len(points) * context.batch.num_samples,
                )
            )
        return counts

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Run all points of all methods."""
        assert clean_pass is not None
        predicted_runs = _select_predicted_runs(method_runs)
        if predicted_runs:
            predicted_context = replace(context, batch=_with_predicted_targets(context.batch))
            run_clean_pass(predicted_context, predicted_runs, _get_requirements_at_input(predicted_runs))
        runner = PathRunner(context, clean_pass, method_runs)
        points_per_pass = compute_points_per_pass(context, method_runs)
        for requires, points in _group_points(context.batch, method_runs).items():
            for start in range(0, len(points), points_per_pass):
                runner.run_points(points[start : start + points_per_pass], requires)
        requires = _get_requirements_at_input(method_runs)
        tape = context.batch.to_unit_vectors(clean_pass.tape.select(requires))
        return [
            MethodResult(
                _add_completeness_gap(method_run, method_run.compute_scores(tape), clean_pass.values.values),
                clean_pass.values,
            )
            for method_run in method_runs
        ]


def _get_path_methods(method_run: MethodRun) -> list[PathMethod]:
    return [instance for instance in method_run.per_stream.values() if isinstance(instance, PathMethod)]


def _select_predicted_runs(method_runs: Sequence[MethodRun]) -> list[MethodRun]:
    """The methods whose tape of the input itself is that of the predicted class."""
    return [run for run in method_runs if any(instance.of_predicted for instance in _get_path_methods(run))]


def _get_requirements_at_input(method_runs: Sequence[MethodRun]) -> Requirements:
    """What methods require at the input itself."""
    requirements = (instance.requires_at_input for run in method_runs for instance in _get_path_methods(run))
    return resolve_requirements(frozenset().union(*requirements))


def _with_predicted_targets(batch: TargetBatch) -> TargetBatch:
    """The same batch with the predicted class as its target."""
    targets = [
        [Target(Predicted(), sample_targets[0].scale)] * batch.targets_per_sample
        for sample_targets in batch.targets_by_sample
    ]
    return replace(batch, targets_by_sample=targets)


def _canonicalize(batch: TargetBatch, point: PathPoint) -> PathPoint:
    """The same point in one form, so that methods that need the same point share it."""
    return replace(point, stream=None) if len(batch.unit_contexts) == 1 else point


def _assign_points(batch: TargetBatch, method_runs: Sequence[MethodRun]) -> dict[PathPoint, list[PathMethod]]:
    """Every point once, with the methods that need it."""
    methods_by_point: dict[PathPoint, list[PathMethod]] = {}
    for method_run in method_runs:
        for instance in _get_path_methods(method_run):
            for point in dict.fromkeys(_canonicalize(batch, point) for point in instance.iter_points()):
                methods_by_point.setdefault(point, []).append(instance)
    return methods_by_point


def _group_points(batch: TargetBatch, method_runs: Sequence[MethodRun]) -> dict[Requirements, list[PathPoint]]:
    """The points by what must be recorded at them."""
    groups: dict[Requirements, list[PathPoint]] = {}
    for point, instances in _assign_points(batch, method_runs).items():
        requires = frozenset().union(*(instance.requires_on_path for instance in instances))
        groups.setdefault(requires, []).append(point)
    return groups


def compute_points_per_pass(context: PassContext, method_runs: Sequence[MethodRun]) -> int:
    """How many points one pass evaluates. A function of the caller may depend on the batch size: then it is one."""
    batch = context.batch
    if any(target.function is not None for target in batch.targets):
        return 1
    num_units = {stream: unit_context.valid_mask.shape[1] for stream, unit_context in batch.unit_contexts.items()}
    max_points = limit_rows(MAX_PATH_ROWS) // batch.num_rows
    on_path = (instance.requires_on_path for run in method_runs for instance in _get_path_methods(run))
    if context.tiling is not None or not frozenset().union(*on_path) & CALL_REQUIREMENTS:
        return max(1, min(MAX_PATH_UNITS // (sum(num_units.values()) * batch.num_rows), max_points))
    map_elements = sum(
        num_units[site.query_stream] * num_units[site.key_stream] * site.num_heads
        for site in context.self_test.call_sites
    )
    return max(1, min(MAX_PATH_MAP_ELEMENTS // max(1, map_elements * batch.num_rows), max_points))


def _add_completeness_gap(
    method_run: MethodRun, scores_by_stream: dict[str, MethodScores], values: Float[Tensor, "batch"]
) -> dict[str, MethodScores]:
    """Add the distance between the sum of all scores and its expected value, for methods that are complete."""
    instances = _get_path_methods(method_run)
    totals = [instance.attributed_total for instance in instances if instance.attributed_total is not None]
    base_value = next((instance.base_value for instance in instances if instance.base_value is not None), None)
    if not totals or base_value is None:
        return scores_by_stream
    residual = values - base_value - torch.stack(totals).sum(0)
    gap = compute_completeness_gap(residual, [scores.scores for scores in scores_by_stream.values()])
    return {
        stream: replace(scores, diagnostics={**(scores.diagnostics or {}), "completeness_gap": gap})
        for stream, scores in scores_by_stream.items()
    }


@dataclass(frozen=True)
class _InterpolatedPoint:
    """The inputs at one point.

    Attributes:
        vectors: The vectors of each leaf.
        deltas: x + ε − x′ of each leaf.
        layer_factors: For streams whose first layer input is scaled: α of each sample.
    """

    vectors: dict[str, Tensor]
    deltas: dict[str, Tensor]
    layer_factors: dict[str, Float[Tensor, "batch"]]


class PathRunner:
    """Runs the model at points of the paths of one batch.

    Args:
        context: The batch, and how to run it.
        clean_pass: The clean pass, with the inputs of the model.
        method_runs: The methods.
    """

    def __init__(self, context: PassContext, clean_pass: CleanPass, method_runs: Sequence[MethodRun]) -> None:
        self.context = context
        self.recorder = context.recorder
        self.batch = batch = context.batch
        self.method_runs = method_runs
        self.methods_by_point = _assign_points(batch, method_runs)
        inputs = clean_pass.tape.inputs or {}
        self.inputs = {leaf: vectors.chunk(batch.targets_per_sample)[0] for leaf, vectors in inputs.items()}
        self.token_inputs = [leaf for leaf in self.inputs if not batch.model_inputs[leaf].is_floating_point()]
        self.baselines = Baselines(batch, self.inputs, self.token_inputs, context.recorder)
        self.sampler = PathSampler(batch, self.inputs, self.token_inputs)
        self.fixed_targets = _fix_classes(batch, clean_pass)
        self._repeated_batches: dict[int, TargetBatch] = {}

    def run_points(self, points: Sequence[PathPoint], requires: Requirements) -> None:
        """Run one pass at several points, and hand the results to the methods that need them."""
        num_points = len(points)
        batch = self._repeat_batch(num_points)
        start_budgeted_pass(batch.num_rows)
        interpolated = [self._interpolate(point) for point in points]
        vectors = {leaf: torch.cat([point.vectors[leaf] for point in interpolated]) for leaf in self.inputs}
        ones = self._make_ones()
        streams = {stream for point in interpolated for stream in point.layer_factors}
        factors = {
            stream: torch.cat([point.layer_factors.get(stream, ones) for point in interpolated]) for stream in streams
        }
        receivers = [method for point in points for method in self.methods_by_point[point]]
        call_indices = [
            i
            for i, site in enumerate(self.context.self_test.call_sites)
            if any(self._receives_call(method, site) for method in receivers)
        ]

        def on_call(call: AttentionCall, queries: slice | None = None, tile_pass: int = 0) -> None:
            call = call.to(batch.adapter.device)
            for i, point in enumerate(points):
                methods = [method for method in self.methods_by_point[point] if self._receives_call(method, call)]
                if self.context.tiling is not None:  # methods that read maps receive tiles
                    methods = [
                        method
                        for method in methods
                        if bool(method.requires_on_path & MAP_REQUIREMENTS) == (queries is not None)
                    ]
                if methods:
                    point_call = _select_call_point(call, i, batch.targets_per_sample, num_points)
                    for method in methods:
                        selected = point_call if method.heads is None else point_call.select_heads(method.heads)
                        method.on_point_call(point, selected, queries)

        tiling = self.context.tiling
        if tiling is not None:
            tiling = replace(
                tiling,
                on_tile=on_call,
                tile_passes=int(bool(requires & MAP_REQUIREMENTS)),
                needs_masked_gradients=True,
                kernel_log=KernelLog(),
            )
        target_function = TargetFunction(batch, copies_to_cpu=False)
        with scaled_first_layers(self.recorder, self.context.self_test, factors):
            tape = self.recorder.run(
                batch.model_inputs,
                target_function,
                requires,
                on_call,
                leaves=batch.leaves,
                call_indices=call_indices,
                head_rows=batch.head_rows,
                vectors=vectors,
                tiling=tiling,
            )
        receiver_ids = {id(method) for point in points for method in self.methods_by_point[point]}
        for method_run in self.method_runs:
            if receiver_ids & set(map(id, method_run.instances)):
                method_run.add_pass(requires, None if tiling is None else tiling.kernel_log)
        tape.inputs = None
        tape = batch.to_unit_vectors(tape)
        tape.value = target_function.result.values
        self._hand_over(points, interpolated, tape, batch)

    def _hand_over(
        self,
        points: Sequence[PathPoint],
        interpolated: Sequence[_InterpolatedPoint],
        tape: Tape,
        batch: TargetBatch,
    ) -> None:
        """Split the tape of a pass by points, and hand each to the methods that need it."""
        steps = batch.targets_per_sample
        unit_deltas: dict[str, Tensor] = {}
        if tape.input_gradient is not None:
            deltas = {
                leaf: torch.cat([point.deltas[leaf] for point in interpolated]).repeat(steps, *(1,) * (x.dim() - 1))
                for leaf, x in self.inputs.items()
            }
            unit_deltas = batch.adapter.to_unit_vectors(deltas, batch.truncated_samples)
        for i, point in enumerate(points):
            point_tape = Tape(
                input_gradient=_select_point_by_name(tape.input_gradient, i, steps, len(points)),
                value=_select_point(tape.value, i, steps, len(points)),
                truncated_tokens=tape.truncated_tokens,
            )
            result = PathPointResult(point, point_tape, _select_point_by_name(unit_deltas, i, steps, len(points)) or {})
            for method in self.methods_by_point[point]:
                method.on_point(result)

    def _repeat_batch(self, num_points: int) -> TargetBatch:
        """The batch repeated for each point, with the explained classes fixed."""
        if num_points not in self._repeated_batches:
            self._repeated_batches[num_points] = TargetBatch(
                self.batch.adapter, [*self.batch.samples] * num_points, self.fixed_targets * num_points, self.batch.seed
            )
        return self._repeated_batches[num_points]

    def _receives_call(self, method: PathMethod, call: AttentionCall | CallSite) -> bool:
        """Whether a method processes this call: of its stream, the last one or those of its layers."""
        stream = method.unit_context.stream
        reads_calls = bool(method.requires_on_path & CALL_REQUIREMENTS)
        if not reads_calls or (call.query_stream, call.key_stream) != (stream, stream):
            return False
        if method.path_layers == "all":
            return call.layer in method.unit_context.layers
        return call.layer == self.context.self_test.count_layers(stream, stream) - 1

    def _interpolate(self, point: PathPoint) -> _InterpolatedPoint:
        """Compute the inputs at a point."""
        vectors: dict[str, Tensor] = {}
        deltas: dict[str, Tensor] = {}
        layer_factors: dict[str, Tensor] = {}
        alpha = self._compute_alpha(point)
        layer_streams: set[str] = set()
        if point.interpolate_at == "layers":
            layer_streams = {stream for leaf in self.token_inputs for stream in self._streams_by_input[leaf]}
        for leaf, x in self.inputs.items():
            streams = self._streams_by_input[leaf]
            if point.stream is not None and point.stream not in streams:
                vectors[leaf] = x
                deltas[leaf] = torch.zeros_like(x)
                continue
            noisy = x + self.sampler.sample_noise(point, leaf) if point.noise_std else x
            if streams & layer_streams:
                vectors[leaf] = deltas[leaf] = noisy
                layer_factors |= dict.fromkeys(streams & layer_streams, alpha)
                continue
            baseline = self._get_baseline(point, leaf)
            deltas[leaf] = noisy - baseline
            vectors[leaf] = noisy
            if point.alpha != 1:
                vectors[leaf] = baseline + self.sampler.expand_to_rows(alpha, leaf) * deltas[leaf]
        return _InterpolatedPoint(vectors, deltas, layer_factors)

    @cached_property
    def _streams_by_input(self) -> dict[str, set[str]]:
        """The streams that each leaf is part of."""
        batch = self.batch
        if len(batch.unit_contexts) == 1:
            return {leaf: set(batch.unit_contexts) for leaf in self.inputs}
        streams: dict[str, set[str]] = {}
        for leaf in self.inputs:
            indicators = {other: torch.full_like(x, float(other == leaf)) for other, x in self.inputs.items()}
            unit_vectors = batch.adapter.to_unit_vectors(indicators, batch.truncated_samples[: batch.num_samples])
            streams[leaf] = {stream for stream, indicator in unit_vectors.items() if indicator.any()}
        return streams

    def _compute_alpha(self, point: PathPoint) -> Float[Tensor, "batch"]:
        """α of each sample."""
        ones = self._make_ones()
        if point.alpha is not None:
            return ones * point.alpha
        return self.sampler.sample_alpha(point).to(ones)

    def _get_baseline(self, point: PathPoint, leaf: str) -> Tensor:
        """x′ of one leaf."""
        if isinstance(point.baseline, NoBaseline):
            return torch.zeros_like(self.inputs[leaf])
        if not isinstance(point.baseline, tuple):
            return self.baselines.get(point.baseline, leaf)
        baselines = [self.baselines.get(name, leaf) for name in point.baseline]
        indices = self.sampler.expand_to_rows(self.sampler.sample_baseline_index(len(baselines), point), leaf)
        selected = baselines[0]
        for index, baseline in enumerate(baselines):
            selected = torch.where(indices == index, baseline, selected)
        return selected

    def _make_ones(self) -> Float[Tensor, "batch"]:
        readout = next(iter(self.batch.readout_weights.values()))
        return torch.ones(self.batch.num_samples, dtype=readout.dtype, device=readout.device)


def _fix_classes(batch: TargetBatch, clean_pass: CleanPass) -> list[list[Target]]:
    """The targets of each sample, with the classes that they select at the input itself."""
    class_scores = clean_pass.values.class_scores
    if class_scores is None:
        return [list(targets) for targets in batch.targets_by_sample]
    fixed = [
        target.with_fixed_classes(scores, batch.adapter)
        for target, scores in zip(batch.targets, class_scores, strict=True)
    ]
    return [fixed[i :: batch.num_samples] for i in range(batch.num_samples)]


def _select_point(tensor: Tensor | None, i: int, steps: int, points: int) -> Any:
    """The rows of one point, of target × point × sample."""
    return None if tensor is None else tensor.unflatten(0, (steps, points, -1))[:, i].flatten(0, 1)


def _select_point_by_name(
    tensors: dict[str, Tensor] | None, i: int, steps: int, points: int
) -> dict[str, Tensor] | None:
    if tensors is None:
        return None
    return {name: _select_point(tensor, i, steps, points) for name, tensor in tensors.items()}


def _select_call_point(call: AttentionCall, i: int, steps: int, points: int) -> AttentionCall:
    batched = {
        name: _select_point(tensor, i, steps, points)
        for name, tensor in call.iter_tensors()
        if name != "output_projection"
    }
    return replace(call, **batched)


@contextmanager
def scaled_first_layers(
    recorder: Recorder, self_test: SelfTest, factors: Mapping[str, Float[Tensor, "row"]]
) -> Iterator[None]:
    """Inside the `with`, the input of each stream's first layer is scaled, row by row: embeddings with positions."""
    layer_of_module = recorder.session.topology.layer_of_module if factors else {}
    thread_id = threading.get_ident()
    handles = []

    def make_scale_hook(factor: Tensor, previous_runs: int) -> Any:
        remaining = [previous_runs]  # a layer that is shared, or reads two texts, runs once per stream

        def scale(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != thread_id:
                return None
            remaining[0] -= 1
            if remaining[0] != -1:
                return None
            if args:
                return (_scale_rows(args[0], factor), *args[1:]), kwargs
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            return args, {**kwargs, name: _scale_rows(kwargs[name], factor)}

        return scale

    for stream, factor in factors.items():
        sites = self_test.call_sites
        first = next(i for i, site in enumerate(sites) if (site.query_stream, site.key_stream) == (stream, stream))
        module_name = sites[first].module
        previous_runs = sum(site.module == module_name for site in sites[:first])
        layer = layer_of_module[id(recorder.model.get_submodule(module_name))]
        handles.append(layer.register_forward_pre_hook(make_scale_hook(factor, previous_runs), with_kwargs=True))
    with remove_hooks_on_exit(handles):
        yield


def _scale_rows(hidden: Tensor, factor: Tensor) -> Tensor:
    return hidden * factor.to(hidden).reshape(-1, *(1,) * (hidden.dim() - 1))
