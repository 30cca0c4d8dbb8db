"""Partial LRP: the relevance that arrives at the attention of the last layer, what is negative left out.

    r = w · E_h[P_l⁺]          w: the read-out,  P_l: the relevance of A_l

The last layer by default; over several layers their mean. `rules` is the family of rules (`rules/relevance.py`): "orig"
as published, or "ours", those of Transformer Attribution.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import of_authors, push, register
from clearhead.methods.under_rules import PATENTS, UnderRules
from clearhead.recording.tape import Call
from clearhead.rules.relevance import Relevance


@register(
    "partial-lrp",
    kind="rules",
    family="relevance",
    asks=("attention_gradient",),
    cost="one forward and one backward, under rules",
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

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask)

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.relevance is not None
        return push(self.frame.readout, call.relevance.clamp(min=0)) / len(self.frame.layers)
