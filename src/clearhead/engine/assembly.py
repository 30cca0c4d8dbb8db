"""Assembles explanations: scores of the passes, the target, the prediction, the certificate and the provenance."""

import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import clearhead
from clearhead.adapters.base import InputOptions, ModelAdapter
from clearhead.capture.checks.self_test import SelfTest
from clearhead.engine.combination import MethodSelection
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import ClearheadWarning
from clearhead.explanation.degenerate_scores import find_degenerate_scores, find_measured_problems
from clearhead.explanation.explanation import Explanation, compute_intervals
from clearhead.explanation.multi_stream import AnyExplanation, MultiStreamExplanation
from clearhead.methods.base import MethodScores
from clearhead.profiles import Profile
from clearhead.request import ComputeOptions
from clearhead.sample import Sample
from clearhead.targets import compute_probabilities
from clearhead.units import POOLING_QUERY, Units

#: The largest number of units whose covariance is kept, as it grows with their square.
MAX_COVARIANCE_UNITS = 256


@dataclass
class BatchRequest:
    """The methods and options of one call of `explain`, which are the same for all its batches.

    Attributes:
        selection: The methods, with the options of the call and of the profile, and those that are run for them.
        input_options: How inputs are read.
        compute_options: How passes are run.
        per: "head" to keep the contribution of every head.
        profile: An author's settings.
        overridden_target: The target of the call, if the profile's author always explains another one.
        readout_checks: Whether the read-out rows influence the target, by the id of the target's function (of None for
            classes).
    """

    selection: MethodSelection
    input_options: InputOptions
    compute_options: ComputeOptions
    per: str | None = None
    profile: Profile | None = None
    overridden_target: Any = None
    readout_checks: dict[int, bool] = field(default_factory=dict)

    @property
    def explicit_input_options(self) -> dict[str, Any]:
        """The input options that differ from their defaults, for the provenance."""
        options = self.input_options
        is_default_count = options.max_new_tokens == InputOptions.max_new_tokens
        values = {
            "max_length": options.max_length,
            "truncation_side": options.truncation_side,
            "answer": options.continuation if isinstance(options.continuation, str) else None,
            "max_new_tokens": None if is_default_count else options.max_new_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class PassResult:
    """The results of the passes over one batch: for each method, the scores by stream, on the model's device.

    All of them move to the CPU together, because a transfer per sample would wait for the GPU each time.

    Attributes:
        batch: The batch.
        method_runs: The methods.
        results: The scores and target values of each method.
        keep_head_scores: Whether to keep the contributions of heads, which are large.
    """

    batch: TargetBatch
    method_runs: list[MethodRun]
    results: list[MethodResult]
    keep_head_scores: bool = False

    def __post_init__(self) -> None:
        self.is_on_cpu = False
        if not self.keep_head_scores:
            self.results = [
                replace(result, scores={s: replace(scores, per_head=None) for s, scores in result.scores.items()})
                for result in self.results
            ]

    def move_to_cpu(self) -> None:
        """Move the scores to the CPU, and free them on the GPU. This waits for the GPU."""
        self.results = [
            replace(result, scores={stream: scores.cpu() for stream, scores in result.scores.items()})
            for result in self.results
        ]
        self.is_on_cpu = True

    @property
    def cpu_scores(self) -> list[dict[str, MethodScores]]:
        """The scores of each method by stream, on the CPU."""
        if not self.is_on_cpu:
            self.move_to_cpu()
        return [result.scores for result in self.results]

    @cached_property
    def readout_weights(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        """The weights of the read-out rows by stream, on the CPU."""
        return {stream: weights.cpu() for stream, weights in self.batch.readout_weights.items()}


@dataclass
class TargetResult:
    """One target of one sample, as one method explains it.

    Attributes:
        pass_result: The results of the batch.
        batch_index: The row of the sample and target in the batch.
        method_index: The index of the method.
    """

    pass_result: PassResult
    batch_index: int
    method_index: int

    @property
    def batch(self) -> TargetBatch:
        """The batch that the target's pass ran on."""
        return self.pass_result.batch

    @property
    def method_run(self) -> MethodRun:
        """The method that explains the target, with what it recorded."""
        return self.pass_result.method_runs[self.method_index]

    @property
    def sample(self) -> Sample:
        """The sample, truncated to its targets."""
        return self.batch.truncated_samples[self.batch_index]

    @property
    def scores(self) -> dict[str, MethodScores]:
        """The scores of the whole batch by stream, on the CPU."""
        return self.pass_result.cpu_scores[self.method_index]

    @property
    def class_scores(self) -> Float[Tensor, "label"] | None:
        """The scores of the classes, on the CPU."""
        class_scores = self.pass_result.results[self.method_index].values.cpu_class_scores
        return None if class_scores is None else class_scores[self.batch_index]

    @cached_property
    def description(self) -> dict[str, Any]:
        """The description of the target, with its value."""
        target = self.batch.targets[self.batch_index]
        value = self.pass_result.results[self.method_index].values.cpu_values[self.batch_index]
        num_masks = len(self.sample.mask_positions)
        description = target.describe(self.class_scores, self.batch.adapter, value, num_masks=num_masks)
        return self.batch.adapter.extend_target_description(self.sample, target, description)


def assemble_explanations(
    samples: Sequence[Sample],
    target_counts: Sequence[int],
    pass_results: Sequence[PassResult],
    request: BatchRequest,
    self_test: SelfTest,
) -> list[list[AnyExplanation]]:
    """Assemble the explanations of a batch, each of all targets of one sample by one method.

    Metadata that need no scores are built first, while a GPU may still be computing these.

    Args:
        samples: The samples.
        target_counts: The number of targets of each sample.
        pass_results: The results, one for each chunk of targets.
        request: The methods and options of the call.
        self_test: The result of the recorder's self-test.

    Returns:
        For each sample, one explanation per method.
    """
    method_indices = range(len(request.selection.requested))
    results = [
        [_collect_target_results(pass_results, i, m, count) for m in method_indices]
        for i, count in enumerate(target_counts)
    ]
    metadata = [
        [_build_metadata(target_results, request, self_test) for target_results in sample_results]
        for sample_results in results
    ]
    return [
        [_build_explanation(sample, results[i][m], metadata[i][m], request) for m in method_indices]
        for i, sample in enumerate(samples)
    ]


def _collect_target_results(
    pass_results: Sequence[PassResult], sample_index: int, method_index: int, count: int
) -> list[TargetResult]:
    """The first `count` targets of a sample; a sample with fewer targets than others repeats its last one."""
    return [
        TargetResult(result, step * result.batch.num_samples + sample_index, method_index)
        for result in pass_results
        for step in range(result.batch.targets_per_sample)
    ][:count]


def _build_metadata(
    target_results: Sequence[TargetResult], request: BatchRequest, self_test: SelfTest
) -> dict[str, Any]:
    """The fields of an explanation that need no scores."""
    first = target_results[0]
    adapter = first.batch.adapter
    is_single = len(target_results) == 1
    return {
        "method": str(first.method_run.method),
        "target": _describe_targets(target_results, adapter),
        "prediction": _describe_prediction(first.class_scores, adapter) if is_single else {},
        "certificate": _build_certificate(first, request, self_test),
        "provenance": _build_provenance(target_results[-1], request) | _collect_resolved_options(first),
        "steps": None if is_single else tuple(result.description["name"] for result in target_results),
    }


def _build_explanation(
    sample: Sample, target_results: Sequence[TargetResult], metadata: dict[str, Any], request: BatchRequest
) -> AnyExplanation:
    """One explanation, or one for each stream of the model."""
    certificate = metadata["certificate"] | _collect_diagnostics(target_results)
    metadata = {**metadata, "certificate": certificate}
    stream_fields: list[dict[str, Any]] = []
    for stream, axis in sample.axes.items():
        assembler = _StreamAssembler(stream, len(axis), target_results, request)
        for units, indexer in zip(axis.unit_groups, axis.indexers, strict=True):
            if units.kind == POOLING_QUERY:  # learned by the model, no part of the input
                continue
            image = sample.unrendered_image if units.boxes is not None else None
            arrays = assembler.build_arrays(units, indexer)
            if request.profile is None:  # authors leave some units without a score
                _warn_if_not_finite(arrays["scores"], metadata)
            stream_fields.append({**metadata, **arrays, "units": units, "image": image})
    _add_warnings(stream_fields)
    streams = {fields["units"].stream: Explanation(**fields) for fields in stream_fields}
    return next(iter(streams.values())) if len(streams) == 1 else MultiStreamExplanation(streams)


def _add_warnings(stream_fields: Sequence[dict[str, Any]]) -> None:
    """Add to each certificate the warnings about the scores of the stream, and about the passes of all streams."""
    first = stream_fields[0]
    expected_sum = None
    largest_score = None
    if first["base_value"] is not None and first["provenance"]["profile"] is None:  # authors rescale the scores
        expected_sum = first["target"]["value"] - first["base_value"]
        largest_score = max(float(np.abs(fields["scores"]).max(initial=0)) for fields in stream_fields)
    about_passes = find_measured_problems(
        first["certificate"].get("checks", {}), first["provenance"]["method"], expected_sum, largest_score
    )
    for fields in stream_fields:
        certificate = fields["certificate"]
        about_scores = find_degenerate_scores(
            fields["scores"], fields["units"], fields["target"], certificate, fields["provenance"]
        )
        fields["certificate"] = {**certificate, "warnings": about_scores + about_passes}


def _warn_if_not_finite(scores: np.ndarray, metadata: dict[str, Any]) -> None:
    """Warn of NaN and infinity: gradients can exceed the range of float16 where the model's output does not."""
    count = int((~np.isfinite(scores)).sum())
    if count:
        dtype = metadata["certificate"]["dtype"]
        message = (
            f"{count} of {scores.size} scores of {metadata['method']} are NaN or infinite, with the model in {dtype}"
        )
        if dtype == "float16":
            message += ": clearhead.load(…, dtype='float32') has a larger range"
        warnings.warn(message, ClearheadWarning, stacklevel=2)


class _StreamAssembler:
    """Builds the arrays of explanations from the scores along one axis, for all targets together.

    Args:
        stream: The name of the axis.
        length: The number of its units.
        target_results: The targets.
        request: The methods and options of the call.
    """

    def __init__(self, stream: str, length: int, target_results: Sequence[TargetResult], request: BatchRequest) -> None:
        first = target_results[0]
        method = first.method_run.method
        self.length = length
        self.keeps_heads = request.per == "head"
        self.method_scores = [(result.scores[stream], result.batch_index) for result in target_results]
        self.lengths = [len(result.sample.axes[stream]) for result in target_results]
        self.has_full_matrix = method.get_option("rows") == "all"
        self.postprocess = None if request.profile is None else request.profile.get_settings(method.name).postprocess
        readout_weights = first.pass_result.readout_weights[stream][first.batch_index]
        self.readout = self._pad_to_length(readout_weights, self.lengths[0])

    def build_arrays(self, units: Units, indexer: "slice | list[int]") -> dict[str, Any]:
        """Build the arrays of the explanation of one group of units.

        Args:
            units: The units.
            indexer: Their positions on the axis.
        """
        scores, i = self.method_scores[0]
        is_single = len(self.method_scores) == 1
        row, matrix = self._select_row_and_matrix(indexer)
        arrays: dict[str, Any] = {
            "scores": self._postprocess_scores(_to_numpy(row[indexer]), units, indexer),
            "matrix": None if matrix is None else self._postprocess_scores(_to_numpy(matrix), units, indexer),
            "base_value": None,
            "per_layer": None,
            "per_head": None,
            "factors": None,
            "component_scores": None,
            "intervals": None,
            "covariance": None,
        }
        if not is_single:
            return arrays
        if scores.base_value is not None:
            arrays["base_value"] = float(scores.base_value[i])
        arrays["per_layer"] = self._select_units(scores.per_layer, i, indexer)
        if self.keeps_heads:
            arrays["per_head"] = self._select_units(scores.per_head, i, indexer)
        if scores.factors:
            arrays["factors"] = self._select_units(torch.stack([*scores.factors.values()], 1), i, indexer)
        if scores.components:
            component_scores = torch.stack([*scores.components.values()], 1)
            arrays["component_scores"] = self._select_units(component_scores, i, indexer)
        if scores.covariances and scores.resolved_options and self.postprocess is None:
            covariance = self._pad_to_length(scores.covariances[i], self.lengths[0])
            covariance = self._pad_to_length(covariance.mT, self.lengths[0])[indexer][:, indexer]
            multiplier = scores.resolved_options["interval_multiplier"][i]
            arrays["intervals"] = compute_intervals(arrays["scores"], covariance.numpy(), multiplier)
            if len(units) <= MAX_COVARIANCE_UNITS:
                arrays["covariance"] = _to_numpy(covariance).astype(arrays["scores"].dtype)
        return arrays

    def _select_row_and_matrix(
        self, indexer: "slice | list[int]"
    ) -> "tuple[Float[Tensor, 'unit'], Float[Tensor, 'row unit'] | None]":
        """The read-out row over all units; the matrix of unit × unit, or of target × unit if there are several."""
        scores, i = self.method_scores[0]
        if self.has_full_matrix:
            matrix = self._pad_to_length(scores.scores[i], self.lengths[0])
            matrix = self._pad_to_length(matrix.mT, self.lengths[0]).mT
            return (self.readout.to(matrix.dtype) @ matrix)[0], matrix[:, indexer]
        rows = [
            self._pad_to_length(scores.scores[i, 0], length)
            for (scores, i), length in zip(self.method_scores, self.lengths, strict=True)
        ]
        if len(rows) == 1:
            return rows[0], None
        matrix = torch.stack(rows)
        return matrix.sum(0), matrix[:, indexer]

    def _postprocess_scores(self, scores: np.ndarray, units: Units, indexer: "slice | list[int]") -> np.ndarray:
        """Apply the last step of an author's code, if the profile has one."""
        if self.postprocess is None:
            return scores
        readout_rows = {i: float(weight) for i, weight in enumerate(self.readout[0, indexer]) if weight}
        return self.postprocess(scores, units, readout_rows)

    def _pad_to_length(self, scores: Float[Tensor, "*rows explained"], length: int) -> Float[Tensor, "*rows unit"]:
        """Pad with zeros: a target that depends on the first units alone was explained with these units alone."""
        scores = scores[..., :length]
        if length == self.length:
            return scores
        return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], self.length - length)], dim=-1)

    def _select_units(self, scores: Tensor | None, i: int, indexer: "slice | list[int]") -> Any:
        return None if scores is None else _to_numpy(self._pad_to_length(scores[i], self.lengths[0])[..., indexer])


