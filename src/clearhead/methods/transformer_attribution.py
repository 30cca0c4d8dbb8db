"""Transformer Attribution: relevance of attention times its gradient, gathered layer by layer.

    Ā_l = E_h[(∂y/∂A_l ⊙ P_l)⁺],     R = (I + Ā_{L-1}) ⋯ (I + Ā_s),     r = w · (R − I)

P_l is the relevance of A_l by the authors' rules of relevance propagation (`backward_rules/lrp.py`). The read-out row
alone is pushed, from the last layer to the first, and what each layer adds is kept: r ← r + r Ā_l. With `normalise`
each row of I + Ā_l is divided by its sum, as in the authors' code for BERT, and r = w · R: what is left of w is in the
scores, and in the share of the first layer. With `repeated`, each patch gets all the relevance of their mean, as in
authors' code for pictures whose patches are averaged: as many times too much as there are patches.

Where streams look at each other (co-attention, encoder–decoders), as in the authors' comparisons: R gathers what a
stream that is read sees of itself; of another stream it looks at, r = w · Ā of the last layer that does. Where a tower
goes on beside a stream and is added to it again after each of its layers (BridgeTower), these are layers of the stream,
too, which look at the tower (why: `generic_cross_attention.py`): a row x of the stream and one t of the tower become x
and t + (x + t) Ā. A stream that never looks at itself has R = I, of which nothing is told.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import Relevance
from clearhead.capture.tape import Call, Tape
from clearhead.methods._modified_backward import PATENTS, UnderRules, UnderRulesAcross
from clearhead.methods.base import Scores, across, of_authors, push, register


@register(
    "transformer-attribution",
    kind="rules",
    family="relevance",
    asks=("attention_gradient",),
    cost="two forward and two backward in float64, one of each under rules",
    citation="Chefer, Gur & Wolf (2021), Transformer interpretability beyond attention visualization, CVPR",
    signed=False,
    target="any",
    has=("layers", "heads", "rows"),
    parts="contributions",
    note=PATENTS,
    amplifies=1e4,
)
class TransformerAttribution(UnderRules):
    normalise: bool = False
    rules: Literal["ours", "orig"] = "ours"
    mask: bool = of_authors(False)
    repeated: bool = of_authors(False)

    beside = True

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask, repeated=self.repeated)

    def begin(self) -> None:
        self.rows = self.own = self.frame.readout

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        relevance = positive(call)
        if self.normalise:
            self._divide(1 + relevance.mean(1).sum(-1))
        added = push(self.rows, relevance)
        self.rows = self.rows + added.sum(1)
        return added

    def _divide(self, sums: Float[Tensor, "batch unit"]) -> None:
        """All that was gathered so far goes through the rows of this layer, too."""
        self.rows, self.own = self.rows / sums[:, None], self.own / sums[:, None]
        self.parts = [part / sums[:, None, None] for part in self.parts]

    def finish(self, tape: Tape) -> Scores:
        if self.normalise:
            self.parts[-1] = self.parts[-1] + self.own[:, None] / self.parts[-1].shape[1]
        return super().finish(tape)


@across("transformer-attribution")
class TransformerAttributionAcross(UnderRulesAcross):
    normalise: bool = False
    rules: Literal["ours", "orig"] = "ours"
    mask: bool = of_authors(False)
    repeated: bool = of_authors(False)

    beside = True

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask, repeated=self.repeated)

    def begin(self) -> None:
        self.within = {stream: Rows(frame.readout) for stream, frame in self.frames.items()}
        self.seen: dict[tuple[str, str], Float[Tensor, "batch row unit"]] = {}

    def visit(self, call: Call) -> None:
        looks, seen = call.query_stream, call.key_stream
        if looks == seen:
            self.within[looks].push(positive(call).mean(1), call.module in self.towers, self.normalise)
        elif (looks, seen) not in self.seen:  # calls come from the last to the first
            self.seen[looks, seen] = push(self.frames[looks].readout, positive(call)).sum(1)

    def finish(self, tape: Tape) -> dict[str, Scores]:
        rows = {stream: rows.scores(self.normalise) for stream, rows in self.within.items()}
        for (_, seen), row in self.seen.items():
            rows[seen] = rows[seen] + row
        return {stream: Scores(row) for stream, row in rows.items()}


class Rows:
    """The rows of one stream on their way down: what is left of w, what was gathered, and what is in its tower."""

    def __init__(self, readout: Float[Tensor, "batch row unit"]) -> None:
        self.left, self.gathered, self.tower = readout, torch.zeros_like(readout), torch.zeros_like(readout)
        self.pushed = False

    def push(self, relevance: Float[Tensor, "batch unit unit"], tower: bool, normalise: bool) -> None:
        self.pushed = True
        if normalise:
            sums = 1 + relevance.sum(-1)[:, None]
            self.left, self.gathered = self.left / sums, self.gathered / sums
            self.tower = self.tower / sums if tower else self.tower
        if tower:
            self.tower = self.tower + (self.left + self.gathered + self.tower) @ relevance
        else:
            self.gathered = self.gathered + (self.left + self.gathered) @ relevance

    def scores(self, normalise: bool) -> Float[Tensor, "batch row unit"]:
        found = self.gathered + self.tower
        return found + self.left if normalise and self.pushed else found


def positive(call: Call) -> Float[Tensor, "batch head query key"]:
    """(∂y/∂A ⊙ P)⁺."""
    assert call.relevance is not None and call.attention_gradient is not None
    return (call.attention_gradient * call.relevance).clamp_(min=0)
