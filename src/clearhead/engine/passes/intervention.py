"""The kind "edits": a tape of a pass in which something was replaced, and of what that did.

Calls come with `moved`: how far each unit's state moves in this layer without the values of each other unit.
"""

from collections.abc import Sequence

import torch

from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Call
from clearhead.engine.target_batch import Plan, Reading
from clearhead.interventions.value_zeroing import zeroing
from clearhead.methods.base import Scores


def from_edits(
    recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest
) -> list[dict[str, Scores]]:
    """One pass for all of them; layers that nobody wants run once."""
    chosen = {
        number
        for number, place in enumerate(tested.places)
        if any(reading.wants(place.query_stream, place.key_stream, place.layer) for reading in readings)
    }
    with recorder.lock, torch.no_grad(), zeroing(recorder.model, tested.places, chosen) as found:
        tape = recorder.run(plan.batch, plan.value, (), leaves=plan.leaves)
    for number in sorted(found, reverse=True):
        place, moved = tested.places[number], found.pop(number).to(plan.subject.device)
        call = Call(place.layer, place.module, "self", place.query_stream, place.key_stream)
        call.moved = moved.expand(plan.steps, *moved.shape).flatten(0, 1)  # the same for each target
        for reading in readings:
            reading.visit(call)
    tape = plan.arranged(tape)
    return [reading.finish(tape) for reading in readings]
