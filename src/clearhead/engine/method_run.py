"""`MethodRun`: one method on one batch; and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiling import KernelLog
from clearhead.capture.checks.self_test import CallSite, SelfTest
from clearhead.capture.tape import CALL_REQUIREMENTS, UNIT_ALIGNED_REQUIREMENTS, AttentionCall, Requirements, Tape
from clearhead.engine.target_batch import TargetBatch, TargetValues
from clearhead.errors import InputError
from clearhead.methods.base import (
    CROSS_STREAM_REGISTRY,
    METHOD_REGISTRY,
    AttributionMethod,
    CrossStreamMethod,
    Method,
    MethodScores,
    UnitContext,
    resolve_layer_range,
)


@dataclass(frozen=True)
class MethodResult:
    """What one method returns for a batch.

    Attributes:
        scores: The scores of the units of each stream.
        values: The values of the targets in the pass that the scores come from.
    """

    scores: dict[str, MethodScores]
    values: TargetValues


class MethodRun:
    """One method on one batch: an instance for each stream, or one for all where streams attend to each other.

    Args:
        method: The method with its options.
        batch: The batch.
        self_test: Result of the self-test, which lists the attention calls of a pass.

    Attributes:
        is_attention_captured: Whether attention was captured in a pass of this method, for this or another method.
        kernel_logs: How tiled passes captured attention.
        component_results: What the components of the method returned, by name, before its own passes.
    """

    def __init__(self, method: Method, batch: TargetBatch, self_test: SelfTest) -> None:
        self.method = method
        self.requires = method.declaration.requires
        self.is_attention_captured = method.pass_type.materialises_attention
        self.kernel_logs: list[KernelLog] = []
        self.component_results: dict[str, MethodResult] = {}
        self.num_heads_by_module = {site.module: site.num_heads for site in self_test.call_sites}
        layers = method.get_option("layers", method.declaration.layers)
        stream_pairs = {(site.query_stream, site.key_stream) for site in self_test.call_sites}
        self.layer_ranges = {pair: resolve_layer_range(layers, self_test.count_layers(*pair)) for pair in stream_pairs}
        contexts = {stream: self._adapt_context(context) for stream, context in batch.unit_contexts.items()}
        options = method.constructor_kwargs
        self.cross_stream: CrossStreamMethod | None = None
        self.per_stream: dict[str, AttributionMethod] = {}
        if self_test.has_cross_attention and method.name in CROSS_STREAM_REGISTRY:
            groups = {module: batch.adapter.find_simultaneous_group(module) for module in self.num_heads_by_module}
            self.cross_stream = CROSS_STREAM_REGISTRY[method.name](
                unit_contexts=contexts,
                layers=self.layer_ranges,
                residual_towers=frozenset(filter(batch.adapter.is_residual_tower, self.num_heads_by_module)),
                simultaneous_groups={module: group for module, group in groups.items() if group is not None},
                **options,
            )
        else:
            self.per_stream = {
                stream: METHOD_REGISTRY[method.name](unit_context=context, **options)
                for stream, context in contexts.items()
            }

    def _adapt_context(self, context: UnitContext) -> UnitContext:
        """Set the selected layers, and read out every row if `rows="all"`."""
        if self.method.get_option("rows") == "all":
            num_units = context.valid_mask.shape[1]
            identity = torch.eye(num_units, dtype=context.readout.dtype, device=context.readout.device)
            context = replace(context, readout=identity.expand(len(context.valid_mask), num_units, num_units))
        return replace(context, layers=self.layer_ranges.get((context.stream, context.stream), range(0)))

    @property
    def instances(self) -> list[AttributionMethod | CrossStreamMethod]:
        """The instances that process the calls: one per stream, or a single one where streams attend to each other."""
        return [*self.per_stream.values()] if self.cross_stream is None else [self.cross_stream]

    @property
    def any_instance(self) -> AttributionMethod | CrossStreamMethod:
        """An instance, for what all of them have in common."""
        return self.instances[0]

    def needs_call(self, call: AttentionCall | CallSite) -> bool:
        """Whether the method processes this call: its layer is selected, and the method requires tensors of calls."""
        selected_layers = self.layer_ranges[call.query_stream, call.key_stream]
        return bool(self.requires & UNIT_ALIGNED_REQUIREMENTS) and call.layer in selected_layers

    def process_call(self, call: AttentionCall) -> None:
        """Hand a call to the instance of its stream, if the method needs it."""
        if self.needs_call(call):
            self._select_instance(call).process_call(call)

    def _select_instance(self, call: AttentionCall) -> Any:
        """The instance that a call belongs to, with the selected heads."""
        instance = self.cross_stream or self.per_stream[call.query_stream]
        heads = self.method.get_option("heads")
        if heads is not None:
            instance.heads = _resolve_heads(heads, self.num_heads_by_module[call.module])
        return instance

    @property
    def supports_tiling(self) -> bool:
        """Whether the method needs no full attention map: none at all, tiles of them, or reductions."""
        if not self.requires & {"attention", "attention_gradient"}:
            return True
        return self.tile_passes > 0 or any(instance.defers_reductions for instance in self.instances)

    @property
    def tile_passes(self) -> int:
        """How often the method must process every tile of a call; 0 if it needs full maps or none."""
        return max(0 if instance.needs_full_maps else instance.tile_passes for instance in self.instances)

    @property
    def defers_reductions(self) -> bool:
        """Whether the method requests reductions after the pass."""
        return any(instance.defers_reductions for instance in self.instances)

    @property
    def needs_masked_gradients(self) -> bool:
        """Whether the method reads gradients of masked attention."""
        return any(instance.needs_masked_gradients for instance in self.instances)

    def accumulate_tile(self, call: AttentionCall, queries: slice, tile_pass: int) -> None:
        """Hand one tile of a call to the instance of its stream, if the method needs it."""
        if self.needs_tiles(call):
            self._select_instance(call).accumulate_tile(call, queries, tile_pass)

    def needs_tiles(self, call: AttentionCall) -> bool:
        """Whether the method reads tiles of this call, or a reduction in place of them."""
        return self.tile_passes > 0 and self.needs_call(call)

    def request_reduction(self, call: AttentionCall) -> MapReduction | None:
        """The reduction of the call's maps that replaces reading them, if there is one."""
        instance = self._select_instance(call)
        reduction: MapReduction | None = instance.request_reduction(call)
        return None if reduction is None else replace(reduction, heads=instance.heads)

    def receive_reduction(self, call: AttentionCall, reduced: Tensor) -> None:
        """Hand a requested reduction to the instance of its stream."""
        self._select_instance(call).receive_reduction(call, reduced)

    @property
    def kernel_name(self) -> str:
        """What captured attention in the passes of this method, for the certificate."""
        if not self.is_attention_captured:
            return "not captured"
        return reduce(or_, self.kernel_logs).name if self.kernel_logs else "materialised"

    def add_component(self, component_run: "MethodRun") -> None:
        """Note how the passes of a component of a combined method computed attention."""
        self.is_attention_captured |= component_run.is_attention_captured
        self.kernel_logs += component_run.kernel_logs

    def add_pass(self, requires: Requirements, kernel_log: KernelLog | None) -> None:
        """Note how a pass of this method computed attention.

        Args:
            requires: The tensors that were recorded.
            kernel_log: The kernels of a tiled pass; None for other passes.
        """
        if requires & CALL_REQUIREMENTS:
            self.is_attention_captured = True
            if kernel_log is not None:
                self.kernel_logs.append(kernel_log)

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Compute the scores of each stream after the last call."""
        if self.cross_stream is not None:
            return {
                stream: _check_scores(scores, self.cross_stream, stream)
                for stream, scores in self.cross_stream.compute_scores(tape).items()
            }
        return {
            stream: _check_scores(instance.compute_scores(tape), instance, stream)
            for stream, instance in self.per_stream.items()
        }


def _check_scores(scores: MethodScores, instance: AttributionMethod | CrossStreamMethod, stream: str) -> MethodScores:
    """Check the shape of the scores: a third-party method may return anything."""
    context = instance.unit_contexts[stream]
    batch, num_units = context.valid_mask.shape
    num_rows = context.readout.shape[1]
    shape = tuple(getattr(getattr(scores, "scores", None), "shape", ()))
    if shape not in ((batch, num_rows, num_units), (batch, 1, num_units)):
        raise InputError(
            f"{instance.declaration.name} must return Scores of batch × row × unit, {(batch, num_rows, num_units)}, "
            f"not {shape}"
        )
    return scores


def _resolve_heads(heads: Sequence[int], count: int) -> list[int]:
    """Count negative heads from the end.

    Raises:
        InputError: The model does not have one of the heads.
    """
    wrong = [head for head in heads if not -count <= head < count]
    if wrong or not heads:
        raise InputError(f"heads={list(heads)} is not valid: the model has {count} heads, counted from 0")
    return [head % count for head in heads]
