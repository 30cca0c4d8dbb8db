"""DeepLIFT: a traced pass at the input, and one at each reference input, compared operation by operation.

The explained class is that of the input itself. References that several methods need are run once.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.base import MissingRuleError, translate_inplace_errors
from clearhead.backward_rules.paired_pass import DeepLiftMode, InputTraceMode, PairedMode, reject_custom_functions
from clearhead.capture.checks.custom_attention import iter_float_tensors
from clearhead.capture.tape import Tape, resolve_requirements
from clearhead.engine.baselines import build_baselines
from clearhead.engine.memory_budget import start_budgeted_pass
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.passes.captum_deeplift import compute_captum_multipliers
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.random_references import RandomReferences
from clearhead.engine.target_batch import TargetBatch, TargetFunction, TargetValues
from clearhead.errors import UnsupportedError
from clearhead.methods._reference import MultiplierSource, ReferenceInput, ReferenceMethod, ReferenceResult
from clearhead.methods.base import Method, MethodScores
from clearhead.methods.pass_type import PassType
from clearhead.targets import FixedClassTarget, Target

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities

#: Largest accepted gap between the sum of the scores and its expected value, by whether the dtype has 16 bits.
_MAX_INCOMPLETENESS = {True: 0.05, False: 1e-3}


class ReferenceStrategy(PassStrategy):
    """Methods that compare the input with reference inputs."""

    pass_type = PassType.REFERENCE

    def find_unsupported_reason(self, capabilities: "ModelCapabilities", method: Method) -> str | None:
        """Return why DeepLIFT has no rule for this model, tried once on one sample; captum's code always runs."""
        if method.get_option("captum"):
            return None
        if capabilities.reference_failure is None:
            capabilities.reference_failure = _try_reference_pass(capabilities)
        return capabilities.reference_failure or None

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """For each source of multipliers: a pass at the input, and one at each reference."""
        num_samples = context.batch.num_samples
        counts = []
        for source, source_runs in _group_by_multiplier_source(method_runs).items():
            num_references = len(_assign_references(source_runs))
            if source == "captum":
                purpose = f"{num_references} × {context.batch.targets_per_sample} references, by captum"
                num_passes = num_references * context.batch.targets_per_sample
                counts.append(PassCount("input", source_runs, 1, rows=num_samples))
                counts.append(PassCount(purpose, source_runs, num_passes, num_passes, 2 * num_samples))
            else:
                counts.append(PassCount("traced input", source_runs, 1, rows=num_samples))
                counts.append(PassCount("references", source_runs, num_references, num_references, num_samples))
        return counts

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Compare the input with all references of all methods."""
        results: dict[int, MethodResult] = {}
        for source, source_runs in _group_by_multiplier_source(method_runs).items():
            values = _run_references(context, source_runs, source)
            for method_run in source_runs:
                results[id(method_run)] = MethodResult(_compute_scores(method_run, values), values)
        return [results[id(method_run)] for method_run in method_runs]


def _get_reference_methods(method_run: MethodRun) -> list[ReferenceMethod]:
    return [instance for instance in method_run.per_stream.values() if isinstance(instance, ReferenceMethod)]


def _get_reference_method(method_run: MethodRun) -> ReferenceMethod:
    """Any instance of a DeepLIFT method on this batch, for options that all its streams share."""
    return cast(ReferenceMethod, method_run.any_instance)


def _group_by_multiplier_source(method_runs: Sequence[MethodRun]) -> dict[MultiplierSource, list[MethodRun]]:
    groups: dict[MultiplierSource, list[MethodRun]] = {}
    for method_run in method_runs:
        groups.setdefault(_get_reference_method(method_run).multiplier_source, []).append(method_run)
    return groups


def _assign_references(
    method_runs: Sequence[MethodRun], can_sample: bool = True
) -> dict[ReferenceInput, list[ReferenceMethod]]:
    """Every reference once, with the methods that need it.

    Args:
        method_runs: The methods.
        can_sample: Whether random references exist; if not, one reference stands for all of them.
    """
    methods_by_reference: dict[ReferenceInput, list[ReferenceMethod]] = {}
    for method_run in method_runs:
        for instance in _get_reference_methods(method_run):
            references = [
                ReferenceInput() if reference.sample_index is not None and not can_sample else reference
                for reference in instance.iter_references()
            ]
            for reference in dict.fromkeys(references):
                methods_by_reference.setdefault(reference, []).append(instance)
    return methods_by_reference


def _run_references(
    context: PassContext, method_runs: Sequence[MethodRun], multiplier_source: MultiplierSource
) -> TargetValues:
    """Run the pass at the input and at all references; return the values of the targets at the input."""
    adapter = context.batch.adapter
    try:
        runner = ReferenceRunner(context, multiplier_source)
        methods_by_reference = _assign_references(method_runs, runner.random_references.can_sample)
        for reference, methods in methods_by_reference.items():
            with translate_inplace_errors():
                result = runner.compare(reference)
            for method in methods:
                method.on_reference(result)
    except MissingRuleError as error:
        raise UnsupportedError(
            f"{method_runs[0].method.name} cannot explain {adapter.name}: in {adapter.model_class_name}, {error}"
        ) from None
    return runner.values


def _compute_scores(method_run: MethodRun, values: TargetValues) -> dict[str, MethodScores]:
    """Compute the scores, and the distance between their sum and its expected value."""
    scores_by_stream = method_run.compute_scores(Tape())
    instances = _get_reference_methods(method_run)
    expected_sum = values.values - instances[0].base_value
    gap = (expected_sum - torch.stack([instance.attributed_total for instance in instances]).sum(0)).abs()
    if instances[0].captum:
        worst = int(gap.argmax())
        warnings.warn(
            f"captum's {method_run.method.name} has no rule for norms, softmax, products and most activations: the "
            f"sum of its scores differs from its expected value, {float(expected_sum[worst]):.2g}, by "
            f"{float(gap[worst]):.2g}; without the profile, the sum is correct",
            stacklevel=2,
        )
    relative_gap = compute_completeness_gap(gap, [scores.scores for scores in scores_by_stream.values()])
    return {
        stream: replace(scores, diagnostics={"completeness_gap": relative_gap})
        for stream, scores in scores_by_stream.items()
    }


class ReferenceRunner:
    """Traces one batch at the input, and compares it with references.

    Args:
        context: The batch, and how to run it.
        multiplier_source: The rules of the multipliers.

    Attributes:
        values: The values of the targets at the input.
    """

    def __init__(self, context: PassContext, multiplier_source: MultiplierSource = "path") -> None:
        self.context = context
        self.batch = batch = context.batch
        self.multiplier_source = multiplier_source
        self.trace = InputTraceMode()
        tape, self.values = self._run_pass(nullcontext() if multiplier_source == "captum" else self.trace, batch, None)
        self.inputs = {leaf: x.chunk(batch.targets_per_sample)[0] for leaf, x in (tape.inputs or {}).items()}
        self.baselines = build_baselines(batch, self.inputs, context.recorder)
        token_leaves = [leaf for leaf in self.inputs if not batch.model_inputs[leaf].is_floating_point()]
        self.random_references = RandomReferences(batch, self.inputs, token_leaves, self.baselines, context.recorder)
        fixed_targets = [self._fix_classes(i, target) for i, target in enumerate(batch.targets)]
        self.fixed_batch = replace(
            batch, targets_by_sample=[fixed_targets[i :: batch.num_samples] for i in range(batch.num_samples)]
        )

    def compare(self, reference: ReferenceInput) -> ReferenceResult:
        """Run the pass at a reference, and return the multipliers of the differences between both inputs."""
        batch = self.fixed_batch
        start_budgeted_pass(batch.num_rows)
        vectors = {leaf: self._get_reference_vectors(reference, leaf) for leaf in self.inputs}
        deltas = {leaf: x - vectors[leaf] for leaf, x in self.inputs.items()}
        if self.multiplier_source == "captum":
            multipliers, values = compute_captum_multipliers(self.context.recorder, batch, self.inputs, vectors)
        else:
            mode = DeepLiftMode(self.trace, self.multiplier_source)
            tape, target_values = self._run_pass(mode, batch, vectors)
            multipliers, values = tape.input_gradient or {}, target_values.values
        repeats = batch.targets_per_sample
        deltas = {leaf: delta.repeat(repeats, *(1,) * (delta.dim() - 1)) for leaf, delta in deltas.items()}
        return ReferenceResult(
            reference,
            batch.adapter.to_unit_vectors(deltas, batch.truncated_samples),
            batch.adapter.to_unit_vectors(multipliers, batch.truncated_samples),
            values,
        )

    def _get_reference_vectors(self, reference: ReferenceInput, leaf: str) -> Tensor:
        if reference.sample_index is not None:
            return self.random_references.sample(reference.sample_index, leaf)
        return self.baselines.get(reference.baseline, leaf)

    def _fix_classes(self, i: int, target: Target) -> Target:
        """The target with the classes that it selects at the input; adapters' own kinds of targets have no classes."""
        class_scores = self.values.class_scores
        if type(target) is not Target or target.function is not None or class_scores is None:
            return target
        return FixedClassTarget(target.spec, target.scale, target.find_classes(class_scores[i], self.batch.adapter))

    def _run_pass(self, mode: Any, batch: TargetBatch, vectors: dict[str, Tensor] | None) -> tuple[Tape, TargetValues]:
        """Run a pass in which the mode sees every operation, those of the target included.

        Args:
            mode: The mode.
            batch: The batch.
            vectors: The vectors of the reference; None at the input, where no backward pass is needed.
        """
        is_traced = vectors is None
        target_function = TargetFunction(batch)

        def compute_target(output: Any) -> Float[Tensor, "*target batch"]:
            with mode:
                values = target_function(output)
            if not is_traced:
                return values
            if isinstance(mode, PairedMode):
                reject_custom_functions(values)
            return values.detach().requires_grad_()

        tape = self.context.recorder.under_mode(lambda: mode).run(
            batch.model_inputs,
            compute_target,
            resolve_requirements(("inputs", "input_gradient")),
            leaves=batch.leaves,
            call_indices=(),
            head_rows=None if is_traced else batch.head_rows,
            vectors=vectors,
        )
        return tape, target_function.result


