"""`ExecutionPlan`: the passes that methods need on a batch. It is made first, can be printed, and is then run."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from clearhead.capture.attention.tiling import TORCH_TILES_NAME
from clearhead.capture.tape import CALL_REQUIREMENTS, GRADIENT_SOURCES, Requirements
from clearhead.engine.attention_mode import AttentionMode
from clearhead.engine.capabilities import ModelCapabilities
from clearhead.engine.memory_budget import CLEAN_PASS_NAME, budgeted_passes
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes import STRATEGIES
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.passes.clean import run_clean_pass
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods.base import Method
from clearhead.methods.pass_type import PassType
from clearhead.sample import Sample
from clearhead.targets import Target

logger = logging.getLogger("clearhead")

#: Largest number of elements of the attention gradients of all targets of one pass (2 GiB in float32).
MAX_GRADIENT_ELEMENTS = 2**29
#: Largest number of units of one tiled pass, summed over samples and targets.
MAX_TILED_UNITS = 2**16


@dataclass(frozen=True)
class PassGroup:
    """The passes of one strategy over a batch.

    Attributes:
        strategy: Runs the passes.
        context: The batch, and how to run it.
        method_runs: The methods, all of the strategy's pass type.
    """

    strategy: PassStrategy
    context: PassContext
    method_runs: list[MethodRun]

    @property
    def counts(self) -> list[PassCount]:
        """The passes, in the order in which they run."""
        return self.strategy.count_passes(self.context, self.method_runs)


@dataclass(frozen=True)
class BatchPlan:
    """The passes for all methods on one batch with its targets.

    Attributes:
        batch: The batch.
        method_runs: The methods, in the order in which they were requested.
        attention_mode: How attention is captured, where methods require it.
        clean_context: The batch, and how the clean pass runs; None if no method uses the clean pass.
        clean_requires: The tensors recorded in the clean pass.
        clean_runs: The methods that process attention calls of the clean pass.
        groups: The passes by strategy.
    """

    batch: TargetBatch
    method_runs: list[MethodRun]
    attention_mode: AttentionMode
    clean_context: PassContext | None
    clean_requires: Requirements
    clean_runs: list[MethodRun]
    groups: list[PassGroup]

    @property
    def counts(self) -> list[PassCount]:
        """All passes, in the order in which they run."""
        counts = []
        if self.clean_context is not None:
            counts.append(
                PassCount(
                    "clean pass",
                    [run for group in self.groups if group.strategy.uses_clean_pass for run in group.method_runs],
                    1,
                    int(bool(self.clean_requires & GRADIENT_SOURCES.keys())),
                    self.batch.num_samples,
                    self.clean_requires,
                )
            )
        return counts + [count for group in self.groups for count in group.counts]

    def run(self) -> list[MethodResult]:
        """Run all passes.

        Returns:
            One result per method.

        Raises:
            UnsupportedError: If a method cannot be applied to this input.
        """
        logger.debug("%s", self)
        clean_pass: CleanPass | None = None
        if self.clean_context is not None:
            with ExitStack() as stack:
                stack.enter_context(budgeted_passes(CLEAN_PASS_NAME, self.batch.num_rows, self.batch.max_units))
                for group in self.groups:
                    stack.enter_context(group.strategy.during_clean_pass(group.context, group.method_runs))
                clean_pass = run_clean_pass(self.clean_context, self.clean_runs, self.clean_requires)
        results: dict[int, MethodResult] = {}
        for group in self.groups:
            for method_run in group.method_runs:
                method_run.component_results = {
                    component.method.name: results[id(component)]
                    for component in self.method_runs
                    if component.method in method_run.method.components
                }
            with budgeted_passes(group.strategy.pass_type.value, self.batch.num_rows, self.batch.max_units):
                group_results = group.strategy.run(group.context, group.method_runs, clean_pass)
            results |= {id(run): result for run, result in zip(group.method_runs, group_results, strict=True)}
        return [results[id(run)] for run in self.method_runs]

    @property
    def passes(self) -> list[dict[str, Any]]:
        """All passes in the order in which they run, with what they record and how attention is computed in them."""
        contexts = [] if self.clean_context is None else [self.clean_context]
        contexts += [group.context for group in self.groups for _ in group.counts]
        return [
            {
                "purpose": count.purpose,
                "methods": [str(method_run.method) for method_run in count.method_runs],
                "forward": count.forward,
                "backward": count.backward,
                "inputs": count.forward * count.rows if count.num_inputs is None else count.num_inputs,
                "inputs_together": count.rows,
                "is_at_most": count.is_at_most,
                "records": sorted(count.requires),
                "attention": self._describe_attention(count, context),
            }
            for count, context in zip(self.counts, contexts, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data.

        Returns:
            Numbers of inputs, targets and units, and "passes": one mapping per kind of pass.
        """
        return {
            "num_inputs": self.batch.num_samples,
            "targets_per_input": self.batch.targets_per_sample,
            "max_units": self.batch.max_units,
            "passes": self.passes,
        }

    def __str__(self) -> str:
        """Format one line for the batch, and for each kind of pass its methods, what it records and how."""
        batch = self.batch
        num_inputs = _pluralize(batch.num_samples, "input")
        num_targets = _pluralize(batch.targets_per_sample, "target")
        lines = [f"{num_inputs} of up to {batch.max_units} units, {num_targets} each"]
        for planned in self.passes:
            at_most = "at most " if planned["is_at_most"] else ""
            forward = f"{planned['forward']} forward"
            backward = f", {planned['backward']} backward" if planned["backward"] else ""
            rows = f"{_pluralize(planned['inputs'], 'input')}, up to {planned['inputs_together']} together"
            methods = ", ".join(planned["methods"])
            lines += [
                f"  {planned['purpose']}: {at_most}{forward}{backward} ({rows}) for {methods}",
                f"    records {', '.join(planned['records']) or 'only the output'}; attention: {planned['attention']}",
            ]
        return "\n".join(lines)

    def _describe_attention(self, count: PassCount, context: PassContext) -> str:
        """How the passes of one kind compute attention, and why."""
        if any(method_run.method.pass_type.materialises_attention for method_run in count.method_runs):
            return "materialised with eager operations, because rules and interventions replace them"
        if not count.requires & CALL_REQUIREMENTS:
            return "the model's own implementation, not captured: no method of this pass requires it"
        if context.tiling is None:
            reason = self.attention_mode.reason
            if self.attention_mode.tiling is not None:
                reason = "a method needs full maps"
            return f"materialised maps: {reason}"
        kernel = TORCH_TILES_NAME if context.tiling.kernel is None else context.tiling.kernel.name
        checkpoint = ", layers checkpointed" if context.tiling.checkpoint_layers else ""
        return f"tiled, kernel {kernel}{checkpoint}: {self.attention_mode.reason}"


