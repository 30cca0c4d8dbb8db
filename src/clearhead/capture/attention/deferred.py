"""Streamed calls after their pass: what methods want of maps that cannot be said while the pass comes to them.

The backward pass comes to a call once, the last first. Where a method must know of the first what it does with the
last, queries, keys, values and ∂y/∂output are set aside, which is linear in the length, and maps are made of them anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiled import Streamed, repeated
from clearhead.capture.attention.tiling import TORCH
from clearhead.capture.tape import Call


@dataclass(frozen=True)
class Aside:
    """One streamed call, of one target or of several (target × sample).

    gradient: ∂y/∂output; None where sums are of attention alone
    """

    call: Streamed
    gradient: Float[Tensor, "row query head width"] | None
    targets: int

    def sums(self, reductions: Sequence[Reduce]) -> list[Tensor]:
        """One for each, as `Reduce` has it."""
        gradient = None if all(one.of == "attention" for one in reductions) else self.gradient
        made = self.call.sums(gradient, reductions, self.targets, backward=False)
        kernel = None if made is None else self.call.kernel
        self.call.tiles.ran.maps.add(TORCH if kernel is None else kernel.name)
        return self._by_tiles(gradient, reductions) if made is None else made[1]

    def _by_tiles(self, gradient: Tensor | None, reductions: Sequence[Reduce]) -> list[Tensor]:
        totals: list[Tensor] = []
        wanted = [one.of_samples(slice(None), self.call.query.device) for one in reductions]
        count = self.call.outline.shape[2]

        def fold(rows: slice, attention: Tensor, slope: Tensor | None) -> None:
            whole = Call(0, "", attention=repeated(attention, self.targets), attention_gradient=slope)
            calls = (whole if one.heads is None else whole.with_heads(one.heads) for one in wanted)
            parts = [one.of_tile(call, rows, count) for one, call in zip(wanted, calls, strict=True)]
            totals[:] = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts

        self.call.sweep(gradient, fold, targets=self.targets)
        return totals
