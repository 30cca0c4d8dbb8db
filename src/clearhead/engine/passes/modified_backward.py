"""The kind "rules": a pass whose operations are differentiated by other rules, beside an ordinary one where asked for.

Calls come with `relevance`, what arrives at their attention under the rules, and, for a method that is `beside`, with
the ordinary gradient. `tape.input_gradient` is what arrives at the inputs under the rules. A family that amplifies
rounding has passes in float64 (`backward_rules/float64_mode.py`), and so has the ordinary one beside it; what a method
is handed of calls is in its own format again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.backward_rules.base import MissingRuleError, RuleSet, translate_inplace_errors
from clearhead.backward_rules.float64_mode import FLOAT64, Float64Mode, supports_float64
from clearhead.backward_rules.mode import RuleMode, apply_rules
from clearhead.backward_rules.peft_merging import UnmergeableAdapterError
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE, SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import parameters_requiring_grad
from clearhead.capture.tape import AttentionCall, Requirements, Tape
from clearhead.engine.target_batch import MethodRun, TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.machine_failures import is_machine_failure
from clearhead.methods._modified_backward import ModifiedBackwardMixin
from clearhead.methods.base import Method, MethodScores
from clearhead.targets import Target

#: Of the size of what relevance starts with: a sum below it is none.
ZERO_RELEVANCE_TOLERANCE = 1e-5
#: How large the numbers are that models put out, at least.
MIN_OUTPUT_SCALE = 1.0
#: For each recorder, the families of rules under which its model was seen to compute what it always computes.
_verified_rule_sets: "WeakKeyDictionary[Recorder, set[RuleSet]]" = WeakKeyDictionary()
#: For each recorder, method and choice of rules.
_rule_trials: "WeakKeyDictionary[Recorder, dict[tuple[str, str | None], RuleTrial]]" = WeakKeyDictionary()


def run_modified_backward_passes(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """One pass for each family of rules, and an ordinary one for all methods that compare."""
    families = list(dict.fromkeys(_get_rule_method(reading).rule_set for reading in method_runs))
    tapes: dict[RuleSet, Tape] = {}
    kept: dict[tuple[RuleSet, str, str, int], Float[Tensor, "batch head query key"]] = {}
    for family in families:
        own = [reading for reading in method_runs if _get_rule_method(reading).rule_set == family]

        def visit(call: AttentionCall, family: RuleSet = family, own: Sequence[MethodRun] = own) -> None:
            if (
                any(_get_rule_method(reading).needs_standard_gradient for reading in own)
                and call.attention_gradient is not None
            ):
                kept[family, *_get_call_key(call)] = call.attention_gradient
            for reading in own:
                if not _get_rule_method(reading).needs_standard_gradient:
                    reading.process_call(replace(call, relevance=call.attention_gradient, attention_gradient=None))

        with _named_unsupported_errors(own, batch):
            with _target_under_rules(batch, family):
                tapes[family] = batch.to_unit_vectors(
                    _run_pass(_recorder_under_rules(recorder, family, batch), batch, own, self_test, visit)
                )
            _check_output_unchanged(recorder, batch, family)
    compare = [reading for reading in method_runs if _get_rule_method(reading).needs_standard_gradient]
    if compare:

        def visit_beside(call: AttentionCall) -> None:
            for reading in compare:
                if reading.needs_layer(*_get_call_key(call)):
                    reading.process_call(
                        replace(call, relevance=kept[_get_rule_method(reading).rule_set, *_get_call_key(call)])
                    )
            for family in families:
                kept.pop((family, *_get_call_key(call)), None)

        wide = any(_get_rule_method(reading).rule_set.needs_float64 for reading in compare)
        _run_pass(
            _recorder_with_scope(recorder, batch, wide, Float64Mode if wide else nullcontext),
            batch,
            compare,
            self_test,
            visit_beside,
        )
    finished = [reading.compute_scores(tapes[_get_rule_method(reading).rule_set]) for reading in method_runs]
    return [
        {stream: replace(one, scores=one.scores.to(batch.compute_dtype)) for stream, one in by.items()}
        for by in finished
    ]


@dataclass(frozen=True)
class RuleTrial:
    """What one forward pass of one sample, twice in a batch, showed: why a model cannot run under a method's rules
    (None if it can), and whether samples of a batch stay apart under them."""

    unsupported_reason: str | None
    is_batch_safe: bool


def find_rules_unsupported_reason(
    recorder: Recorder, adapter: ModelAdapter, sample: Sample, method: Method
) -> str | None:
    return get_rule_trial(recorder, adapter, sample, method).unsupported_reason


def get_rule_trial(recorder: Recorder, adapter: ModelAdapter, sample: Sample, method: Method) -> RuleTrial:
    """Made once for each method and choice of rules.

    Raises:
        RuntimeError: What torch or the model raised, where it does not come from the rules. It is not remembered: the
            next call tries again.
    """
    known, key = _rule_trials.setdefault(recorder, {}), (method.name, method.get_option("rules"))
    if key not in known:
        assert recorder.self_test is not None
        plan = TargetBatch(adapter, [sample, sample], [[Target(lambda output: output)]] * 2)
        family = _get_rule_method(MethodRun(method, plan, recorder.self_test)).rule_set.make_probe_variant()
        why_not = None

        def run_under_rules() -> None:
            with translate_inplace_errors():
                _recorder_under_rules(recorder, family, plan).forward(plan.model_inputs, frozenset(), plan.leaves)

        with (
            recorder.session.running(with_gradients=True),
            parameters_requiring_grad(recorder.grad_parameters),
        ):
            try:
                run_under_rules()
            except UnmergeableAdapterError as problem:
                return RuleTrial(f"in {adapter.model_class_name}, {problem}", family.is_batch_safe)
            except MissingRuleError as problem:
                why_not = f"in {adapter.model_class_name}, {problem}"
            except RuntimeError as problem:
                plainly = partial(recorder.forward, plan.model_inputs, frozenset(), plan.leaves)
                if not _comes_from_rules(problem, plainly, run_under_rules):
                    raise
                why_not = (
                    f"{adapter.model_class_name} does not run under {family.name}{_format_failure(problem, family)}"
                )
        if family.needs_float64 and adapter.dtype == torch.float16 and not supports_float64(adapter.device):
            why_not = (
                f"{family.name} divides by numbers that float16 cannot represent: load the model with dtype='float32'"
            )
        known[key] = RuleTrial(why_not, family.is_batch_safe)
    return known[key]


def _comes_from_rules(
    problem: RuntimeError, run_plainly: Callable[[], object], run_under_rules: Callable[[], object]
) -> bool:
    """Whether the model runs without the rules, and fails under them in the same way once more.

    Args:
        problem: What the first pass under the rules raised.
        run_plainly: Makes the same pass without the rules.
        run_under_rules: Makes the pass under the rules again.
    """
    if is_machine_failure(problem):
        return False
    try:
        run_plainly()
    except RuntimeError:
        return False
    try:
        run_under_rules()
    except RuntimeError as again:
        return _described(again) == _described(problem)
    return False


def _format_failure(problem: RuntimeError, family: RuleSet) -> str:
    """What went wrong, in torch's own words: float64 may be the cause or not."""
    return f"{', whose passes are in float64' if family.needs_float64 else ''}: {_described(problem)}"


