"""What methods are handed: each kind of ask turns the declarations of its methods into the fewest passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Requirements
from clearhead.engine.memory_budget import budgeted_passes
from clearhead.engine.passes import modified_backward, perturbation, reference
from clearhead.engine.passes.intervention import run_intervention_pass
from clearhead.engine.passes.modified_backward import run_modified_backward_passes
from clearhead.engine.passes.path import run_path_passes
from clearhead.engine.passes.perturbation import run_perturbation_passes
from clearhead.engine.passes.reference import run_reference_passes
from clearhead.engine.target_batch import MethodRun, TargetBatch, run_recorded_pass
from clearhead.methods.base import Method, MethodScores

#: One batch, the methods of one kind → for each method, the scores along each axis.
PassRunner = Callable[[Recorder, TargetBatch, Sequence[MethodRun], SelfTest], list[dict[str, MethodScores]]]
#: A recorder that was tested, its subject, the sample it was tested on, the method.
SupportCheck = Callable[[Recorder, ModelAdapter, Sample, Method], str | None]


def run_tape_pass(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """One recorded pass for all of them, folded call by call."""
    asks: Requirements = frozenset().union(*(reading.requires for reading in method_runs))
    tape = batch.to_unit_vectors(run_recorded_pass(recorder, batch, method_runs, self_test, asks))
    return [reading.compute_scores(tape) for reading in method_runs]


def _is_always_supported(recorder: Recorder, subject: ModelAdapter, sample: Sample, method: Method) -> str | None:
    return None


@dataclass(frozen=True)
class PassType:
    """How methods of one kind are run, and why one of them cannot speak for a model (None if it can)."""

    run: PassRunner
    find_unsupported_reason: SupportCheck = _is_always_supported


PASS_TYPES: dict[str, PassType] = {
    "tape": PassType(run_tape_pass),
    "path": PassType(run_path_passes),
    "rules": PassType(run_modified_backward_passes, modified_backward.find_rules_unsupported_reason),
    "reference": PassType(run_reference_passes, reference.find_reference_unsupported_reason),
    "edits": PassType(run_intervention_pass),
    "values": PassType(run_perturbation_passes, perturbation.find_perturbation_unsupported_reason),
}


def find_pass_unsupported_reason(
    recorder: Recorder, adapter: ModelAdapter, sample: Sample, method: Method
) -> str | None:
    """Why what a method is handed cannot be had from this model; None if it can."""
    return PASS_TYPES[method.pass_type].find_unsupported_reason(recorder, adapter, sample, method)


def run_passes(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    """All methods on one batch, those of one kind together, in the order in which they were asked for.

    Of a streaming plan, those that need whole maps have passes of their own.
    """
    found: dict[int, dict[str, MethodScores]] = {}
    tiles = batch.tiling
    groups: dict[tuple[str, bool], list[int]] = {}
    for i, reading in enumerate(method_runs):
        groups.setdefault((reading.method.pass_type, tiles is not None and reading.supports_tiling), []).append(i)
    for (kind, streaming), places in groups.items():
        batch.tiling = tiles if streaming else None
        with budgeted_passes(kind, len(batch.truncated_samples), batch.max_units):
            parts = PASS_TYPES[kind].run(recorder, batch, [method_runs[i] for i in places], self_test)
        found |= dict(zip(places, parts, strict=True))
    batch.tiling = tiles
    return [found[i] for i in range(len(method_runs))]
