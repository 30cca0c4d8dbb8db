"""Backward passes under propagation rules (LRP, AttnLRP), and an ordinary one for methods that need both.

Calls have `relevance`, the gradient of attention under the rules, and, for a method with `needs_standard_gradient`, the
ordinary gradient. `tape.input_gradient` is what the rules propagate to the inputs. Rules that amplify rounding run in
float64 (`backward_rules/float64_mode.py`), and so does the ordinary pass of their methods; methods receive calls in
their own dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import ModelAdapter
from clearhead.backward_rules.base import MissingRuleError, RuleSet, translate_inplace_errors
from clearhead.backward_rules.float64_mode import FLOAT64, Float64Mode, supports_float64
from clearhead.backward_rules.mode import RuleMode, apply_rules
from clearhead.backward_rules.peft_merging import UnmergeableAdapterError
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.capture.position_leaves import (
    MissingPositionsError,
    check_position_count,
    select_position_leaves,
)
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import parameters_requiring_grad
from clearhead.capture.tape import AttentionCall, Requirements, Tape
from clearhead.engine.baselines import build_baselines
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.target_batch import TargetBatch, TargetFunction, TargetValues
from clearhead.errors import UnsupportedError
from clearhead.machine_failures import is_machine_failure
from clearhead.methods._modified_backward import BaselineDifferenceMethod, ModifiedBackwardMixin
from clearhead.methods.base import Method
from clearhead.methods.pass_type import PassType
from clearhead.targets import Target

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities

#: A sum of initial relevance below this fraction of its terms counts as zero.
ZERO_RELEVANCE_TOLERANCE = 1e-5
#: Smallest scale of model outputs to which a difference is compared.
MIN_OUTPUT_SCALE = 1.0

#: The two streams of a call, and its layer.
CallKey = tuple[str, str, int]


@dataclass(frozen=True)
class RuleTrial:
    """Result of one forward pass under the rules of a method, with one sample twice in a batch.

    Attributes:
        unsupported_reason: Why the model cannot run under the rules; None if it can.
        is_batch_safe: Whether samples of a batch stay separate under the rules.
    """

    unsupported_reason: str | None
    is_batch_safe: bool


class ModifiedBackwardStrategy(PassStrategy):
    """Methods that modify the backward pass by propagation rules."""

    pass_type = PassType.MODIFIED_BACKWARD

    def find_unsupported_reason(self, capabilities: "ModelCapabilities", method: Method) -> str | None:
        """Return why the model cannot run under the rules of a method."""
        return _get_rule_trial(capabilities, method).unsupported_reason

    def is_batch_safe(self, capabilities: "ModelCapabilities", method: Method) -> bool:
        """Whether samples of a batch stay separate under the rules of a method."""
        return _get_rule_trial(capabilities, method).is_batch_safe

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """One pass for each set of rules, and an ordinary one if a method compares with it."""
        num_samples = context.batch.num_samples
        counts = [
            PassCount(rule_set.name, rule_runs, 1, 1, num_samples, _unite_requirements(rule_runs))
            for rule_set, rule_runs in _group_by_rule_set(method_runs).items()
        ]
        comparing = [run for run in method_runs if _get_rule_method(run).needs_standard_gradient]
        if comparing:
            counts.append(PassCount("ordinary gradients", comparing, 1, 1, num_samples, _unite_requirements(comparing)))
        return counts

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Run one pass for each set of rules, then the ordinary one."""
        tapes: dict[RuleSet, Tape] = {}
        values: dict[RuleSet, TargetValues] = {}
        relevance: dict[tuple[RuleSet, CallKey], Float[Tensor, "batch head query key"]] = {}
        groups = _group_by_rule_set(method_runs)
        for rule_set, rule_runs in groups.items():
            tapes[rule_set], values[rule_set] = _run_under_rules(context, rule_set, rule_runs, relevance)
        comparing = [run for run in method_runs if _get_rule_method(run).needs_standard_gradient]
        if comparing:
            _run_ordinary_pass(context, comparing, list(groups), relevance)
        dtype = context.batch.compute_dtype
        results = []
        for method_run in method_runs:
            rule_set = _get_rule_method(method_run).rule_set
            scores_by_stream = method_run.compute_scores(tapes[rule_set])
            cast_scores = {
                stream: replace(scores, scores=scores.scores.to(dtype)) for stream, scores in scores_by_stream.items()
            }
            results.append(MethodResult(cast_scores, values[rule_set]))
        return results


