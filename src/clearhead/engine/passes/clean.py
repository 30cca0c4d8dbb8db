"""The clean pass: one forward pass at the input itself, and one backward pass if a method requires gradients.

Methods of one tape, path and perturbation methods share it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import MIN_TILE_ROWS
from clearhead.capture.attention.tiling import KernelLog, TilingConfig
from clearhead.capture.tape import CALL_REQUIREMENTS, AttentionCall, Requirements
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.target_batch import TargetFunction
from clearhead.methods.pass_type import PassType

#: On a CPU, full maps are processed in tiles of this many elements (1 MiB in float32), which stay in its cache.
CPU_CACHE_TILE_ELEMENTS = 2**18


class TapeStrategy(PassStrategy):
    """Methods that read the clean pass alone."""

    pass_type = PassType.TAPE
    uses_clean_pass = True
    supports_tiling = True

    def get_clean_requirements(self, method_run: MethodRun) -> Requirements:
        """Everything that the method requires."""
        return method_run.requires

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """None but the clean pass."""
        return []

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Compute the scores from the tape of the clean pass, whose calls the methods have processed."""
        assert clean_pass is not None
        for method_run in method_runs:
            if not method_run.requires & CALL_REQUIREMENTS:
                method_run.add_pass(clean_pass.requires, clean_pass.kernel_log)
        requires = frozenset().union(*(method_run.requires for method_run in method_runs))
        tape = context.batch.to_unit_vectors(clean_pass.tape.select(requires))
        return [MethodResult(method_run.compute_scores(tape), clean_pass.values) for method_run in method_runs]


def run_clean_pass(context: PassContext, method_runs: Sequence[MethodRun], requires: Requirements) -> CleanPass:
    """Run the model once at the input itself, and hand its attention calls, or tiles of them, to methods.

    Args:
        context: The batch, and how to run it.
        method_runs: The methods that process attention calls of this pass.
        requires: The tensors to record.
    """
    recorder = context.recorder
    batch = context.batch
    call_indices = [
        i
        for i, site in enumerate(context.self_test.call_sites)
        if any(method_run.needs_call(site) for method_run in method_runs)
    ]
    device = batch.adapter.device
    tile_passes = max((method_run.tile_passes for method_run in method_runs), default=0)

    def gather(call: AttentionCall) -> AttentionCall:
        """Move a call to one device, if the model is spread over several."""
        return call if all(tensor.device == device for _, tensor in call.iter_tensors()) else call.to(device)

    def on_call(call: AttentionCall) -> None:
        call = gather(call)
        if context.tiling is None:
            for tile_pass, queries in _iter_cache_sized_tiles(call, tile_passes):
                on_tile(call.select_queries(queries), queries, tile_pass)
        for method_run in method_runs:
            method_run.process_call(call)

    def on_tile(call: AttentionCall, queries: slice, tile_pass: int) -> None:
        call = gather(call)
        for method_run in method_runs:
            method_run.accumulate_tile(call, queries, tile_pass)

    def request_reductions(call: AttentionCall) -> list[MapReduction] | None:
        reductions = [method_run.request_reduction(call) for method_run in method_runs if method_run.needs_tiles(call)]
        complete = [reduction for reduction in reductions if reduction is not None]
        return complete if len(complete) == len(reductions) else None

    def on_reduced(call: AttentionCall, reduced: list[Tensor]) -> None:
        receivers = [method_run for method_run in method_runs if method_run.needs_tiles(call)]
        for method_run, total in zip(receivers, reduced, strict=True):
            method_run.receive_reduction(call, total.to(device))

    tiling: TilingConfig | None = None
    if context.tiling is not None:
        tiling = replace(
            context.tiling,
            on_tile=on_tile,
            tile_passes=tile_passes,
            needs_masked_gradients=any(method_run.needs_masked_gradients for method_run in method_runs),
            request_reductions=request_reductions,
            on_reduced=on_reduced,
            defers_reductions=any(method_run.defers_reductions for method_run in method_runs),
            kernel_log=KernelLog(),
        )
    target_function = TargetFunction(batch)
    tape = recorder.run(
        batch.model_inputs,
        target_function,
        requires,
        on_call,
        leaves=batch.leaves,
        call_indices=call_indices,
        head_rows=batch.head_rows,
        tiling=tiling,
        keep_maps=not all(method_run.supports_tiling for method_run in method_runs),
    )
    tape.logits = target_function.result.class_scores
    kernel_log = None if tiling is None else tiling.kernel_log
    for method_run in method_runs:
        method_run.add_pass(requires, kernel_log)
    return CleanPass(tape, target_function.result, requires, kernel_log)


def _iter_cache_sized_tiles(call: AttentionCall, tile_passes: int) -> Iterator[tuple[int, slice]]:
    """Number of the tile pass and queries of each tile of full maps; nothing where tiles are no faster."""
    maps = call.attention
    if maps is None or maps.device.type != "cpu" or maps.numel() <= 2 * CPU_CACHE_TILE_ELEMENTS:
        return
    num_queries = maps.shape[2]
    size = max(MIN_TILE_ROWS, CPU_CACHE_TILE_ELEMENTS * num_queries // maps.numel())
    for tile_pass in range(tile_passes):
        for start in range(0, num_queries, size):
            yield tile_pass, slice(start, min(start + size, num_queries))
