"""Partial LRP: the relevance that arrives at the attention of the last layer, what is negative left out.

    r = w · E_h[P_l⁺]          w: the read-out,  P_l: the relevance of A_l

The last layer by default; over several layers their mean. `rules` is the family of rules (`backward_rules/lrp.py`):
"orig" as published, or "ours", those of Transformer Attribution. Where streams look at each other, each map is read by
itself.

With `scaled` each map is taken as it is, negative or not, and brought to 0…1 before a row of it is read, as authors do
for LXMERT, VisualBERT and DETR: scores then depend on rows that do not speak for the target. With `repeated`, each
patch gets all the relevance of their mean, as in authors' code for pictures whose patches are averaged.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import Relevance
from clearhead.capture.tape import Call, Tape
from clearhead.methods._modified_backward import PATENTS, UnderRules, UnderRulesAcross
from clearhead.methods.base import Frame, Scores, across, of_authors, push, register


@register(
    "partial-lrp",
    kind="rules",
    family="relevance",
    asks=("attention_gradient",),
    cost="one forward and one backward, under rules, in float64",
    citation="Voita et al. (2019), Analyzing multi-head self-attention, ACL; as in Chefer, Gur & Wolf (2021), "
    "Transformer interpretability beyond attention visualization, CVPR",
    signed=False,
    target="any",
    layers=(-1, None),
    has=("layers", "heads", "rows"),
    parts="contributions",
    note=PATENTS,
    amplifies=1e4,
)
class PartialLRP(UnderRules):
    rules: Literal["orig", "ours"] = "orig"
    mask: bool = of_authors(False)
    repeated: bool = of_authors(False)
    scaled: bool = of_authors(False)

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask, repeated=self.repeated)

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        return push(self.frame.readout, relevance_map(call, self.frame, self.frame, self.scaled)) / len(
            self.frame.layers
        )


@across("partial-lrp")
class PartialLRPAcross(UnderRulesAcross):
    rules: Literal["orig", "ours"] = "orig"
    mask: bool = of_authors(False)
    repeated: bool = of_authors(False)
    scaled: bool = of_authors(False)

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask, repeated=self.repeated)

    def begin(self) -> None:
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    def visit(self, call: Call) -> None:
        looks, seen = self.frames[call.query_stream], self.frames[call.key_stream]
        if not self.speaks(looks.stream):
            return
        count = len(self.layers[looks.stream, seen.stream])
        read = push(looks.readout, relevance_map(call, looks, seen, self.scaled)).sum(1)
        self.rows[seen.stream] = self.rows[seen.stream] + read / count

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}


def relevance_map(call: Call, looks: Frame, seen: Frame, scaled: bool) -> Float[Tensor, "batch head query key"]:
    """P⁺ head by head; or E_h P, the whole map of each sample brought to 0…1, as one head."""
    assert call.relevance is not None
    if not scaled:
        return call.relevance.clamp(min=0)
    mean = call.relevance.mean(1, keepdim=True)
    outside = ~(looks.valid[:, None, :, None] & seen.valid[:, None, None])
    low = mean.masked_fill(outside, torch.inf).amin((2, 3), keepdim=True)
    high = mean.masked_fill(outside, -torch.inf).amax((2, 3), keepdim=True)
    return ((mean - low) / (high - low)).masked_fill(outside, 0)
