"""Raw attention: what the read-out row looks at, as is.

    r = w · E_h A_l          w: the read-out

The last layer by default; over several layers their mean. Where streams look at each other, the rows that are read
look at each of them.

With `by_query` a unit's score is instead how much it looks at the units that are not special, which is nearly the same
for all: authors' code for pictures whose patches are averaged takes its mean along the wrong axis.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call, Tape
from clearhead.errors import InputError
from clearhead.methods.base import AcrossFold, Fold, Frame, Scores, across, of_authors, register


@register(
    "attention",
    family="attention",
    asks=("attention",),
    cost="one forward",
    citation="Bahdanau, Cho & Bengio (2015), Neural machine translation by jointly learning to align and translate",
    signed=False,
    target="none",
    layers=(-1, None),
    has=("layers", "heads", "rows"),
    parts="contributions",
    axioms=("rows sum to one",),
)
class Attention(Fold):
    sweeps: ClassVar[int] = 1
    by_query: bool = of_authors(False)

    @property
    def needs_whole(self) -> bool:
        return self.by_query

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("attention", self.frame.readout)

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        return total / len(self.frame.layers)

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"] | None:
        if not self.by_query:
            return super().visit(call)
        assert call.attention is not None
        return looks_of(call.attention, self.frame)[:, :, None] / (call.attention.shape[1] * len(self.frame.layers))


@across("attention")
class AttentionAcross(AcrossFold):
    sweeps: ClassVar[int] = 1
    by_query: bool = of_authors(False)

    def begin(self) -> None:
        if self.by_query:
            raise InputError("by_query=True is for models of one stream, and here streams look at each other")
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("attention", self.frames[call.query_stream].readout)

    def joined(self, call: Call, total: Tensor) -> None:
        looks, seen = call.query_stream, call.key_stream
        self.rows[seen] = self.rows[seen] + total.sum(1) / len(self.layers[looks, seen])

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}


def looks_of(maps: Float[Tensor, "batch head unit unit"], frame: Frame) -> Float[Tensor, "batch head unit"]:
    """The mean of each row over the units that are not special."""
    inside = frame.words.to(maps.dtype)
    return (maps @ inside[:, None, :, None])[..., 0] / inside.sum(-1)[:, None, None]