def _get_rule_method(method_run: MethodRun) -> ModifiedBackwardMixin:
    return cast(ModifiedBackwardMixin, method_run.any_instance)


def _group_by_rule_set(method_runs: Sequence[MethodRun]) -> dict[RuleSet, list[MethodRun]]:
    groups: dict[RuleSet, list[MethodRun]] = {}
    for method_run in method_runs:
        groups.setdefault(_get_rule_method(method_run).rule_set, []).append(method_run)
    return groups


def _unite_requirements(method_runs: Sequence[MethodRun]) -> Requirements:
    return frozenset().union(*(method_run.requires for method_run in method_runs))


def _get_call_key(call: AttentionCall) -> CallKey:
    return call.query_stream, call.key_stream, call.layer


def _run_under_rules(
    context: PassContext,
    rule_set: RuleSet,
    method_runs: Sequence[MethodRun],
    relevance: dict[tuple[RuleSet, CallKey], Tensor],
) -> tuple[Tape, TargetValues]:
    """Run the pass of one set of rules.

    Args:
        context: The batch, and how to run it.
        rule_set: The rules.
        method_runs: The methods with these rules.
        relevance: Receives the relevance of each call, for methods that also need the ordinary gradient.
    """
    batch = context.batch
    direct_runs = [run for run in method_runs if not _get_rule_method(run).needs_standard_gradient]

    def on_call(call: AttentionCall) -> None:
        if len(direct_runs) < len(method_runs) and call.attention_gradient is not None:
            relevance[rule_set, _get_call_key(call)] = call.attention_gradient
        for method_run in direct_runs:
            method_run.process_call(replace(call, relevance=call.attention_gradient, attention_gradient=None))

    target_function = TargetFunction(
        batch,
        scoring_context=partial(RuleMode, rule_set, batch.num_samples),
        before_backward=_check_nonzero_start if rule_set.conserves_sum else None,
    )
    with _named_unsupported_errors(method_runs, batch):
        recorder = _recorder_under_rules(context.recorder, rule_set, batch)
        tape = _run_pass(context, recorder, method_runs, target_function, on_call)
        _assign_input_deltas(context, method_runs, tape)
        tape = batch.to_unit_vectors(tape)
        if tape.position_x_gradient is not None:
            assert tape.inputs is not None
            (vectors,) = tape.inputs.values()
            check_position_count(tape.position_x_gradient.shape[1], vectors.shape[1])
        _check_output_unchanged(context, rule_set, target_function.result)
    return tape, target_function.result


def _assign_input_deltas(context: PassContext, method_runs: Sequence[MethodRun], tape: Tape) -> None:
    """Set x − x′ of the methods that multiply the difference from a baseline; the model is not run at x′."""
    batch = context.batch
    methods = [
        instance
        for method_run in method_runs
        for instance in method_run.instances
        if isinstance(instance, BaselineDifferenceMethod)
    ]
    if not methods:
        return
    assert tape.inputs is not None
    inputs = {leaf: x.chunk(batch.targets_per_sample)[0] for leaf, x in tape.inputs.items()}
    baselines = build_baselines(batch, inputs, context.recorder, runs_model=False)
    deltas_by_name: dict[str | None, dict[str, Tensor]] = {}
    for method in methods:
        if method.baseline not in deltas_by_name:
            deltas = {leaf: x - baselines.get(method.baseline, leaf) for leaf, x in inputs.items()}
            repeated = {
                leaf: delta.repeat(batch.targets_per_sample, *(1,) * (delta.dim() - 1))
                for leaf, delta in deltas.items()
            }
            unit_deltas = batch.adapter.to_unit_vectors(repeated, batch.truncated_samples)
            deltas_by_name[method.baseline] = unit_deltas
        method.input_delta = deltas_by_name[method.baseline][method.unit_context.stream]