class ExecutionPlan(list[BatchPlan]):
    """The plans of all batches of one call of `explain`. `print` shows which passes run, and why."""

    def __str__(self) -> str:
        """Format the plans of all batches, numbered."""
        numbered = [f"batch {i + 1} of {len(self)}: {plan}" for i, plan in enumerate(self)]
        return "\n".join(numbered)

    __repr__ = __str__

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the plan of each batch as plain data.

        Returns:
            One mapping per batch with "num_inputs", "targets_per_input", "max_units" and "passes".

        Example:
            >>> [step["purpose"] for step in ex.plan("A wonderful film").to_dict()[0]["passes"]]  # doctest: +SKIP
        """
        return [plan.to_dict() for plan in self]


def _pluralize(count: int, noun: str) -> str:
    """A number with a noun.

    >>> _pluralize(1, "input"), _pluralize(2, "input")
    ('1 input', '2 inputs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def make_batch_plan(
    capabilities: ModelCapabilities, batch: TargetBatch, methods: Sequence[Method], attention_mode: AttentionMode
) -> BatchPlan:
    """Decide which passes a batch needs.

    Args:
        capabilities: What is known about the model.
        batch: The batch with its targets.
        methods: The methods.
        attention_mode: How attention is captured, where methods require it.
    """
    self_test = capabilities.run_self_test(batch.samples)
    method_runs = [MethodRun(method, batch, self_test) for method in methods]
    runs_by_type: dict[PassType, list[MethodRun]] = {}
    for method_run in method_runs:
        runs_by_type.setdefault(method_run.method.pass_type, []).append(method_run)
    clean_requires: Requirements = frozenset()
    clean_runs = []
    for method_run in method_runs:
        requires = STRATEGIES[method_run.method.pass_type].get_clean_requirements(method_run)
        clean_requires |= requires
        if requires & CALL_REQUIREMENTS:
            clean_runs.append(method_run)
    clean_context = None
    if any(STRATEGIES[pass_type].uses_clean_pass for pass_type in runs_by_type):
        tiling = attention_mode.tiling if all(run.supports_tiling for run in clean_runs) else None
        clean_context = PassContext(capabilities, batch, tiling)
    groups = []
    for pass_type, runs in runs_by_type.items():
        strategy = STRATEGIES[pass_type]
        supports_tiling = strategy.supports_tiling and all(run.supports_tiling for run in runs)
        tiling = attention_mode.tiling if supports_tiling else None
        groups.append(PassGroup(strategy, PassContext(capabilities, batch, tiling), runs))
    groups.sort(key=lambda group: any(run.method.components for run in group.method_runs))  # after their components
    return BatchPlan(batch, method_runs, attention_mode, clean_context, clean_requires, clean_runs, groups)


