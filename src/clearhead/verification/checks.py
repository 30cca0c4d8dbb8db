"""The promises and how each is measured: a table of small functions. Another axiom is one more entry."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.capture.checks.self_test import TOLERANCE
from clearhead.capture.recorder import Recorder
from clearhead.errors import ClearheadError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import REGISTRY, Method
from clearhead.targets import Contrast, Generated
from clearhead.verification.example_inputs import longer, reads_text, turned
from clearhead.verification.metrics import gap, size, value
from clearhead.verification.model_state import state_of

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: What rounding may do to scores, relative to the largest of them, by the format of the weights: what the recorder's
#: own test allows. Tiny models need less; in trained ones sums of large numbers leave small scores, and some compute
#: their norms in float32 whatever the format.
ROUNDING = TOLERANCE
#: What may be missing of an integral that is a sum of steps: "within 5%" (Sundararajan, Taly & Yan, 2017, section 5).
OF_STEPS = 0.05
#: Axioms of models whose answer is known beforehand: no trained model shows them, a test of clearhead's own does.
ELSEWHERE = (
    "exact on linear models",
    "exact on additive games",
    "nothing for what does not count",
    "implementation invariant",
)


class NotHere(Exception):
    """A promise that cannot be asked of this method on this model; the message says why."""


@dataclass(frozen=True)
class Measured:
    """A figure that holds if it is no larger than the bound."""

    figure: float
    bound: float
    #: What was found, where a number does not say it.
    found: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound


@dataclass
class Case:
    """One method on one model with its inputs; what several measurements need is explained once."""

    ex: "Explainer"
    method: Method
    raws: list[Any]
    seed: int
    options: dict[str, Any]
    #: The model before the first measurement.
    before: dict[str, Any] = field(default_factory=dict)

    def explained(self, raws: Sequence[Any], **how: Any) -> list[AnyExplanation]:
        asked = {"method": self.method, "seed": self.seed, **self.options, **how}
        found: list[AnyExplanation] = self.ex.explain(list(raws), batch_size=max(len(raws), 1), **asked)
        return found

    @cached_property
    def alone(self) -> list[AnyExplanation]:
        """One input at a time."""
        return [one for raw in self.raws for one in self.explained([raw])]

    @property
    def rounding(self) -> float:
        """Methods by rules that amplify rounding compute in float64, whatever the format of a model."""
        told = self.method.declaration
        within = ROUNDING.get(self.ex.subject.dtype, 1e-4)
        if told.kind == "rules" and told.amplifies > 1:
            return max(within, 1e-9 * told.amplifies)
        return within * told.amplifies

    def alike(self, found: Sequence[AnyExplanation], other: Sequence[AnyExplanation]) -> Measured:
        """How far explanations are from others that should be the same up to rounding."""
        pairs = list(zip(found, other, strict=True))
        figure = max(gap(one, two) for one, two in pairs)
        if figure > self.rounding and max(size(two) / max(abs(value(two)), 1) for _, two in pairs) < 1e-6:
            raise NotHere("its scores are next to nothing on this input: what there is of them is rounding")
        return Measured(figure, self.rounding)


@dataclass(frozen=True)
class Check:
    """A promise in plain words, which methods make it, and how it is measured."""

    what: str
    measure: Callable[[Case], Measured]
    #: The axiom that a method declares; without one, `promised` says.
    axiom: str = ""
    promised: Callable[[Case], bool] = lambda case: True

    def asked_of(self, case: Case) -> bool:
        return self.axiom in case.method.declaration.axioms if self.axiom else self.promised(case)


# Declared axioms ------------------------------------------------------------------------------------------------------


def _missed(case: Case) -> float:
    """What the scores miss of the target's value less the base value, relative to the largest; as certified, too."""
    certified = [e.certificate.get("checks", {}).get("completeness_gap") for e in case.alone]
    added = [
        abs(e.base_value + sum(float(part.scores.sum()) for part in e.parts.values()) - value(e)) / max(size(e), 1e-30)
        for e in case.alone
        if e.base_value is not None
    ]
    found = [float(one) for one in (*certified, *added) if one is not None]
    if not found:
        raise NotHere("neither a base value nor a gap is told, so there is nothing to add up to")
    return max(found)


def complete(case: Case) -> Measured:
    return Measured(_missed(case), OF_STEPS if case.method.kind == "path" else case.rounding)


def complete_in_the_limit(case: Case) -> Measured:
    """With four times the steps there is at most half of the gap left."""
    return Measured(_missed(_with_steps(case, 4)), max(_missed(case) / 2, case.rounding))


