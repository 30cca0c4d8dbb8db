"""What methods are handed: each kind of ask turns the declarations of its methods into the fewest passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clearhead.adapters.base import Sample, Subject
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Asks
from clearhead.engine.memory_budget import passes_of
from clearhead.engine.passes import modified_backward, perturbation, reference
from clearhead.engine.passes.intervention import from_edits
from clearhead.engine.passes.modified_backward import from_rules
from clearhead.engine.passes.path import from_path
from clearhead.engine.passes.perturbation import from_values
from clearhead.engine.passes.reference import from_reference
from clearhead.engine.target_batch import Plan, Reading, recorded
from clearhead.methods.base import Method, Scores

#: One batch, the methods of one kind → for each method, the scores along each axis.
Run = Callable[[Recorder, Plan, Sequence[Reading], SelfTest], list[dict[str, Scores]]]
#: A recorder that was tested, its subject, the sample it was tested on, the method.
WhyNot = Callable[[Recorder, Subject, Sample, Method], str | None]


def from_tape(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """One recorded pass for all of them, folded call by call."""
    asks: Asks = frozenset().union(*(reading.asks for reading in readings))
    tape = plan.arranged(recorded(recorder, plan, readings, tested, asks))
    return [reading.finish(tape) for reading in readings]


def _can(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> str | None:
    return None


@dataclass(frozen=True)
class Kind:
    """How methods of one kind are run, and why one of them cannot speak for a model (None if it can)."""

    run: Run
    why_not: WhyNot = _can


KINDS: dict[str, Kind] = {
    "tape": Kind(from_tape),
    "path": Kind(from_path),
    "rules": Kind(from_rules, modified_backward.why_not),
    "reference": Kind(from_reference, reference.why_not),
    "edits": Kind(from_edits),
    "values": Kind(from_values, perturbation.why_not),
}


def why_not(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> str | None:
    """Why what a method is handed cannot be had from this model; None if it can."""
    return KINDS[method.kind].why_not(recorder, subject, sample, method)


def run(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """All methods on one batch, those of one kind together, in the order in which they were asked for.

    Of a streaming plan, those that need whole maps have passes of their own.
    """
    found: dict[int, dict[str, Scores]] = {}
    tiles = plan.streaming
    groups: dict[tuple[str, bool], list[int]] = {}
    for i, reading in enumerate(readings):
        groups.setdefault((reading.method.kind, tiles is not None and reading.streams), []).append(i)
    for (kind, streaming), places in groups.items():
        plan.streaming = tiles if streaming else None
        with passes_of(kind, len(plan.samples), plan.width):
            parts = KINDS[kind].run(recorder, plan, [readings[i] for i in places], tested)
        found |= dict(zip(places, parts, strict=True))
    plan.streaming = tiles
    return [found[i] for i in range(len(readings))]
