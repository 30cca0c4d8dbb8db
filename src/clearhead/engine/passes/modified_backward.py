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

from clearhead.adapters.base import Sample, Subject
from clearhead.backward_rules.base import Family, NoRule, in_place_has_no_rule
from clearhead.backward_rules.float64_mode import WIDE, Wide, has_wide
from clearhead.backward_rules.mode import Rules, under
from clearhead.backward_rules.peft_merging import NotMergeable
from clearhead.capture.checks.self_test import TOLERANCE, SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest, starting
from clearhead.capture.tape import Asks, Call, Tape
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import Refusal
from clearhead.machine_failures import is_machine_failure
from clearhead.methods._modified_backward import ByRules
from clearhead.methods.base import Method, Scores
from clearhead.targets import Target

#: Of the size of what relevance starts with: a sum below it is none.
NOTHING = 1e-5
#: How large the numbers are that models put out, at least.
USUAL = 1.0
#: For each recorder, the families of rules under which its model was seen to compute what it always computes.
_checked: "WeakKeyDictionary[Recorder, set[Family]]" = WeakKeyDictionary()
#: For each recorder, method and choice of rules.
_trials: "WeakKeyDictionary[Recorder, dict[tuple[str, str | None], Trial]]" = WeakKeyDictionary()


def from_rules(
    recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest
) -> list[dict[str, Scores]]:
    """One pass for each family of rules, and an ordinary one for all methods that compare."""
    families = list(dict.fromkeys(_fold(reading).family for reading in readings))
    tapes: dict[Family, Tape] = {}
    kept: dict[tuple[Family, str, str, int], Float[Tensor, "batch head query key"]] = {}
    for family in families:
        own = [reading for reading in readings if _fold(reading).family == family]

        def visit(call: Call, family: Family = family, own: Sequence[Reading] = own) -> None:
            if any(_fold(reading).beside for reading in own) and call.attention_gradient is not None:
                kept[family, *_place(call)] = call.attention_gradient
            for reading in own:
                if not _fold(reading).beside:
                    reading.visit(replace(call, relevance=call.attention_gradient, attention_gradient=None))

        with _refusing(own, plan):
            with _target_by(plan, family):
                tapes[family] = plan.arranged(_pass(_under(recorder, family, plan), plan, own, tested, visit))
            _check(recorder, plan, family)
    compare = [reading for reading in readings if _fold(reading).beside]
    if compare:

        def visit_beside(call: Call) -> None:
            for reading in compare:
                if reading.wants(*_place(call)):
                    reading.visit(replace(call, relevance=kept[_fold(reading).family, *_place(call)]))
            for family in families:
                kept.pop((family, *_place(call)), None)

        wide = any(_fold(reading).family.wide for reading in compare)
        _pass(_in_scope(recorder, plan, wide, Wide if wide else nullcontext), plan, compare, tested, visit_beside)
    finished = [reading.finish(tapes[_fold(reading).family]) for reading in readings]
    return [{stream: replace(one, scores=one.scores.to(plan.dtype)) for stream, one in by.items()} for by in finished]


@dataclass(frozen=True)
class Trial:
    """What one forward pass of one sample, twice in a batch, showed: why a model cannot run under a method's rules
    (None if it can), and whether samples of a batch stay apart under them."""

    why_not: str | None
    keeps_apart: bool