def _try_reference_pass(capabilities: "ModelCapabilities") -> str:
    """Compare one sample with its default reference; return why DeepLIFT has no rule for the model, "" if it has."""
    adapter = capabilities.adapter
    batch = TargetBatch(adapter, [capabilities.test_sample], [[Target(_sum_outputs)]])
    try:
        with translate_inplace_errors():
            runner = ReferenceRunner(PassContext(capabilities, batch))
            return _find_incompleteness_reason(runner, runner.compare(ReferenceInput()))
    except MissingRuleError as error:
        return f"in {adapter.model_class_name}, {error}"


def _find_incompleteness_reason(runner: ReferenceRunner, result: ReferenceResult) -> str:
    """A mode does not see the operations of compiled code: then the scores do not add up."""
    adapter = runner.batch.adapter
    contributions = torch.cat(
        [(delta * result.multipliers[stream]).flatten() for stream, delta in result.input_delta.items()]
    )
    residual = (runner.values.values - result.target_value - contributions.sum()).abs()
    gap = float(residual / (contributions.abs().sum() + 1e-12))
    if gap <= _MAX_INCOMPLETENESS[adapter.dtype in (torch.float16, torch.bfloat16)]:
        return ""
    return (
        f"in {adapter.model_class_name}, the sum of the scores differs from its expected value (relative difference "
        f"{gap:.1e}): part of the model is compiled code or a custom autograd function, to which no rule applies"
    )


def _sum_outputs(output: Any) -> Float[Tensor, "1"]:
    """A target that depends on every output of the model."""
    sums = [tensor.float().sum() for tensor in iter_float_tensors(output) if tensor.requires_grad]
    return torch.stack(sums).sum().reshape(1)
