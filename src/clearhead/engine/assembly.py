"""From what a pass left behind to an `Explanation`: what was scored, what was predicted, and how we know."""

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
from clearhead.adapters.base import InputOptions, ModelAdapter, Sample
from clearhead.capture.checks.self_test import SelfTest
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import ClearheadWarning
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation, MultiStreamExplanation
from clearhead.methods.base import Method, MethodScores
from clearhead.profiles import Profile
from clearhead.targets import compute_probabilities
from clearhead.units import POOLING_QUERY, Units


@dataclass
class BatchRequest:
    """What one call of `explain` asks of every batch."""

    methods: list[Method]
    input_options: InputOptions
    per: str | None
    seed: int = 0
    profile: Profile | None = None
    #: The target that was given and that the profile's author does not heed.
    overridden_target: Any = None
    kernel: str | None = None
    checkpoint: bool | None = None
    #: Whether the rows that are read were seen to reach the target, by the target's function (None for classes).
    readout_checks: dict[int, bool] = field(default_factory=dict)

    @property
    def given_input_options(self) -> dict[str, Any]:
        how = self.input_options
        given = {
            "max_length": how.max_length,
            "truncation_side": how.truncation_side,
            "answer": how.continuation if isinstance(how.continuation, str) else None,
            "max_new_tokens": None if how.max_new_tokens == InputOptions.max_new_tokens else how.max_new_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class PassResult:
    """What one recorded pass left behind: for each method, the scores along each axis, where they were made.

    All of it is brought to the CPU at once: looking at a GPU for each sample by itself costs more than the looking.
    """

    batch: TargetBatch
    method_runs: list[MethodRun]
    results: list[MethodResult]
    #: Whether every head's share is kept, too.
    keep_head_scores: bool = False

    def __post_init__(self) -> None:
        self.on_cpu = False
        if not self.keep_head_scores:  # nobody asks for them, and they are large
            self.results = [
                replace(result, scores={s: replace(scores, per_head=None) for s, scores in result.scores.items()})
                for result in self.results
            ]

    def move_to_cpu(self) -> None:
        """Bring the scores to the CPU, and leave none where they were made; this waits for a GPU that is at work."""
        self.results = [
            replace(result, scores={stream: scores.cpu() for stream, scores in result.scores.items()})
            for result in self.results
        ]
        self.on_cpu = True

    @property
    def cpu_scores(self) -> list[dict[str, MethodScores]]:
        if not self.on_cpu:
            self.move_to_cpu()
        return [result.scores for result in self.results]

    @cached_property
    def readout_weights(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        return {stream: part.cpu() for stream, part in self.batch.readout_weights.items()}


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
    def class_scores(self) -> Float[Tensor, "label"] | None:
        """The scores of the classes, on the CPU."""
        class_scores = self.pass_result.results[self.method_index].values.cpu_class_scores
        return None if class_scores is None else class_scores[self.batch_index]

    @property
    def description(self) -> dict[str, Any]:
        """The description of the target, with its value."""
        batch = self.pass_result.batch
        sample = batch.truncated_samples[self.batch_index]
        target = batch.targets[self.batch_index]
        value = self.pass_result.results[self.method_index].values.cpu_values[self.batch_index]
        description = target.describe(self.class_scores, batch.adapter, value, num_masks=len(sample.mask_positions))
        return batch.adapter.extend_target_description(sample, target, description)


def assemble_explanations(
    samples: Sequence[Sample],
    target_counts: Sequence[int],
    pass_results: Sequence[PassResult],
    request: BatchRequest,
    self_test: SelfTest,
) -> list[list[AnyExplanation]]:
    """Each sample of a batch as each method explains it, its `counts` targets together.

    All that can be said without scores is said first: a GPU may still be at work on these.
    """
    methods = range(len(request.methods))
    results = [
        [_collect_target_results(pass_results, i, m, count) for m in methods] for i, count in enumerate(target_counts)
    ]
    metadata = [
        [_build_metadata(steps, m, request, self_test) for m, steps in enumerate(by_method)] for by_method in results
    ]
    return [
        [_build_explanation(sample, results[i][m], m, metadata[i][m], request) for m in methods]
        for i, sample in enumerate(samples)
    ]


def _collect_target_results(
    pass_results: Sequence[PassResult], sample_index: int, method_index: int, count: int
) -> list[TargetResult]:
    """The first targets of a sample, as one method explains them."""
    return [
        TargetResult(result, step * result.batch.num_samples + sample_index, method_index)
        for result in pass_results
        for step in range(result.batch.targets_per_sample)
    ][:count]


def _build_metadata(steps: Sequence[TargetResult], m: int, request: BatchRequest, tested: SelfTest) -> dict[str, Any]:
    first, last = steps[0], steps[-1]
    plan, reading = first.pass_result.batch, first.pass_result.method_runs[m]
    return {
        "method": str(reading.method),
        "target": _describe_targets(steps, plan.adapter),
        "prediction": _describe_prediction(first.class_scores, plan.adapter) if len(steps) == 1 else {},
        "certificate": _build_certificate(plan, first.batch_index, request, tested, reading),
        "provenance": _build_provenance(last.pass_result.batch, last.batch_index, reading, request)
        | _collect_resolved_options(first, m),
        "steps": tuple(step.description["name"] for step in steps) if len(steps) > 1 else None,
    }


def _build_explanation(
    sample: Sample, steps: Sequence[TargetResult], m: int, said: dict[str, Any], request: BatchRequest
) -> AnyExplanation:
    about = {**said, "certificate": said["certificate"] | _collect_diagnostics(steps, m)}
    streams: dict[str, Explanation] = {}
    for stream, axis in sample.axes.items():
        found = _StreamAssembler(stream, len(axis), steps, m, request)
        for units, at in zip(axis.unit_groups, axis.indexers, strict=True):
            if units.kind == POOLING_QUERY:
                continue  # what a model pools with is no part of the input
            picture = sample.unrendered_image if units.boxes is not None else None
            arrays = found.build_arrays(units, at)
            if request.profile is None:  # authors have units that they give no score
                _warn_if_not_finite(arrays["scores"], about)
            streams[units.stream] = Explanation(units=units, image=picture, **arrays, **about)
    return next(iter(streams.values())) if len(streams) == 1 else MultiStreamExplanation(streams)


def _warn_if_not_finite(scores: np.ndarray, about: dict[str, Any]) -> None:
    """A slope can leave the range of a small format where the model's answer does not."""
    wrong = int((~np.isfinite(scores)).sum())
    if wrong:
        dtype = about["certificate"]["dtype"]
        wider = ": clearhead.load(…, dtype='float32') has a larger range" if dtype == "float16" else ""
        said = f"{wrong} of {scores.size} scores of {about['method']} are NaN or infinite, with the model in {dtype}"
        warnings.warn(said + wider, ClearheadWarning, stacklevel=2)


class _StreamAssembler:
    """The scores along one axis, all steps together."""

    def __init__(self, stream: str, length: int, steps: Sequence[TargetResult], m: int, request: BatchRequest) -> None:
        self.length, self.per = length, request.per
        self.method_scores = [(step.pass_result.cpu_scores[m][stream], step.batch_index) for step in steps]
        self.lengths = [len(step.pass_result.batch.truncated_samples[step.batch_index].axes[stream]) for step in steps]
        method = steps[0].pass_result.method_runs[m].method
        self.full_matrix = method.get_option("rows") == "all"
        self.postprocess = None if request.profile is None else request.profile.get_settings(method.name).postprocess
        self.readout = self._pad_to_length(
            steps[0].pass_result.readout_weights[stream][steps[0].batch_index], self.lengths[0]
        )

    def build_arrays(self, units: Units, at: "slice | list[int]") -> dict[str, Any]:
        part, i = self.method_scores[0]
        alone, matrix = len(self.method_scores) == 1, None
        if self.full_matrix:
            matrix = self._pad_to_length(part.scores[i], self.lengths[0])
            matrix = self._pad_to_length(matrix.mT, self.lengths[0]).mT
            row = (self.readout.to(matrix.dtype) @ matrix)[0]
            matrix = matrix[:, at]
        elif alone:
            row = self._pad_to_length(part.scores[i, 0], self.lengths[0])
        else:
            pairs = zip(self.method_scores, self.lengths, strict=True)
            rows = torch.stack([self._pad_to_length(part.scores[i, 0], length) for (part, i), length in pairs])
            row, matrix = rows.sum(0), rows[:, at]
        return {
            "scores": self._postprocess_scores(_to_numpy(row[at]), units, at),
            "matrix": None if matrix is None else self._postprocess_scores(_to_numpy(matrix), units, at),
            "base_value": None if part.base_value is None or not alone else float(part.base_value[i]),
            "per_layer": self._select_units(part.per_layer, i, at) if alone else None,
            "per_head": self._select_units(part.per_head, i, at) if alone and self.per == "head" else None,
            "factors": self._select_units(torch.stack([*part.factors.values()], 1), i, at)
            if alone and part.factors
            else None,
        }

    def _postprocess_scores(self, scores: np.ndarray, units: Units, at: "slice | list[int]") -> np.ndarray:
        """As an author leaves them."""
        if self.postprocess is None:
            return scores
        read = {place: float(weight) for place, weight in enumerate(self.readout[0, at]) if weight}
        return self.postprocess(scores, units, read)

    def _pad_to_length(self, part: Float[Tensor, "*part some"], length: int) -> Float[Tensor, "*part unit"]:
        """A target that depends on the first units alone was explained with them alone: the others have no score."""
        part = part[..., :length]
        if length == self.length:
            return part
        return torch.cat([part, part.new_zeros(*part.shape[:-1], self.length - length)], dim=-1)

    def _select_units(self, values: Tensor | None, i: int, at: "slice | list[int]") -> Any:
        return None if values is None else _to_numpy(self._pad_to_length(values[i], self.lengths[0])[..., at])


def _describe_targets(steps: Sequence[TargetResult], subject: ModelAdapter) -> dict[str, Any]:
    described = [step.description for step in steps]
    if len(described) == 1:
        return described[0]
    return {
        "kind": "several",
        "name": subject.join_step_names([one["name"] for one in described]),
        "scale": described[0]["scale"],
        "value": sum(one["value"] for one in described),
        "steps": described,
    }


def _build_certificate(
    plan: TargetBatch, i: int, request: BatchRequest, tested: SelfTest, reading: MethodRun
) -> dict[str, Any]:
    """What was checked about a result."""
    return {
        "capture_error": tested.capture_error,
        "rebuild_error": tested.rebuild_error,
        "recorder": tested.capture_source,
        "kernel": reading.kernel_name,
        "readout": plan.adapter.readout,
        "readout_checked": request.readout_checks.get(id(plan.targets[i].function), False),
        **plan.dtype_and_device,
        "seed": plan.seed,
        "versions": dict(_get_versions()),
        "truncated_tokens": plan.truncated_samples[i].num_truncated,
    }


def _collect_diagnostics(steps: Sequence[TargetResult], m: int) -> dict[str, Any]:
    """What the method itself measured: the worst of all steps and streams."""
    found: dict[str, float] = {}
    for step in steps:
        for part in step.pass_result.cpu_scores[m].values():
            for name, figures in (part.diagnostics or {}).items():
                found[name] = max(found.get(name, 0.0), float(figures[step.batch_index]))
    return {"checks": found} if found else {}


def _collect_resolved_options(step: TargetResult, m: int) -> dict[str, Any]:
    """What the method chose where the caller left it open, and the names of its factors."""
    parts = step.pass_result.results[m].scores.values()
    factors = next((list(part.factors) for part in parts if part.factors), None)
    named = {} if factors is None else {"factors": factors}
    return named | {
        name: given[step.batch_index] for part in parts for name, given in (part.resolved_options or {}).items()
    }


def _build_provenance(plan: TargetBatch, i: int, reading: MethodRun, request: BatchRequest) -> dict[str, Any]:
    """Where a result comes from: enough to get it again."""
    method, readout = reading.method, plan.adapter.readout
    declaration = method.declaration
    layers = next(iter(reading.layer_ranges.values())) if len(reading.layer_ranges) == 1 else None
    given = (
        getattr(plan.truncated_samples[i], "is_user_continuation", False)
        and "answer" not in request.given_input_options
    )
    return {
        "model": plan.adapter.name,
        "model_class": plan.adapter.model_class_name,
        "method": method.name,
        "options": {key: list(value) if isinstance(value, tuple) else value for key, value in method.options},
        "layers": [layers.start, layers.stop] if layers is not None and "layers" in declaration.supports else None,
        "heads": reading.any_instance.heads,
        "reading": {
            **request.given_input_options,
            **({"answer": list(getattr(plan.truncated_samples[i], "continuation_ids", ()))} if given else {}),
        },
        "profile": None if request.profile is None else request.profile.name,
        **({} if request.overridden_target is None else {"ignored_target": str(request.overridden_target)}),
        "loading": {
            **({} if plan.adapter.task is None else {"task": plan.adapter.task}),
            **({} if readout == plan.adapter.choose_default_readout() else {"readout": readout}),
        },
        "citation": declaration.citation,
        "signed": reading.any_instance.signed,
        "linear_in_target": reading.any_instance.linear_in_target,
        "input": plan.fingerprints[i],
        "parts": declaration.layer_scores,
    }


def _describe_prediction(logits: Float[Tensor, "label"] | None, subject: ModelAdapter) -> dict[str, Any]:
    """The five most likely labels."""
    if logits is None:
        return {}
    logits = subject.select_prediction_scores(logits)
    if subject.is_regression:
        measures = [
            {"label": subject.label_name(int(i)), "index": int(i), "logit": float(logits[i])}
            for i in logits.topk(min(5, len(logits))).indices
        ]
        return {**{key: measures[0][key] for key in ("label", "index")}, "value": measures[0]["logit"], "top": measures}
    p = compute_probabilities(logits.double(), subject.multi_label)
    top = [
        {
            "label": subject.label_name(int(i)),
            "index": int(i),
            "probability": float(p[i]),
            "logit": float(logits[i]),
        }
        for i in p.topk(min(5, len(p))).indices
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