def steps_suffice(case: Case) -> Measured:
    """What the scores miss of the integral: how far twice the steps move them, as that certificate says."""
    found = [e.certificate["checks"]["step_doubling_error"] for e in _with_steps(case, 2).alone]
    return Measured(max(map(float, found)), OF_STEPS)


def _with_steps(case: Case, times: int) -> Case:
    steps = case.method.option("steps", getattr(REGISTRY[case.method.name], "steps", None))
    if steps is None:
        raise NotHere("it has no steps= to give it more of")
    more = Method(case.method.name, **{**dict(case.method.options), "steps": times * steps})
    return Case(case.ex, more, case.raws, case.seed, case.options)


def rows_sum_to_one(case: Case) -> Measured:
    if any(len(e.parts) > 1 for e in case.alone):
        raise NotHere("several streams share a row")
    return Measured(max(abs(total - 1) for e in case.alone for total in _row_sums(e)), case.rounding)


def conserves_relevance(case: Case) -> Measured:
    if case.ex.subject.takes != ("text",):
        raise NotHere(
            "what parts of a model get that are no input (a class token) is no unit's; of texts there is none"
        )
    return Measured(max(abs(total - 1) for e in case.alone for total in _row_sums(e)), case.rounding)


def _row_sums(e: AnyExplanation) -> list[float]:
    """The sum of the scores, target by target."""
    parts = list(e.parts.values())
    if e.steps is None:
        return [sum(float(part.scores.sum()) for part in parts)]
    rows = [part.matrix.sum(1) for part in parts if part.matrix is not None]
    return [float(total) for total in np.sum(rows, axis=0)]


# Laws, and the rest of a declaration ----------------------------------------------------------------------------------


def shares_add_up(case: Case) -> Measured:
    """Contributions of layers add up to the scores; of depths, the last is the scores."""
    found = [
        np.abs((part.per_layer.sum(0) if whole else part.per_layer[-1]) - part.scores).max() / max(size(e), 1e-30)
        for whole in [case.method.declaration.parts == "contributions"]
        for e in case.alone
        for part in e.parts.values()
        if part.per_layer is not None
    ]
    if not found:
        raise NotHere("layers' shares are not kept where targets, rows or streams are several")
    return Measured(float(max(found)), case.rounding)


def same_again(case: Case) -> Measured:
    """Another state of torch's random numbers between the two: a method must not draw from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed + 1)
        again = [one for raw in case.raws for one in case.explained([raw])]
    exact = case.ex.subject.device.type == "cpu"  # sums on a GPU may take another order
    return Measured(max(map(gap, again, case.alone)), 0.0 if exact else case.rounding)


def batched_is_single(case: Case) -> Measured:
    together, _ = _beside(case, [] if len(case.raws) > 1 else [turned(case.raws[0], reads_text(case.ex.subject))])
    return case.alike(together, case.alone)


def padded_is_unpadded(case: Case) -> Measured:
    other = longer(case.ex.subject, max(case.raws, key=lambda raw: len(str(raw))))
    if other is None:
        raise NotHere("no longer input can be made of this one: only texts are padded")
    together, last = _beside(case, [other])
    if all(len(one) >= len(last[0]) for one in case.alone):
        raise NotHere("a longer input is cut to the length of this one, so nothing is padded")
    return case.alike(together, case.alone)


def _beside(case: Case, others: Sequence[Any]) -> tuple[list[AnyExplanation], list[AnyExplanation]]:
    """The inputs explained in one batch with others, and the others."""
    try:
        found = case.explained([*case.raws, *others])
    except ClearheadError as problem:
        raise NotHere(f"there is no batch with another input: {problem}") from None
    count = len(case.alone)
    moved = max(
        abs(value(one) - value(two)) / max(abs(value(two)), 1)
        for one, two in zip(found[:count], case.alone, strict=True)
    )
    if moved > ROUNDING.get(case.ex.subject.dtype, 1e-4):
        raise NotHere(f"the model's own answer depends on what shares a batch with it (it moves by {moved:.1g})")
    return found[:count], found[count:]


def linear_in_the_target(case: Case) -> Measured:
    """The scores of a contrast are the difference of the two labels' scores."""
    raw, e = case.raws[0], case.alone[0]
    if e.target["scale"] == "log-odds" and not case.ex.subject.multi_label:
        raise NotHere("the log-odds of one class against another are not the difference of the two classes' log-odds")
    one, other = _two_labels(e)
    targets: tuple[Any, ...] = (one, other, Contrast(one, other))
    if e.target["kind"] == "generated word":
        place = e.target["place"]
        targets = (Generated(place, one), Generated(place, other), Generated(place, one, other))
    try:
        a, b, both = (case.explained([raw], target=target)[0] for target in targets)
    except ClearheadError as problem:
        raise NotHere(f"no contrast of two labels can be explained: {problem}") from None
    scale = max(size(a), size(b), 1e-30)
    figure = max(
        float(np.abs(part.scores - b[stream].scores - both[stream].scores).max()) for stream, part in a.parts.items()
    )
    return Measured(figure / scale, case.rounding)