def _describe_targets(target_results: Sequence[TargetResult], adapter: ModelAdapter) -> dict[str, Any]:
    """The description of the target, or of several with the sum of their values."""
    descriptions = [result.description for result in target_results]
    if len(descriptions) == 1:
        return descriptions[0]
    return {
        "kind": "multiple",
        "name": adapter.join_step_names([description["name"] for description in descriptions]),
        "scale": descriptions[0]["scale"],
        "value": sum(description["value"] for description in descriptions),
        "steps": descriptions,
    }


def _build_certificate(result: TargetResult, request: BatchRequest, self_test: SelfTest) -> dict[str, Any]:
    """What was checked about an explanation, and how it was computed."""
    batch = result.batch
    target_function = batch.targets[result.batch_index].function
    return {
        "capture_error": self_test.capture_error,
        "rebuild_error": self_test.rebuild_error,
        "recorder": self_test.capture_source.name,
        "kernel": result.method_run.kernel_name,
        "readout": batch.adapter.readout,
        "readout_checked": request.readout_checks.get(id(target_function), False),
        **batch.dtype_and_device,
        "seed": batch.seed,
        "versions": dict(_get_versions()),
        "truncated_tokens": result.sample.num_truncated,
    }


def _collect_diagnostics(target_results: Sequence[TargetResult]) -> dict[str, Any]:
    """The errors that a method measured about its own scores: the largest over all targets and streams."""
    largest: dict[str, float] = {}
    for result in target_results:
        for scores in result.scores.values():
            for name, values in (scores.diagnostics or {}).items():
                largest[name] = max(largest.get(name, 0.0), float(values[result.batch_index]))
    return {"checks": largest} if largest else {}


