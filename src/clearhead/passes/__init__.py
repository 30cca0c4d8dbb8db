"""What methods are handed: each kind of ask turns the declarations of its methods into the fewest passes."""

from collections.abc import Callable, Sequence

from clearhead.methods.base import Scores
from clearhead.passes.path import from_path
from clearhead.passes.rules import from_rules
from clearhead.passes.values import from_values
from clearhead.plan import Plan, Reading, recorded
from clearhead.recording.recorder import Recorder
from clearhead.recording.self_test import SelfTest
from clearhead.recording.tape import Asks

#: One batch, the methods of one kind → for each method, the scores along each axis.
Run = Callable[[Recorder, Plan, Sequence[Reading], SelfTest], list[dict[str, Scores]]]


def from_tape(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """One recorded pass for all of them, folded call by call."""
    asks: Asks = frozenset().union(*(reading.asks for reading in readings))
    tape = plan.arranged(recorded(recorder, plan, readings, tested, asks))
    return [reading.finish(tape) for reading in readings]


PASSES: dict[str, Run] = {"tape": from_tape, "path": from_path, "rules": from_rules, "values": from_values}


def run(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """All methods on one batch, those of one kind together, in the order in which they were asked for."""
    found: dict[int, dict[str, Scores]] = {}
    for kind in dict.fromkeys(reading.method.kind for reading in readings):
        places = [i for i, reading in enumerate(readings) if reading.method.kind == kind]
        parts = PASSES[kind](recorder, plan, [readings[i] for i in places], tested)
        found |= dict(zip(places, parts, strict=True))
    return [found[i] for i in range(len(readings))]
