"""Streamed calls after their pass: what methods want of maps that cannot be said while the pass comes to them.

The backward pass comes to a call once, the last first. Where a method must know of the first what it does with the
last, queries, keys, values and ∂y/∂output are kept, which is linear in the length, and maps are made of them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from clearhead.recording.reduce import Reduce
from clearhead.recording.streaming import Streamed, repeated
from clearhead.recording.tape import Call
from clearhead.recording.tiles import TORCH


@dataclass(frozen=True)
class Kept:
    """One streamed call, of one target or of several (target × sample).

    gradient: ∂y/∂output; None where sums are of attention alone
    """

    call: Streamed
    gradient: Float[Tensor, "row query head width"] | None
    targets: int

    def sums(self, reductions: Sequence[Reduce]) -> list[Tensor]:
        """One for each, as `Reduce` has it."""
        made = self.call.sums(self.gradient, reductions, self.targets, backward=False)
        if made is not None:
            assert self.call.kernel is not None
            self.call.tiles.ran.maps.add(self.call.kernel.name)
            return made[1]
        self.call.tiles.ran.maps.add(TORCH)
        return self._by_tiles(reductions)

    def _by_tiles(self, reductions: Sequence[Reduce]) -> list[Tensor]:
        totals: list[Tensor] = []
        wanted = [one.of_samples(slice(None), self.call.query.device) for one in reductions]
        count = self.call.outline.shape[2]

        def fold(rows: slice, attention: Tensor, gradient: Tensor | None) -> None:
            whole = Call(0, "", attention=repeated(attention, self.targets), attention_gradient=gradient)
            calls = (whole if one.heads is None else whole.with_heads(one.heads) for one in wanted)
            parts = [one.of_tile(call, rows, count) for one, call in zip(wanted, calls, strict=True)]
            totals[:] = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts

        self.call.sweep(self.gradient, fold)
        return totals
