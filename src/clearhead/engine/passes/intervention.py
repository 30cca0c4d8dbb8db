"""Value zeroing: a forward pass in which each selected layer runs once more for every unit, without its values.

Calls have `moved`: how far the state of each unit moves in this layer without the values of each other unit.
"""

from collections.abc import Sequence

from clearhead.capture.tape import AttentionCall
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.target_batch import TargetFunction
from clearhead.interventions.value_zeroing import value_zeroing_distances
from clearhead.methods.pass_type import PassType


class InterventionStrategy(PassStrategy):
    """Methods that run layers again with parts of them replaced."""

    pass_type = PassType.INTERVENTION

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """One forward pass for all methods, in which layers run again for each unit."""
        return [PassCount("each selected layer again for every unit", method_runs, 1, rows=context.batch.num_samples)]

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Run one pass for all methods; layers that no method needs run once."""
        batch = context.batch
        recorder = context.recorder
        call_sites = context.self_test.call_sites
        selected = {
            i for i, site in enumerate(call_sites) if any(method_run.needs_call(site) for method_run in method_runs)
        }
        target_function = TargetFunction(batch)
        with (
            recorder.session.running(),
            value_zeroing_distances(recorder.session.topology, call_sites, selected) as distances,
        ):
            tape = recorder.run(batch.model_inputs, target_function, (), leaves=batch.leaves, captures_maps=True)
        for i in sorted(distances, reverse=True):
            site = call_sites[i]
            distance = distances.pop(i).to(batch.adapter.device)
            call = AttentionCall(site.layer, site.module, "self", site.query_stream, site.key_stream)
            call.value_zeroing_distance = distance.expand(batch.targets_per_sample, *distance.shape).flatten(0, 1)
            for method_run in method_runs:
                method_run.process_call(call)
        tape = batch.to_unit_vectors(tape)
        return [MethodResult(method_run.compute_scores(tape), target_function.result) for method_run in method_runs]
