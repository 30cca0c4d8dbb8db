"""Generic Attention: relevance gathered layer by layer from attention times its gradient.

    Ā_l = E_h[(∂y/∂A_l ⊙ A_l)⁺],     R ← R + Ā_l R  from R = I,     r = w · (R − I)

The read-out row alone is pushed, from the last layer to the first: r ← r + r Ā_l. What each layer adds is kept, so the
scores are the sum of the layers' and heads' shares, and the identity is never added (subtracting it afterwards would
lose what lies below float32's 1e-7). Where streams look at each other: `generic_cross_attention.py`, whose rules the
options concern: `normalise`, `within` and `guard` are refused elsewhere. Everywhere: `aggregate` (without it R is
replaced, not added to), `fusion`, and `lrp`, the authors' ablation: the relevance of A_l by rules of propagation
(`backward_rules/lrp.py`) in place of A_l.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import Relevance
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call, Tape
from clearhead.errors import InputError
from clearhead.methods.base import Fold, Scores, of_authors, push, register

#: What becomes of a row of relevance that is zero when it is divided by its sum: it stays zero (ours), or it becomes
#: NaN, and additions that hold NaN are left out (the authors' DETR) or are not (their LXMERT).
Guard = Literal["rows", "additions", "none"]
#: How heads are joined: clamp, then mean over heads (as published); mean, then clamp (Beyond Intuition's code
#: for ViT); means of attention and gradient apart, then product and clamp (InterpretDL).
Fusion = Literal["clamp-mean", "mean-clamp", "separate-means"]


@register(
    "generic",
    family="relevance",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="Chefer, Gur & Wolf (2021), Generic attention-model explainability for interpreting bi-modal and "
    "encoder-decoder transformers, ICCV",
    signed=False,
    target="any",
    has=("layers", "heads", "rows"),
    parts="contributions",
)
class Generic(Fold):
    sweeps: ClassVar[int] = 1
    aggregate: bool = True
    normalise: bool = of_authors(True)
    within: bool = of_authors(True)
    guard: Guard = of_authors("rows")
    fusion: Fusion = of_authors("clamp-mean")
    lrp: bool = of_authors(False)

    beside: ClassVar[bool] = True
    family: ClassVar[Relevance] = Relevance()

    @classmethod
    def kind_with(cls, options: Mapping[str, Any]) -> str:
        return "rules" if options.get("lrp") else "tape"

    def begin(self) -> None:
        if not self.normalise or not self.within or self.guard != "rows":
            raise InputError(
                "normalise=, within= and guard= are about streams that look at each other (rules 8 to 10), and here "
                "there is one, or each looks at itself alone: leave them out"
            )
        self.rows = self.frame.readout

    def wanted_sum(self, call: Call) -> Reduce | None:
        return Reduce("positive", self.rows) if self.fusion == "clamp-mean" and not self.lrp else None

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Float[Tensor, "batch head row unit"]:
        return push(self.rows[:, :, queries], relevance_of(call, self.fusion, self.lrp))

    def joined(self, call: Call, added: Tensor) -> Float[Tensor, "batch head row unit"]:
        if self.aggregate:
            self.rows = self.rows + added.sum(1)
            return added
        self.rows = added.sum(1)
        return added if call.layer == self.frame.layers.start else torch.zeros_like(added)

    def finish(self, tape: Tape) -> Scores:
        found = super().finish(tape)
        return found if self.fusion == "clamp-mean" else replace(found, per_head=None)  # heads were joined before


def relevance_of(call: Call, fusion: Fusion, lrp: bool = False) -> Float[Tensor, "batch head query key"]:
    """Head by head where each is clamped by itself, else one map for all."""
    if lrp:
        call = replace(call, attention=call.relevance)
    if fusion == "clamp-mean":
        return call.positive
    assert call.attention is not None and call.attention_gradient is not None
    if fusion == "mean-clamp":
        return (call.attention * call.attention_gradient).mean(1, keepdim=True).clamp_(min=0)
    return (call.attention.mean(1, keepdim=True) * call.attention_gradient.mean(1, keepdim=True)).clamp_(min=0)
