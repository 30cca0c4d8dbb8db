"""What methods are handed, by the kind of what they ask for: each kind turns its declarations into the fewest passes."""

from collections.abc import Callable, Sequence

from clearhead.methods.base import Scores
from clearhead.plan import Plan, Reading
from clearhead.recording.recorder import Recorder
from clearhead.recording.self_test import SelfTest
from clearhead.recording.tape import Asks, Call

#: One batch, the methods of one kind → for each method, the scores along each axis.
Run = Callable[[Recorder, Plan, Sequence[Reading], SelfTest], list[dict[str, Scores]]]


def from_tape(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """One recorded pass for all of them, folded call by call."""
    asks: Asks = frozenset().union(*(reading.asks for reading in readings))
    places = [
        i
        for i, place in enumerate(tested.places)
        if any(reading.wants(place.query_stream, place.key_stream, place.layer) for reading in readings)
    ]
    device = plan.subject.device

    def visit(call: Call) -> None:
        # a model may be spread over several devices: what it left on each is brought together
        gathered = call if all(part.device == device for _, part in call.tensors()) else call.to(device)
        for reading in readings:
            reading.visit(gathered)

    tape = recorder.run(plan.batch, plan.value, asks, visit, leaves=plan.leaves, places=places, rows=plan.rows)
    tape = plan.arranged(tape)
    return [reading.finish(tape) for reading in readings]


PASSES: dict[str, Run] = {"tape": from_tape}


def run(recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest) -> list[dict[str, Scores]]:
    """All methods on one batch, those of one kind together, in the order in which they were asked for."""
    found: dict[int, dict[str, Scores]] = {}
    for kind in dict.fromkeys(reading.method.declaration.kind for reading in readings):
        places = [i for i, reading in enumerate(readings) if reading.method.declaration.kind == kind]
        parts = PASSES[kind](recorder, plan, [readings[i] for i in places], tested)
        found |= dict(zip(places, parts, strict=True))
    return [found[i] for i in range(len(readings))]
