"""The kind "reference": a pass at the input, and one at each reference that is differentiated between the two.

The class explained is the one of the input itself. What several methods want to hold it against is run once.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.backward_rules.base import MissingRuleError, translate_inplace_errors
from clearhead.backward_rules.paired_pass import DeepLiftMode, InputTraceMode, PairedMode, reject_custom_functions
from clearhead.capture.checks.custom_attention import iter_float_tensors
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Tape, resolve_requirements
from clearhead.engine.baselines import Baselines
from clearhead.engine.passes.captum_deeplift import compute_captum_multipliers
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.random_references import RandomReferences
from clearhead.engine.target_batch import MethodRun, TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods._reference import MultiplierSource, ReferenceInput, ReferenceMethod, ReferenceResult
from clearhead.methods.base import Method, MethodScores
from clearhead.targets import FixedClassTarget, Target

#: Why DeepLIFT has no rule for the model of a recorder ("" where it has).
_unsupported_reasons: "WeakKeyDictionary[Recorder, str]" = WeakKeyDictionary()


def run_reference_passes(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """The input itself, then every reference that is wanted, then what the methods make of it."""
    found: dict[int, dict[str, MethodScores]] = {}
    for multipliers in dict.fromkeys(_get_reference_method(reading).multiplier_source for reading in method_runs):
        own = [
            (i, reading)
            for i, reading in enumerate(method_runs)
            if _get_reference_method(reading).multiplier_source == multipliers
        ]
        _run_references(recorder, batch, [reading for _, reading in own], multipliers)
        found |= {i: _finish_with_gap(reading, batch) for i, reading in own}
    return [found[i] for i in range(len(method_runs))]


def _run_references(
    recorder: Recorder, plan: TargetBatch, readings: Sequence[MethodRun], multipliers: MultiplierSource
) -> None:
    wanted: dict[ReferenceInput, list[ReferenceMethod]] = {}
    try:
        against = ReferenceRunner(recorder, plan, multipliers)
        for reading in readings:
            for fold in _get_reference_methods(reading):
                for reference in dict.fromkeys(map(against.canonicalize, fold.iter_references())):
                    wanted.setdefault(reference, []).append(fold)
        for reference, folds in wanted.items():
            with translate_inplace_errors():
                held = against.compare(reference)
            for fold in folds:
                fold.on_reference(held)
    except MissingRuleError as problem:
        name, subject = readings[0].method.name, plan.adapter
        raise UnsupportedError(
            f"{name} cannot explain {subject.name}: in {subject.model_class_name}, {problem}"
        ) from None


def _get_reference_method(reading: MethodRun) -> ReferenceMethod:
    return cast(ReferenceMethod, reading.any_instance)


def _get_reference_methods(reading: MethodRun) -> list[ReferenceMethod]:
    return [fold for fold in reading.per_stream.values() if isinstance(fold, ReferenceMethod)]


def _finish_with_gap(reading: MethodRun, plan: TargetBatch) -> dict[str, MethodScores]:
    """With how far the scores of all streams together are from what they should add up to."""
    parts = reading.compute_scores(Tape())
    gain = plan.target_values - _get_reference_method(reading).base_value
    gap = (gain - torch.stack([fold.attributed_total for fold in _get_reference_methods(reading)]).sum(0)).abs()
    if _get_reference_method(reading).captum:
        worst = int(gap.argmax())
        warnings.warn(
            f"captum's {reading.method.name} has no rule for norms, softmax, products and most activations: the sum of "
            f"its scores differs from its expected value, {float(gain[worst]):.2g}, by {float(gap[worst]):.2g}; "
            "without the profile, the sum is correct",
            stacklevel=2,
        )
    relative = compute_completeness_gap(gap, [part.scores for part in parts.values()])
    return {stream: replace(part, diagnostics={"completeness_gap": relative}) for stream, part in parts.items()}


class ReferenceRunner:
    """One batch, watched at the input, and held against references."""

    def __init__(self, recorder: Recorder, batch: TargetBatch, multipliers: MultiplierSource = "steady") -> None:
        self.recorder, self.batch, self.multipliers = recorder, batch, multipliers
        self.trace = InputTraceMode()
        tape = self._run_pass(nullcontext() if multipliers == "captum" else self.trace, batch, None)
        self.inputs = {leaf: part.chunk(batch.targets_per_sample)[0] for leaf, part in (tape.inputs or {}).items()}
        words = [leaf for leaf in self.inputs if not batch.model_inputs[leaf].is_floating_point()]
        self.baselines = Baselines(_flatten_choices(batch, self.inputs, words), self.inputs, words, recorder)
        self.random_references = RandomReferences(batch, self.inputs, words, self.baselines, recorder)
        targets = [self._fix_classes(i, target) for i, target in enumerate(batch.targets)]
        each = [
            [targets[step * batch.num_samples + i] for step in range(batch.targets_per_sample)]
            for i in range(batch.num_samples)
        ]
        self.fixed_batch = TargetBatch(batch.adapter, batch.source_samples, each, batch.seed)

    def canonicalize(self, reference: ReferenceInput) -> ReferenceInput:
        """Where nothing can be drawn, one reference stands for all draws."""
        return (
            ReferenceInput()
            if reference.sample_index is not None and not self.random_references.can_sample
            else reference
        )

    def compare(self, reference: ReferenceInput) -> ReferenceResult:
        plan = self.fixed_batch
        vectors = {leaf: self._get_reference_vectors(reference, leaf) for leaf in self.inputs}
        ways = {leaf: x - vectors[leaf] for leaf, x in self.inputs.items()}
        if self.multipliers == "captum":
            multipliers = compute_captum_multipliers(self.recorder, plan, self.inputs, vectors)
        else:
            side = DeepLiftMode(self.trace, stabilised=self.multipliers == "steady")
            multipliers = self._run_pass(side, plan, vectors).input_gradient or {}
        ways = {leaf: part.repeat(plan.targets_per_sample, *(1,) * (part.dim() - 1)) for leaf, part in ways.items()}
        arranged = plan.adapter.to_unit_vectors
        return ReferenceResult(
            reference,
            arranged(ways, plan.truncated_samples),
            arranged(multipliers, plan.truncated_samples),
            plan.target_values,
        )

    def _get_reference_vectors(self, reference: ReferenceInput, leaf: str) -> Tensor:
        if reference.sample_index is not None:
            return self.random_references.sample(reference.sample_index, leaf)
        return self.baselines.get(reference.baseline, leaf)

    def _fix_classes(self, i: int, target: Target) -> Target:
        # a subject's own kind of target (how alike two inputs are) has no class that could be another one
        if type(target) is not Target or target.function is not None or self.batch.class_scores is None:
            return target
        return FixedClassTarget(
            target.spec, target.scale, target.find_classes(self.batch.class_scores[i], self.batch.adapter)
        )

    def _run_pass(self, mode: Any, plan: TargetBatch, vectors: dict[str, Tensor] | None) -> Tape:
        """A pass of which every operation, those of the target among them, is seen by the mode."""
        watching = vectors is None

        def value(output: Any) -> Float[Tensor, "*target batch"]:
            with mode:
                number = plan.compute_target(output)
            if not watching:
                return number
            if isinstance(mode, PairedMode):
                reject_custom_functions(number)
            return number.detach().requires_grad_()  # the pass that is watched needs no way back

        return _recorder_in_mode(self.recorder, mode).run(
            plan.model_inputs,
            value,
            resolve_requirements(("inputs", "input_gradient")),
            leaves=plan.leaves,
            call_indices=(),
            head_rows=None if watching else plan.head_rows,
            vectors=vectors,
        )


def _flatten_choices(plan: TargetBatch, inputs: Mapping[str, Tensor], words: Sequence[str]) -> TargetBatch:
    """The same plan with a row of words for each row of vectors: where texts are chosen between, a batch has an axis
    of choices, which the model flattens before it looks words up."""
    own = copy(plan)
    own.model_inputs = {
        **plan.model_inputs,
        **{leaf: plan.model_inputs[leaf].reshape(inputs[leaf].shape[:-1]) for leaf in words},
    }
    return own


def _recorder_in_mode(recorder: Recorder, mode: PairedMode | Any) -> Recorder:
    """The same recorder, whose operations the mode sees."""
    own = copy(recorder)

    @contextmanager
    def scope() -> Iterator[None]:
        with recorder.scope(), mode:
            yield

    own.scope = scope
    return own


def find_reference_unsupported_reason(
    recorder: Recorder, adapter: ModelAdapter, sample: Sample, method: Method
) -> str | None:
    """Why DeepLIFT cannot speak for a model: tried on one sample, the first time. Captum's always speaks."""
    if method.get_option("captum"):
        return None
    if recorder not in _unsupported_reasons:
        try:
            plan = TargetBatch(adapter, [sample], [[Target(_sum_outputs)]])
            with translate_inplace_errors():
                held = ReferenceRunner(recorder, plan).compare(ReferenceInput())
            _unsupported_reasons[recorder] = _find_incompleteness_reason(held, plan)
        except MissingRuleError as problem:
            _unsupported_reasons[recorder] = f"in {adapter.model_class_name}, {problem}"
    return _unsupported_reasons[recorder] or None


def _find_incompleteness_reason(held: ReferenceResult, plan: TargetBatch) -> str:
    """Compiled code and the like pass no mode: where the scores miss something, there is more than was seen."""
    parts = torch.cat([(way * held.multipliers[stream]).flatten() for stream, way in held.input_delta.items()])
    gap = float((plan.target_values - held.target_value - parts.sum()).abs() / (parts.abs().sum() + 1e-12))
    if gap <= (0.05 if plan.adapter.dtype in (torch.float16, torch.bfloat16) else 1e-3):
        return ""
    return (
        f"in {plan.adapter.model_class_name}, the sum of the scores differs from its expected value (relative "
        f"difference {gap:.1e}): part of the model is compiled code or a custom autograd function, to which no rule "
        "applies"
    )


def _sum_outputs(output: Any) -> Float[Tensor, "1"]:
    """A target that depends on all that a model says."""
    return (
        torch.stack([part.float().sum() for part in iter_float_tensors(output) if part.requires_grad]).sum().reshape(1)
    )