def why_not(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> str | None:
    return trial(recorder, subject, sample, method).why_not


def trial(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> Trial:
    """Made once for each method and choice of rules.

    Raises:
        RuntimeError: What torch or the model raised, where it does not come from the rules. It is not remembered: the
            next call tries again.
    """
    known, key = _trials.setdefault(recorder, {}), (method.name, method.option("rules"))
    if key not in known:
        assert recorder.tested is not None
        plan = Plan(subject, [sample, sample], [[Target(lambda output: output)]] * 2)
        family = _fold(Reading(method, plan, recorder.tested)).family.twice()
        why_not = None

        def run_under_rules() -> None:
            with in_place_has_no_rule():
                _under(recorder, family, plan).forward(plan.batch, frozenset(), plan.leaves)

        with (
            recorder.lock,
            at_rest(recorder.model),
            torch.inference_mode(False),
            torch.enable_grad(),
            starting(recorder.learned),
        ):
            try:
                run_under_rules()
            except NotMergeable as problem:
                return Trial(f"in {subject.model_class}, {problem}", family.keeps_apart)
            except NoRule as problem:
                why_not = f"in {subject.model_class}, {problem}"
            except RuntimeError as problem:
                plainly = partial(recorder.forward, plan.batch, frozenset(), plan.leaves)
                if not _comes_from_rules(problem, plainly, run_under_rules):
                    raise
                why_not = f"{subject.model_class} does not run under {family.name}{_failed(problem, family)}"
        if family.wide and subject.dtype == torch.float16 and not has_wide(subject.device):
            why_not = f"{family.name} divides by numbers that float16 has not: load the model with dtype='float32'"
        known[key] = Trial(why_not, family.keeps_apart)
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


def _failed(problem: RuntimeError, family: Family) -> str:
    """What went wrong, in torch's own words: float64 may be the cause or not."""
    return f"{', whose passes are in float64' if family.wide else ''}: {_described(problem)}"


def _described(problem: RuntimeError) -> str:
    """The class of an error, and the first line of its message."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def _fold(reading: Reading) -> ByRules:
    return cast(ByRules, reading.any_fold)


def _place(call: Call) -> tuple[str, str, int]:
    return call.query_stream, call.key_stream, call.layer


def _under(recorder: Recorder, family: Family, plan: Plan) -> Recorder:
    """The same recorder, whose passes are differentiated by these rules."""
    return _in_scope(recorder, plan, family.wide, partial(under, recorder.model, family, plan.size))


def _in_scope(
    recorder: Recorder, plan: Plan, wide: bool, inner: Callable[[], AbstractContextManager[object]]
) -> Recorder:
    """The same recorder, whose passes run inside `inner`, too, in float64 where they are wide."""
    scoped = copy(recorder)
    if wide and has_wide(plan.subject.device):
        scoped.starts_in = WIDE

    @contextmanager
    def scope() -> Iterator[None]:
        with recorder.scope(), inner():
            yield

    scoped.scope = scope
    return scoped


@contextmanager
def _target_by(plan: Plan, family: Family) -> Iterator[None]:
    """Scores that are products of what the model puts out (a cosine) are made by these rules, too, and what relevance
    starts with must be something where rules keep its sum."""
    plan.multiplying = partial(Rules, family, plan.size)
    plan.starting = _something if family.keeps_sums else None
    try:
        yield
    finally:
        plan.multiplying, plan.starting = nullcontext, None


def _something(numbers: Float[Tensor, "target batch"], scores: Tensor) -> None:
    """Target by target: added up, one that starts with nothing would hide behind the others."""
    if not scores.requires_grad:
        return
    empty = [place for place, number in enumerate(numbers) if _starts_with_nothing(number, scores)]
    if empty:
        several = f" (of {len(numbers)} targets, those at {', '.join(map(str, empty))})" if len(numbers) > 1 else ""
        raise NoRule(
            f"what is explained{several} takes from some classes what it gives to another (as a contrast, a "
            "probability and log-odds do): relevance then starts with a sum of zero, which these rules keep, so that "
            "nothing but rounding arrives. Explain the logits of the classes and subtract, or take rules='orig', or "
            "attn-lrp"
        )


def _starts_with_nothing(number: Float[Tensor, " batch"], scores: Tensor) -> bool:
    (start,) = torch.autograd.grad(number.sum(), scores, retain_graph=True, allow_unused=True)
    if start is None:
        return False
    parts = start.reshape(len(scores), -1)
    return bool(((parts.sum(1).abs() <= NOTHING * parts.abs().sum(1)) & parts.any(1)).any())


def _pass(
    recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest, visit: Callable[[Call], None]
) -> Tape:
    asks: Asks = frozenset().union(*(reading.asks for reading in readings))
    places = [
        i
        for i, place in enumerate(tested.places)
        if any(reading.wants(place.query_stream, place.key_stream, place.layer) for reading in readings)
    ]
    device = plan.subject.device
    return recorder.run(
        plan.batch,
        plan.value,
        asks,
        lambda call: visit(call.to(device, plan.dtype)),
        leaves=plan.leaves,
        places=places,
        rows=plan.rows,
    )


def _check(recorder: Recorder, plan: Plan, family: Family) -> None:
    """The first time: the rules change how a pass is differentiated, and must not change what it computes."""
    if family in _checked.setdefault(recorder, set()):
        return
    ruled = plan.values.flatten()
    real = recorder.run(plan.batch, plan.value, (), leaves=plan.leaves).value
    assert real is not None
    scores = plan.scores.abs().max().item() if isinstance(plan.scores, Tensor) else 0.0
    # a number near zero differs by the rounding of those that it is made of, which are larger
    gap = float((ruled - real.flatten()).abs().max()) / max(float(real.abs().max()), scores, USUAL)
    if not gap <= _tolerance(plan.subject, family):
        raise NoRule(f"its output changes by {gap:.1e} (relative) under {family.name}")
    _checked[recorder].add(family)


def _tolerance(subject: Subject, family: Family) -> float:
    """Torch may compute float32 on a GPU in TF32 (convolutions by default), which keeps as many bits as float16."""
    shortened = family.wide and subject.dtype == torch.float32 and subject.device.type == "cuda"
    return TOLERANCE.get(torch.float16 if shortened else subject.dtype, 1e-4)


@contextmanager
def _refusing(readings: Sequence[Reading], plan: Plan) -> Iterator[None]:
    """Say for whom an operation has no rule, or changes in place what a rule needs afterwards."""
    subject, name = plan.subject, readings[0].method.name
    try:
        with in_place_has_no_rule():
            yield
    except NoRule as problem:
        raise Refusal(f"{name} cannot explain {subject.name}: in {subject.model_class}, {problem}") from None