def _collect_resolved_options(result: TargetResult) -> dict[str, Any]:
    """The options that a method chose by itself, and the names of its factors and components."""
    stream_scores = result.pass_result.results[result.method_index].scores.values()
    resolved: dict[str, Any] = {}
    for scores in stream_scores:
        if scores.factors:
            resolved.setdefault("factors", list(scores.factors))
        if scores.components:
            resolved.setdefault("components", list(scores.components))
    for scores in stream_scores:
        for name, values in (scores.resolved_options or {}).items():
            resolved[name] = values[result.batch_index]
    return resolved


def _build_provenance(result: TargetResult, request: BatchRequest) -> dict[str, Any]:
    """The model, the method and the input, completely enough to compute the explanation again."""
    batch = result.batch
    adapter = batch.adapter
    method_run = result.method_run
    method = method_run.method
    declaration = method.declaration
    layers = None
    if len(method_run.layer_ranges) == 1 and "layers" in declaration.supports:
        (layer_range,) = method_run.layer_ranges.values()
        layers = [layer_range.start, layer_range.stop]
    omitted = request.selection.omitted.get(method)
    input_options = request.explicit_input_options
    if getattr(result.sample, "is_user_continuation", False) and "answer" not in input_options:
        input_options["answer"] = list(getattr(result.sample, "continuation_ids", ()))
    load_options: dict[str, Any] = {}
    if adapter.task is not None:
        load_options["task"] = adapter.task
    if adapter.readout != adapter.choose_default_readout():
        load_options["readout"] = adapter.readout
    return {
        "model": adapter.name,
        "model_class": adapter.model_class_name,
        "method": method.name,
        "options": {key: list(value) if isinstance(value, tuple) else value for key, value in method.options},
        "layers": layers,
        "heads": method_run.any_instance.heads,
        "input_options": input_options,
        "profile": None if request.profile is None else request.profile.name,
        **({} if request.overridden_target is None else {"ignored_target": str(request.overridden_target)}),
        "load_options": load_options,
        "citation": declaration.citation,
        "guidance": declaration.guidance,
        "family": declaration.family,
        "signed": method_run.any_instance.signed,
        "linear_in_target": method_run.any_instance.linear_in_target,
        "input": batch.fingerprints[result.batch_index],
        "layer_scores": declaration.layer_scores,
        **({} if not omitted else {"omitted_components": omitted}),
    }