def _described(problem: RuntimeError) -> str:
    """The class of an error, and the first line of its message."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def _get_rule_method(reading: MethodRun) -> ModifiedBackwardMixin:
    return cast(ModifiedBackwardMixin, reading.any_instance)


def _get_call_key(call: AttentionCall) -> tuple[str, str, int]:
    return call.query_stream, call.key_stream, call.layer


def _recorder_under_rules(recorder: Recorder, family: RuleSet, plan: TargetBatch) -> Recorder:
    """The same recorder, whose passes are differentiated by these rules."""
    return _recorder_with_scope(
        recorder, plan, family.needs_float64, partial(apply_rules, recorder.model, family, plan.num_samples)
    )


def _recorder_with_scope(
    recorder: Recorder, plan: TargetBatch, wide: bool, inner: Callable[[], AbstractContextManager[object]]
) -> Recorder:
    """The same recorder, whose passes run inside `inner`, too, in float64 where they are wide."""
    scoped = copy(recorder)
    if wide and supports_float64(plan.adapter.device):
        scoped.leaf_dtype = FLOAT64

    @contextmanager
    def scope() -> Iterator[None]:
        with recorder.scope(), inner():
            yield

    scoped.scope = scope
    return scoped


@contextmanager
def _target_under_rules(plan: TargetBatch, family: RuleSet) -> Iterator[None]:
    """Scores that are products of what the model puts out (a cosine) are made by these rules, too, and what relevance
    starts with must be something where rules keep its sum."""
    plan.scoring_context = partial(RuleMode, family, plan.num_samples)
    plan.before_backward = _check_nonzero_start if family.conserves_sum else None
    try:
        yield
    finally:
        plan.scoring_context, plan.before_backward = nullcontext, None


def _check_nonzero_start(numbers: Float[Tensor, "target batch"], scores: Tensor) -> None:
    """Target by target: added up, one that starts with nothing would hide behind the others."""
    if not scores.requires_grad:
        return
    empty = [place for place, number in enumerate(numbers) if _relevance_sums_to_zero(number, scores)]
    if empty:
        several = f" (of {len(numbers)} targets, those at {', '.join(map(str, empty))})" if len(numbers) > 1 else ""
        raise MissingRuleError(
            f"the target{several} subtracts some classes from another (as a contrast, a probability and log-odds do), "
            "so its relevance starts with a sum of zero. These rules conserve that sum, and only rounding errors "
            "remain. Explain the logits of the classes and subtract them, or use rules='orig' or attn-lrp"
        )


def _relevance_sums_to_zero(number: Float[Tensor, " batch"], scores: Tensor) -> bool:
    (start,) = torch.autograd.grad(number.sum(), scores, retain_graph=True, allow_unused=True)
    if start is None:
        return False
    parts = start.reshape(len(scores), -1)
    return bool(((parts.sum(1).abs() <= ZERO_RELEVANCE_TOLERANCE * parts.abs().sum(1)) & parts.any(1)).any())


def _run_pass(
    recorder: Recorder,
    plan: TargetBatch,
    readings: Sequence[MethodRun],
    tested: SelfTest,
    visit: Callable[[AttentionCall], None],
) -> Tape:
    asks: Requirements = frozenset().union(*(reading.requires for reading in readings))
    places = [
        i
        for i, place in enumerate(tested.call_sites)
        if any(reading.needs_layer(place.query_stream, place.key_stream, place.layer) for reading in readings)
    ]
    device = plan.adapter.device
    return recorder.run(
        plan.model_inputs,
        plan.compute_target,
        asks,
        lambda call: visit(call.to(device, plan.compute_dtype)),
        leaves=plan.leaves,
        call_indices=places,
        head_rows=plan.head_rows,
    )


def _check_output_unchanged(recorder: Recorder, plan: TargetBatch, family: RuleSet) -> None:
    """The first time: the rules change how a pass is differentiated, and must not change what it computes."""
    if family in _verified_rule_sets.setdefault(recorder, set()):
        return
    ruled = plan.target_values.flatten()
    real = recorder.run(plan.model_inputs, plan.compute_target, (), leaves=plan.leaves).value
    assert real is not None
    scores = plan.class_scores.abs().max().item() if isinstance(plan.class_scores, Tensor) else 0.0
    # a number near zero differs by the rounding of those that it is made of, which are larger
    gap = float((ruled - real.flatten()).abs().max()) / max(float(real.abs().max()), scores, MIN_OUTPUT_SCALE)
    if not gap <= _get_tolerance(plan.adapter, family):
        raise MissingRuleError(f"its output changes by {gap:.1e} (relative) under {family.name}")
    _verified_rule_sets[recorder].add(family)


def _get_tolerance(subject: ModelAdapter, family: RuleSet) -> float:
    """Torch may compute float32 on a GPU in TF32 (convolutions by default), which keeps as many bits as float16."""
    shortened = family.needs_float64 and subject.dtype == torch.float32 and subject.device.type == "cuda"
    return RELATIVE_TOLERANCE_BY_DTYPE.get(torch.float16 if shortened else subject.dtype, 1e-4)


@contextmanager
def _named_unsupported_errors(readings: Sequence[MethodRun], plan: TargetBatch) -> Iterator[None]:
    """Say for whom an operation has no rule, or changes in place what a rule needs afterwards."""
    subject, name = plan.adapter, readings[0].method.name
    try:
        with translate_inplace_errors():
            yield
    except MissingRuleError as problem:
        raise UnsupportedError(
            f"{name} cannot explain {subject.name}: in {subject.model_class_name}, {problem}"
        ) from None