def blind_to_the_target(case: Case) -> Measured:
    raw, e = case.raws[0], case.alone[0]
    try:
        found = case.explained([raw], target=_two_labels(e)[1])[0]
    except ClearheadError as problem:
        raise NotHere(f"no other target can be asked for: {problem}") from None
    return Measured(gap(found, e), 0.0)


def _two_labels(e: AnyExplanation) -> tuple[int, int]:
    """What is predicted, and the next likely label."""
    likely = [row["index"] for row in e.prediction.get("top", ())]
    if len(likely) < 2:
        raise NotHere("there is no second label to ask about")
    return likely[0], likely[1]


def never_negative(case: Case) -> Measured:
    lowest = min(
        float(array.min())
        for e in case.alone
        for part in e.parts.values()
        for array in (part.scores, part.matrix, part.per_layer)
        if array is not None
    )
    return Measured(max(0.0, -lowest), 0.0)


def recorded_is_real(case: Case) -> Measured:
    errors = [e.certificate[kind] for e in case.alone for kind in ("capture_error", "rebuild_error")]
    return Measured(
        max(float(error) for error in errors if error is not None), TOLERANCE.get(case.ex.subject.dtype, 1e-4)
    )


def streaming_is_materialised(case: Case) -> Measured:
    rows = max(1, len(case.alone[0]) // 3)  # several tiles, however short the input is
    try:
        with _tiles_of(case.ex.recorder, rows):
            found = [one for raw in case.raws for one in case.explained([raw], kernel="streaming")]
    except ClearheadError as problem:
        raise NotHere(str(problem)) from None
    whole = [one for raw in case.raws for one in case.explained([raw], kernel="materialised")]
    return case.alike(found, whole)


@contextmanager
def _tiles_of(recorder: Recorder, rows: int) -> Iterator[None]:
    before, recorder.tile_rows = recorder.tile_rows, rows
    try:
        yield
    finally:
        recorder.tile_rows = before


def untouched(case: Case) -> Measured:
    after = state_of(case.ex.subject.model)
    changed = [what for what in after if after[what] != case.before[what]]
    return Measured(float(len(changed)), 0.0, ", ".join(changed))


# The table ------------------------------------------------------------------------------------------------------------


CHECKS = (
    Check("scores add up to the target's value less the base value", complete, axiom="complete"),
    Check("scores add up the better the more steps there are", complete_in_the_limit, axiom="complete in the limit"),
    Check("scores add up to one", rows_sum_to_one, axiom="rows sum to one"),
    Check("relevance is conserved: scores add up to one", conserves_relevance, axiom="conserves relevance"),
    Check(
        "twice the steps would say the same",
        steps_suffice,
        promised=lambda case: "step_doubling_error" in case.alone[0].certificate.get("checks", {}),
    ),
    Check("no score is negative", never_negative, promised=lambda case: not case.alone[0].provenance["signed"]),
    Check(
        "layers' shares make up the scores",
        shares_add_up,
        promised=lambda case: case.method.declaration.parts is not None,
    ),
    Check(
        "a contrast's scores are the difference of the two labels'",
        linear_in_the_target,
        promised=lambda case: bool(case.alone[0].provenance["linear_in_target"]),
    ),
    Check(
        "another target changes nothing",
        blind_to_the_target,
        promised=lambda case: case.method.declaration.target == "none",
    ),
    Check("the same scores again", same_again),
    Check("the same scores in a batch", batched_is_single),
    Check("the same scores when padded", padded_is_unpadded),
    Check(
        "the same scores tile by tile as from whole maps",
        streaming_is_materialised,
        promised=lambda case: bool(case.method.declaration.asks) and REGISTRY[case.method.name].sweeps > 0,
    ),
    Check(
        "the recorded pass is the model's own",
        recorded_is_real,
        promised=lambda case: bool(case.method.declaration.asks),
    ),
    Check("the model is as it was before", untouched),  # last: after everything that was measured
)


def unmeasured(method: Method) -> Iterable[tuple[str, str]]:
    """The axioms that a method declares and nothing here measures, with the reason."""
    measured = {check.axiom for check in CHECKS}
    for axiom in method.declaration.axioms:
        if axiom in ELSEWHERE:
            yield axiom, "only a model whose answer is known beforehand shows it: clearhead's own tests ask it of such"
        elif axiom not in measured:
            yield axiom, "nothing here measures it: see clearhead.verification.checks.CHECKS"
