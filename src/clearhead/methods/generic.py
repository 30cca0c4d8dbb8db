"""Generic Attention: relevance gathered layer by layer from attention times its gradient.

    Ā_l = E_h[(∂y/∂A_l ⊙ A_l)⁺],     R ← R + Ā_l R  from R = I,     r = w · (R − I)

The read-out row alone is pushed, from the last layer to the first: r ← r + r Ā_l. What each layer adds is kept, so the
scores are the sum of the layers' and heads' shares, and the identity is never added (subtracting it afterwards would
lose what lies below float32's 1e-7). Where streams look at each other: `generic_across.py`, whose rules the options
concern; here only `aggregate` counts: without it R is replaced, not added to.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, push, register
from clearhead.recording.tape import Call

#: What becomes of a row of relevance that is zero when it is divided by its sum: it stays zero (ours), or it becomes
#: NaN, and additions that hold NaN are left out (the authors' DETR) or are not (their LXMERT).
Guard = Literal["rows", "additions", "none"]


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
    aggregate: bool = True
    normalise: bool = True
    within: bool = True
    guard: Guard = "rows"

    def begin(self) -> None:
        self.rows = self.frame.readout

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        added = push(self.rows, call.positive)
        if self.aggregate:
            self.rows = self.rows + added.sum(1)
            return added
        self.rows = added.sum(1)
        return added if call.layer == self.frame.layers.start else torch.zeros_like(added)
