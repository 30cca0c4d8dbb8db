"""The kind "edits": a tape of a pass in which something was replaced, and of what that did.

Calls come with `moved`: how far each unit's state moves in this layer without the values of each other unit.
"""

from collections.abc import Sequence

from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import AttentionCall
from clearhead.engine.target_batch import MethodRun, TargetBatch
from clearhead.interventions.value_zeroing import value_zeroing_distances
from clearhead.methods.base import MethodScores


def run_intervention_pass(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """One pass for all of them; layers that nobody wants run once."""
    chosen = {
        number
        for number, place in enumerate(self_test.call_sites)
        if any(reading.needs_layer(place.query_stream, place.key_stream, place.layer) for reading in method_runs)
    }
    with (
        recorder.session.running(),
        value_zeroing_distances(recorder.session.topology, self_test.call_sites, chosen) as found,
    ):
        tape = recorder.run(batch.model_inputs, batch.compute_target, (), leaves=batch.leaves)
    for number in sorted(found, reverse=True):
        place, moved = self_test.call_sites[number], found.pop(number).to(batch.adapter.device)
        call = AttentionCall(place.layer, place.module, "self", place.query_stream, place.key_stream)
        call.moved = moved.expand(batch.targets_per_sample, *moved.shape).flatten(0, 1)  # the same for each target
        for reading in method_runs:
            reading.process_call(call)
    tape = batch.to_unit_vectors(tape)
    return [reading.compute_scores(tape) for reading in method_runs]