def _describe_prediction(class_scores: Float[Tensor, "label"] | None, adapter: ModelAdapter) -> dict[str, Any]:
    """The five most likely labels, or the five largest outputs of a regression model."""
    if class_scores is None:
        return {}
    class_scores = adapter.select_prediction_scores(class_scores)
    num_listed = min(5, len(class_scores))
    if adapter.is_regression:
        outputs = [
            {"label": adapter.label_name(int(i)), "index": int(i), "logit": float(class_scores[i])}
            for i in class_scores.topk(num_listed).indices
        ]
        first = outputs[0]
        return {"label": first["label"], "index": first["index"], "value": first["logit"], "top": outputs}
    probabilities = compute_probabilities(class_scores.double(), adapter.multi_label)
    top = [
        {
            "label": adapter.label_name(int(i)),
            "index": int(i),
            "probability": float(probabilities[i]),
            "logit": float(class_scores[i]),
        }
        for i in probabilities.topk(num_listed).indices
    ]
    first = top[0]
    return {"label": first["label"], "index": first["index"], "probability": first["probability"], "top": top}


@cache
def _get_versions() -> dict[str, str]:
    import transformers

    return {
        "clearhead": clearhead.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy: a view would keep the whole batch alive."""
    return tensor.cpu().numpy().copy()