def check_tiling_supported(method_runs: Sequence[MethodRun]) -> None:
    """Check that all methods support tiled passes.

    Raises:
        UnsupportedError: A method needs materialised maps.
    """
    for method_run in method_runs:
        if not (STRATEGIES[method_run.method.pass_type].supports_tiling and method_run.supports_tiling):
            raise UnsupportedError(
                f"{method_run.method} cannot be computed tile by tile: it needs materialised attention maps, or other "
                "passes. Leave out kernel='streaming', or choose another method"
            )


def iter_target_chunks(
    capabilities: ModelCapabilities,
    samples: Sequence[Sample],
    targets: Sequence[Sequence[Target]],
    methods: Sequence[Method],
    attention_mode: AttentionMode,
    max_rows: int | None,
    runs_targets_together: bool = True,
) -> Iterator[list[list[Target]]]:
    """Split the targets of each sample into chunks, each of which one pass explains together.

    Args:
        capabilities: What is known about the model.
        samples: The samples of a batch.
        targets: The targets of each sample.
        methods: The methods.
        attention_mode: How attention is captured. If one method needs full maps, those of all targets of a chunk must
            fit into memory.
        max_rows: Largest number of samples × targets of a chunk; None for no limit.
        runs_targets_together: Whether a chunk may have several targets per sample.
    """
    num_steps = max(map(len, targets))
    chunk_size = num_steps if runs_targets_together else 1
    if chunk_size > 1:
        limits = [chunk_size, capabilities.adapter.choose_targets_per_pass(samples) or num_steps]
        if max_rows is not None:
            limits.append(max_rows // len(samples))
        limits.append(_compute_targets_per_pass(capabilities, samples, targets, methods, attention_mode))
        chunk_size = max(1, min(limits))
    for start in range(0, num_steps, chunk_size):
        stop = min(start + chunk_size, num_steps)
        # samples with fewer targets repeat their last one; the repeated result is dropped
        yield [
            [sample_targets[min(step, len(sample_targets) - 1)] for step in range(start, stop)]
            for sample_targets in targets
        ]


def _compute_targets_per_pass(
    capabilities: ModelCapabilities,
    samples: Sequence[Sample],
    targets: Sequence[Sequence[Target]],
    methods: Sequence[Method],
    attention_mode: AttentionMode,
) -> int:
    """How many targets of each sample fit into one pass."""
    self_test = capabilities.run_self_test(samples)
    num_units = {stream: max(len(sample.axes[stream]) for sample in samples) for stream in samples[0].axes}
    map_elements = sum(
        num_units[site.query_stream] * num_units[site.key_stream] * site.num_heads for site in self_test.call_sites
    )
    targets_with_maps = MAX_GRADIENT_ELEMENTS // max(1, map_elements * len(samples))
    tiling = attention_mode.tiling
    if tiling is None:
        return targets_with_maps
    targets_in_tiles = MAX_TILED_UNITS // (sum(num_units.values()) * len(samples))
    if tiling.checkpoint_layers:  # recomputed layers serve one target at a time
        targets_in_tiles = 1
    single_target_batch = TargetBatch(capabilities.adapter, samples[:1], [[targets[0][0]]])
    if all(MethodRun(method, single_target_batch, self_test).supports_tiling for method in methods):
        return targets_in_tiles
    return min(targets_in_tiles, targets_with_maps)