def _run_ordinary_pass(
    context: PassContext,
    method_runs: Sequence[MethodRun],
    rule_sets: Sequence[RuleSet],
    relevance: dict[tuple[RuleSet, CallKey], Tensor],
) -> None:
    """Run the ordinary pass, and hand its calls to methods with the relevance that they had under the rules."""

    def on_call(call: AttentionCall) -> None:
        for method_run in method_runs:
            if method_run.needs_call(call):
                call_relevance = relevance[_get_rule_method(method_run).rule_set, _get_call_key(call)]
                method_run.process_call(replace(call, relevance=call_relevance))
        for rule_set in rule_sets:
            relevance.pop((rule_set, _get_call_key(call)), None)

    needs_float64 = any(_get_rule_method(method_run).rule_set.needs_float64 for method_run in method_runs)
    make_mode = Float64Mode if needs_float64 else nullcontext
    recorder = context.recorder.under_mode(make_mode, _choose_leaf_dtype(needs_float64, context.batch))
    _run_pass(context, recorder, method_runs, TargetFunction(context.batch, copies_to_cpu=False), on_call)


def _run_pass(
    context: PassContext,
    recorder: Recorder,
    method_runs: Sequence[MethodRun],
    target_function: TargetFunction,
    on_call: Callable[[AttentionCall], None],
) -> Tape:
    """Run one recorded pass that materialises attention."""
    batch = context.batch
    call_indices = [
        i
        for i, site in enumerate(context.self_test.call_sites)
        if any(method_run.needs_call(site) for method_run in method_runs)
    ]
    return recorder.run(
        batch.model_inputs,
        target_function,
        _unite_requirements(method_runs),
        lambda call: on_call(call.to(batch.adapter.device, batch.compute_dtype)),
        leaves=batch.leaves,
        call_indices=call_indices,
        head_rows=batch.head_rows,
    )


def _recorder_under_rules(recorder: Recorder, rule_set: RuleSet, batch: TargetBatch) -> Recorder:
    """A recorder of the same model whose passes are differentiated by these rules."""
    make_mode = partial(apply_rules, recorder.model, rule_set, batch.num_samples)
    return recorder.under_mode(make_mode, _choose_leaf_dtype(rule_set.needs_float64, batch))


def _choose_leaf_dtype(needs_float64: bool, batch: TargetBatch) -> torch.dtype | None:
    """Float64 where rules need it and the device has it; None for the model's own dtype."""
    return FLOAT64 if needs_float64 and supports_float64(batch.adapter.device) else None


def _get_rule_trial(capabilities: "ModelCapabilities", method: Method) -> RuleTrial:
    """Return the trial of a method with its choice of rules, run once.

    Raises:
        RuntimeError: An error of torch or the model that does not come from the rules. It is not remembered: the next
            call tries again.
    """
    key = (method.name, method.get_option("rules"))
    if key not in capabilities.rule_trials:
        try:
            capabilities.rule_trials[key] = _run_rule_trial(capabilities, method)
        except UnmergeableAdapterError as error:  # not remembered: the adapter may be merged or removed
            return RuleTrial(f"in {capabilities.adapter.model_class_name}, {error}", True)
    return capabilities.rule_trials[key]


def _run_rule_trial(capabilities: "ModelCapabilities", method: Method) -> RuleTrial:
    """Run the model once under the rules of a method."""
    adapter = capabilities.adapter
    recorder = capabilities.recorder
    assert recorder.self_test is not None
    batch = TargetBatch(adapter, [capabilities.test_sample] * 2, [[Target(lambda output: output)]] * 2)
    rule_set = _get_rule_method(MethodRun(method, batch, recorder.self_test)).rule_set.make_probe_variant()
    requires: Requirements = method.declaration.requires & {"position_x_gradient"}
    reason = None

    def run_under_rules() -> None:
        with translate_inplace_errors():
            recorder_under_rules = _recorder_under_rules(recorder, rule_set, batch)
            graph_leaves = recorder_under_rules.forward(batch.model_inputs, requires, batch.leaves)[2]
        for leaf in select_position_leaves(graph_leaves).values():
            check_position_count(leaf.shape[1], batch.max_units)

    with recorder.session.running(with_gradients=True), parameters_requiring_grad(recorder.grad_parameters):
        try:
            run_under_rules()
        except UnmergeableAdapterError:
            raise
        except (MissingRuleError, MissingPositionsError) as error:
            reason = f"in {adapter.model_class_name}, {error}"
        except RuntimeError as error:
            run_plainly = partial(recorder.forward, batch.model_inputs, frozenset(), batch.leaves)
            if not _comes_from_rules(error, run_plainly, run_under_rules):
                raise
            where = ", whose passes are in float64" if rule_set.needs_float64 else ""
            reason = f"{adapter.model_class_name} does not run under {rule_set.name}{where}: {_describe_error(error)}"
    if rule_set.needs_float64 and adapter.dtype == torch.float16 and not supports_float64(adapter.device):
        reason = (
            f"{rule_set.name} divides by numbers that float16 cannot represent: load the model with dtype='float32'"
        )
    return RuleTrial(reason, rule_set.is_batch_safe)


