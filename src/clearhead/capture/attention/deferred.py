"""Reductions of a tiled call's maps after its pass, for methods that cannot compute them during the backward pass.

The backward pass reaches each call once, the last call first. Where a method needs results of the first call to process
the last, queries, keys, values and ∂y/∂output are kept, whose memory is linear in the length, and maps are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import TiledAttention, repeat_for_targets
from clearhead.capture.attention.tiling import TORCH_TILES_NAME
from clearhead.capture.tape import AttentionCall


@dataclass(frozen=True)
class DeferredCall:
    """A tiled call of one target or of several (target × sample) that can compute reductions after the pass.

    Attributes:
        tiled_call: The call, detached from the graph.
        output_gradient: ∂y/∂output; None if reductions are of attention alone.
        num_targets: Number of targets.
    """

    tiled_call: TiledAttention
    output_gradient: Float[Tensor, "row query head width"] | None
    num_targets: int

    def reduce(self, reductions: Sequence[MapReduction]) -> list[Tensor]:
        """Compute reductions of the call's maps.

        Args:
            reductions: What to compute; see `MapReduction` for the shape of each result.

        Returns:
            One tensor per reduction, with target × sample as its batch.
        """
        output_gradient = self.output_gradient
        if all(reduction.quantity == "attention" for reduction in reductions):
            output_gradient = None
        kernel_log = self.tiled_call.tiling.kernel_log
        kernel_result = self.tiled_call.reduce_with_kernel(
            output_gradient, reductions, self.num_targets, with_gradients=False
        )
        if kernel_result is None or self.tiled_call.kernel is None:
            kernel_log.map_kernels.add(TORCH_TILES_NAME)
        else:
            kernel_log.map_kernels.add(self.tiled_call.kernel.name)
        if kernel_result is None:
            return self._reduce_by_tiles(output_gradient, reductions)
        return kernel_result[1]

    def _reduce_by_tiles(self, output_gradient: Tensor | None, reductions: Sequence[MapReduction]) -> list[Tensor]:
        """Sum the contributions of all tiles to each reduction, where no kernel computes them."""
        totals: list[Tensor] = []
        moved = [reduction.select_samples(slice(None), self.tiled_call.query.device) for reduction in reductions]
        num_queries = self.tiled_call.meta_attention.shape[2]

        def reduce_tile(query_slice: slice, attention: Tensor, attention_gradient: Tensor | None) -> None:
            call = AttentionCall(
                0,
                "",
                attention=repeat_for_targets(attention, self.num_targets),
                attention_gradient=attention_gradient,
            )
            tile_sums = []
            for reduction in moved:
                selected = call if reduction.heads is None else call.select_heads(reduction.heads)
                tile_sums.append(reduction.reduce_tile(selected, query_slice, num_queries))
            if totals:
                totals[:] = [total + tile_sum for total, tile_sum in zip(totals, tile_sums, strict=True)]
            else:
                totals[:] = tile_sums

        self.tiled_call.for_each_tile(output_gradient, reduce_tile, num_targets=self.num_targets)
        return totals
