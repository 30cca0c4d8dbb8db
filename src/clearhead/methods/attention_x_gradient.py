"""Attention times its gradient, summed over the layers.

    r = w · Σ_l E_h[A_l ⊙ ∂y/∂A_l]          w: the read-out

A baseline of AttCAT's authors (“AttGrads”): Generic Attention's maps without the clamp, added instead of multiplied.
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, push, register
from clearhead.recording.tape import Call


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
    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.attention is not None and call.attention_gradient is not None
        return push(self.frame.readout, call.attention * call.attention_gradient)
