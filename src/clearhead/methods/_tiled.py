"""What every fold does with a call: its maps are whole, or come in tiles of rows, or their sums are made at once."""

from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call

if TYPE_CHECKING:
    from clearhead.methods.base import Frame


class Tiled:
    """A method whose maps may come in tiles says `sweeps`, and `wanted_sum` or `tile`; and `joined`, where it does more
    than add up. One that needs whole maps has `visit`."""

    #: How often `tile` must see every tile of a call.
    sweeps: ClassVar[int] = 0
    #: Whether `tile` reads the gradient also where attention is hidden by a mask, and so zero.
    reads_hidden: ClassVar[bool] = False

    def start(self) -> None:
        self.heads: list[int] | None = None  # the heads that were chosen; None for all
        self.tile_sums: list[Tensor] = []  # of the tiles of one call, sweep by sweep

    if TYPE_CHECKING:

        @property
        def frames(self) -> dict[str, Frame]: ...

    @property
    def sets_aside(self) -> bool:
        """Whether it asks calls for sums after the pass, in the place of tiles."""
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether it needs whole maps, with these options, and tiles of them are not enough."""
        return not self.sweeps and not self.sets_aside

    def wanted_sum(self, call: Call) -> Reduce | None:
        """The sum of a call's maps that is all it wants of them (where their rows sum to one), if there is one.

        `call` has no maps here.
        """
        return None

    @classmethod
    def wants_sums(cls) -> bool:
        """Whether sums are all it wants, unless options say otherwise."""
        return cls.wanted_sum is not Tiled.wanted_sum

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Tensor:
        """What these queries' rows of the maps add to a sum over tiles; `known` is the sum of the sweep before."""
        wanted = self.wanted_sum(call)
        assert wanted is not None
        every = self.frames
        frame = every[call.query_stream] if len(every) > 1 else next(iter(every.values()))
        return wanted.of_tile(call, queries, frame.valid.shape[1])

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch head row unit"] | None:
        """Fold the sum over the tiles of a call, which has no maps any more, into the state; returns as `visit`."""
        return total

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"] | None:
        """Fold one call into the state; what is returned is this call's share of the scores, head by head.

        By default the whole maps are one tile.
        """
        if not self.sweeps:
            return None
        assert call.attention is not None
        total = None
        for _ in range(self.sweeps):
            total = self.tile(call, slice(0, call.attention.shape[2]), total)
        assert total is not None
        return self.joined(call, total)

    def folded(self, call: Call) -> Float[Tensor, "batch head row unit"] | None:
        """Fold one call, whole or after its tiles."""
        if not self.tile_sums:
            return self.visit(call if self.heads is None else call.with_heads(self.heads))
        total, self.tile_sums = self.tile_sums[-1], []
        return self.joined(call, total)

    def fold_tile(self, call: Call, queries: slice, sweep: int) -> None:
        """One tile of a call, in one of the sweeps over all of them."""
        if sweep < self.sweeps:
            chosen = call if self.heads is None else call.with_heads(self.heads)
            part = self.tile(chosen, queries, self.tile_sums[sweep - 1] if sweep else None)
            if len(self.tile_sums) == sweep:
                self.tile_sums.append(part)
            else:
                self.tile_sums[sweep] += part

    def fold_sum(self, call: Call, total: Tensor) -> None:
        """The sum that `wanted_sum` asked for, made at once."""
        self.tile_sums = [total]
