"""Explains one batch: plans its passes, runs them chunk by chunk of targets, and assembles the explanations."""

from collections.abc import Iterator, Sequence

import torch

from clearhead.capture.recorder import BatchedBackwardError
from clearhead.engine.assembly import BatchRequest, PassResult, assemble_explanations
from clearhead.engine.attention_mode import choose_attention_mode
from clearhead.engine.capabilities import ModelCapabilities
from clearhead.engine.combination import MethodSelection, collect_requested, select_methods
from clearhead.engine.memory_budget import CLEAN_PASS_NAME
from clearhead.engine.passes import STRATEGIES
from clearhead.engine.plan import BatchPlan, check_tiling_supported, iter_target_chunks, make_batch_plan
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError, UnsupportedError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import Method
from clearhead.profiles.base import Profile
from clearhead.sample import Sample
from clearhead.targets import Target


def find_pass_names(methods: Sequence[Method]) -> set[str]:
    """Return the names under which a memory budget measures the passes of these methods.

    Args:
        methods: Methods that share their passes.

    Returns:
        The values of their pass types, with that of the clean pass if one of them uses it.
    """
    names = {method.pass_type.value for method in methods}
    if any(STRATEGIES[method.pass_type].uses_clean_pass for method in methods):
        names.add(CLEAN_PASS_NAME)
    return names


def check_methods(
    capabilities: ModelCapabilities, samples: Sequence[Sample], methods: Sequence[Method], profile: Profile | None
) -> MethodSelection:
    """Check that all methods apply to the model, and return them with the methods that are run for them.

    Args:
        capabilities: What is known about the model.
        samples: The inputs; the shortest is used for the self-test.
        methods: The methods, with the options of the call and of the profile.
        profile: An author's settings.

    Returns:
        The requested methods, and those whose passes are run: the components of combined methods in their place.

    Raises:
        UnsupportedError: A method does not.
    """
    self_test = capabilities.run_self_test(samples)
    adapter = capabilities.adapter
    for method in methods:
        if reason := capabilities.find_unsupported_reason(method):
            raise UnsupportedError(f"{method.name} cannot explain {adapter.name}: {reason}")
        if profile is not None:
            profile.check_depth(method, self_test.min_layers, adapter.name)
    return select_methods(capabilities, methods)


def must_run_alone(capabilities: ModelCapabilities, methods: Sequence[Method]) -> bool:
    """Whether samples cannot share a batch, because the model or a method would mix them.

    Args:
        capabilities: What is known about the model.
        methods: The methods that are run.

    Returns:
        True if every batch may hold one sample only.
    """
    return capabilities.adapter.positions_depend_on_batch_length or not all(map(capabilities.is_batch_safe, methods))


@torch.inference_mode(False)  # tensors created in inference mode cannot be updated in place outside of it
def explain_batch(
    capabilities: ModelCapabilities,
    samples: Sequence[Sample],
    targets: Sequence[Target],
    request: BatchRequest,
    max_rows: int | None = None,
) -> list[list[AnyExplanation]]:
    """Run all methods on one batch, in one pass or in several if the targets do not fit into memory together.

    Args:
        capabilities: What is known about the model.
        samples: The samples.
        targets: The target of each sample; it may expand to several, such as the tokens of an answer.
        request: The methods, and the options of `explain`.
        max_rows: Largest number of samples × targets of one pass; None for no limit.

    Returns:
        For each sample, one explanation per method.
    """
    adapter = capabilities.adapter
    expanded = [adapter.expand_target(sample, target) for sample, target in zip(samples, targets, strict=True)]
    try:
        plans = iter_batch_plans(capabilities, samples, expanded, request, max_rows)
        pass_results = _run_plans(capabilities, plans, request)
    except BatchedBackwardError:  # an operation of the model cannot be batched over targets
        plans = iter_batch_plans(capabilities, samples, expanded, request, max_rows, runs_targets_together=False)
        pass_results = _run_plans(capabilities, plans, request)
    self_test = capabilities.run_self_test(samples)
    return assemble_explanations(samples, list(map(len, expanded)), pass_results, request, self_test)


def iter_batch_plans(
    capabilities: ModelCapabilities,
    samples: Sequence[Sample],
    targets: Sequence[Sequence[Target]],
    request: BatchRequest,
    max_rows: int | None = None,
    runs_targets_together: bool = True,
) -> Iterator[BatchPlan]:
    """Plan the passes of one batch, chunk by chunk of targets.

    Args:
        capabilities: What is known about the model.
        samples: The samples.
        targets: The targets of each sample.
        request: The methods, and the options of `explain`.
        max_rows: Largest number of samples × targets of one pass; None for no limit.
        runs_targets_together: Whether one pass may have several targets of a sample.

    Yields:
        The plan of each chunk of targets, before it is executed.

    Raises:
        InputError: If rows="all" is combined with several targets.
        UnsupportedError: If a method cannot be run with the requested kernel.
    """
    adapter = capabilities.adapter
    if max(map(len, targets)) > 1 and any(method.get_option("rows") for method in request.selection.pass_methods):
        raise InputError(
            "rows='all' needs a single target, but there are several: choose one, such as GeneratedToken(0)"
        )
    compute_options = request.compute_options
    mode = choose_attention_mode(
        capabilities, samples, request.selection.pass_methods, compute_options.kernel, compute_options.checkpoint
    )
    chunks = iter_target_chunks(
        capabilities, samples, targets, request.selection.pass_methods, mode, max_rows, runs_targets_together
    )
    for chunk in chunks:
        truncated = [
            adapter.truncate_to_targets(sample, sample_targets)
            for sample, sample_targets in zip(samples, chunk, strict=True)
        ]
        batch = TargetBatch(adapter, truncated, chunk, compute_options.seed)
        plan = make_batch_plan(capabilities, batch, request.selection.pass_methods, mode)
        if compute_options.kernel not in (None, "materialised"):
            check_tiling_supported(plan.method_runs)
        yield plan


def _run_plans(capabilities: ModelCapabilities, plans: Iterator[BatchPlan], request: BatchRequest) -> list[PassResult]:
    """Run plans one after the other; earlier results move to the CPU before the next plan runs."""
    results: list[PassResult] = []
    for plan in plans:
        if capabilities.adapter.device.type == "cuda":
            plan.batch.start_deriving_seeds()
        if results:
            results[-1].move_to_cpu()  # only the scores of one plan stay on the GPU
        if any(method_run.any_instance.depends_on_readout for method_run in plan.method_runs):
            capabilities.check_readouts(plan.batch, plan.attention_mode.tiling, request.readout_checks)
        self_test = capabilities.run_self_test(plan.batch.samples)
        method_runs, method_results = collect_requested(
            request.selection, plan.batch, self_test, plan.method_runs, plan.run()
        )
        results.append(PassResult(plan.batch, method_runs, method_results, keep_head_scores=request.per == "head"))
    return results
