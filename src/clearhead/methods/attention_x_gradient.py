"""Attention times its gradient, summed over the layers.

    r = w · Σ_l E_h[A_l ⊙ ∂y/∂A_l]          w: the read-out

A baseline of AttCAT's authors (“AttGrads”): Generic Attention's maps without the clamp, added instead of multiplied.
"""

from typing import ClassVar

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call
from clearhead.methods.base import Fold, register


@register(
    "attention-x-gradient",
    family="attention",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="as a baseline in Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation "
    "tokens, NeurIPS",
    signed=True,
    target="any",
    linear_in_target=True,
    has=("layers", "heads", "rows"),
    parts="contributions",
)
class AttentionXGradient(Fold):
    sweeps: ClassVar[int] = 1

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("product", self.frame.readout)
