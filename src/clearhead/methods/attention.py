"""Raw attention: what the read-out row looks at, as is.

    r = w · E_h A_l          w: the read-out

The last layer by default; over several layers their mean. Where streams look at each other, the rows that are read
look at each of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold, Fold, Scores, across, push, register
from clearhead.recording.tape import Call, Tape


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
    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.attention is not None
        return push(self.frame.readout, call.attention) / len(self.frame.layers)


@across("attention")
class AttentionAcross(AcrossFold):
    def begin(self) -> None:
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    def visit(self, call: Call) -> None:
        looks, seen = call.query_stream, call.key_stream
        self.rows[seen] = self.rows[seen] + self.frames[looks].readout @ call.mean_attention / len(
            self.layers[looks, seen]
        )

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}
