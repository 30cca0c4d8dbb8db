"""How methods receive attention maps: as full maps, as tiles of query rows, or as reductions computed by the kernel."""

from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall

if TYPE_CHECKING:
    from clearhead.methods.base import UnitContext


class TiledMethod:
    """Processing of one attention call, full or in tiles of query rows.

    A method that supports tiles sets `tile_passes` and implements `request_reduction` or `on_tile`; `on_call_total` too
    if its contribution is more than the sum over tiles. A method that needs full maps implements `on_call`.

    Attributes:
        tile_passes: How often `on_tile` must process every tile of a call; 0 if the method needs full maps.
        needs_masked_gradients: Whether `on_tile` reads the gradient of masked attention, where the attention is zero.
    """

    tile_passes: ClassVar[int] = 0
    needs_masked_gradients: ClassVar[bool] = False

    def _init_tile_state(self) -> None:
        """Start with all heads selected and without sums over tiles."""
        self.heads: list[int] | None = None  # the selected heads; None for all
        self.tile_sums: list[Tensor] = []  # sums over the tiles of the current call, one per tile pass

    if TYPE_CHECKING:

        @property
        def unit_contexts(self) -> dict[str, UnitContext]: ...

    @property
    def defers_reductions(self) -> bool:
        """Whether the method requests reductions after the pass (`call.deferred`) instead of reading tiles."""
        return False

    @property
    def needs_full_maps(self) -> bool:
        """Whether the method needs full attention maps with these options, so that it cannot be tiled."""
        return not self.tile_passes and not self.defers_reductions

    def request_reduction(self, call: AttentionCall) -> MapReduction | None:
        """Return the reduction of the call's maps that replaces reading them, if there is one.

        It is used if the rows of the maps sum to one. Then a kernel computes it without materialising the maps.

        Args:
            call: The attention call, without maps.

        Returns:
            The reduction, or None, as by default: the method then reads the maps, whole or tile by tile.
        """
        return None

    @classmethod
    def needs_only_reductions(cls) -> bool:
        """Whether the method needs reductions only, unless an option changes that.

        Returns:
            True if the method overrides `request_reduction`.
        """
        return cls.request_reduction is not TiledMethod.request_reduction

    def on_tile(self, call: AttentionCall, queries: slice, previous_total: Tensor | None) -> Tensor:
        """Return what one tile adds to the sum over the tiles of a call.

        Args:
            call: The call with the rows of these queries only.
            queries: The queries of the tile.
            previous_total: The sum of the previous tile pass, None in the first one.

        Returns:
            A tensor of the same shape for every tile.
        """
        reduction = self.request_reduction(call)
        assert reduction is not None
        unit_context = next(iter(self.unit_contexts.values()))
        if len(self.unit_contexts) > 1:
            unit_context = self.unit_contexts[call.query_stream]
        return reduction.reduce_tile(call, queries, unit_context.valid_mask.shape[1])

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch head row unit"] | None:
        """Process the sum over all tiles of a call, and return the contribution of the call as `on_call` does.

        Args:
            call: The call; its maps are gone.
            total: The sum of the last tile pass, or the requested reduction.

        Returns:
            The contribution; None for methods that keep a state instead.
        """
        return total

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"] | None:
        """Process one attention call with full maps; by default as a single tile.

        Args:
            call: The call, with the tensors that the declaration requires.

        Returns:
            The contribution of the call to the scores, by head; None if the scores are computed from the state of the
            method.
        """
        if not self.tile_passes:
            return None
        assert call.attention is not None
        total = None
        for _ in range(self.tile_passes):
            total = self.on_tile(call, slice(0, call.attention.shape[2]), total)
        assert total is not None
        return self.on_call_total(call, total)

    def _compute_call_scores(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"] | None:
        """Process one call, with full maps or after its tiles."""
        if not self.tile_sums:
            return self.on_call(self._select_heads(call))
        total = self.tile_sums[-1]
        self.tile_sums = []
        return self.on_call_total(call, total)

    def _select_heads(self, call: AttentionCall) -> AttentionCall:
        """Return the call with the selected heads only."""
        if self.heads is None:
            return call
        return call.select_heads(self.heads)

    def accumulate_tile(self, call: AttentionCall, queries: slice, tile_pass: int) -> None:
        """Add one tile of a call to the sum of this tile pass.

        Args:
            call: The call with the rows of these queries only.
            queries: The queries of the tile.
            tile_pass: The number of the pass over all tiles of the call, from 0; ignored beyond `tile_passes`.
        """
        if tile_pass >= self.tile_passes:
            return
        previous_total = None
        if tile_pass:
            previous_total = self.tile_sums[tile_pass - 1]
        tile_sum = self.on_tile(self._select_heads(call), queries, previous_total)
        if len(self.tile_sums) == tile_pass:
            self.tile_sums.append(tile_sum)
        else:
            self.tile_sums[tile_pass] += tile_sum

    def receive_reduction(self, call: AttentionCall, total: Tensor) -> None:
        """Store the reduction that `request_reduction` asked for.

        Args:
            call: The call, without maps.
            total: The reduction over the whole call.
        """
        self.tile_sums = [total]