def _comes_from_rules(
    error: RuntimeError, run_plainly: Callable[[], object], run_under_rules: Callable[[], object]
) -> bool:
    """Whether the model runs without the rules, and fails under them in the same way once more.

    Args:
        error: The error of the first pass under the rules.
        run_plainly: Makes the same pass without the rules.
        run_under_rules: Makes the pass under the rules again.
    """
    if is_machine_failure(error):
        return False
    try:
        run_plainly()
    except RuntimeError:
        return False
    try:
        run_under_rules()
    except RuntimeError as second_error:
        return _describe_error(second_error) == _describe_error(error)
    return False


def _describe_error(error: RuntimeError) -> str:
    """The class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_nonzero_start(values: Float[Tensor, "target batch"], scores: Tensor) -> None:
    """Check that the relevance of each target starts with a nonzero sum; in a total, one could hide behind others."""
    if not scores.requires_grad:
        return
    empty = [i for i, target_values in enumerate(values) if _relevance_sums_to_zero(target_values, scores)]
    if empty:
        several = f" (of {len(values)} targets, those at {', '.join(map(str, empty))})" if len(values) > 1 else ""
        raise MissingRuleError(
            f"the target{several} subtracts the scores of some classes from that of another (as a contrast, a "
            "probability and log-odds do), so its initial relevance sums to zero. These rules conserve the sum, so "
            "the scores would contain only rounding errors. Explain the logits of the classes and subtract them, or "
            "use rules='orig' or attn-lrp"
        )


def _relevance_sums_to_zero(values: Float[Tensor, " batch"], scores: Tensor) -> bool:
    """Whether the initial relevance of a sample has nonzero terms whose sum is zero."""
    (start,) = torch.autograd.grad(values.sum(), scores, retain_graph=True, allow_unused=True)
    if start is None:
        return False
    terms = start.reshape(len(scores), -1)
    sums_to_zero = terms.sum(1).abs() <= ZERO_RELEVANCE_TOLERANCE * terms.abs().sum(1)
    return bool((sums_to_zero & terms.any(1)).any())


def _check_output_unchanged(context: PassContext, rule_set: RuleSet, values: TargetValues) -> None:
    """Check, once per model, that the rules change how a pass is differentiated, and not what it computes."""
    if rule_set in context.capabilities.verified_rule_sets:
        return
    batch = context.batch
    real = context.recorder.run(batch.model_inputs, batch.compute_target, (), leaves=batch.leaves).value
    assert real is not None
    largest_score = 0.0 if values.class_scores is None else values.class_scores.abs().max().item()
    # a value near zero differs by the rounding of the scores that it is computed from, which are larger
    scale = max(float(real.abs().max()), largest_score, MIN_OUTPUT_SCALE)
    gap = float((values.values.flatten() - real.flatten()).abs().max()) / scale
    if not gap <= _get_tolerance(batch.adapter, rule_set):
        raise MissingRuleError(f"its output changes by {gap:.1e} (relative) under {rule_set.name}")
    context.capabilities.verified_rule_sets.add(rule_set)


def _get_tolerance(adapter: ModelAdapter, rule_set: RuleSet) -> float:
    """The accepted difference; on a GPU, torch may compute float32 in TF32, which keeps as many bits as float16."""
    may_use_tf32 = rule_set.needs_float64 and adapter.dtype == torch.float32 and adapter.device.type == "cuda"
    return RELATIVE_TOLERANCE_BY_DTYPE.get(torch.float16 if may_use_tf32 else adapter.dtype, 1e-4)


@contextmanager
def _named_unsupported_errors(method_runs: Sequence[MethodRun], batch: TargetBatch) -> Iterator[None]:
    """Name the method and the model in errors about missing rules or positions, and in-place changes of inputs."""
    adapter = batch.adapter
    try:
        with translate_inplace_errors():
            yield
    except (MissingRuleError, MissingPositionsError) as error:
        raise UnsupportedError(
            f"{method_runs[0].method.name} cannot explain {adapter.name}: in {adapter.model_class_name}, {error}"
        ) from None
