"""Attention times its gradient, summed over the layers.

    r = w · Σ_l E_h[A_l ⊙ ∂y/∂A_l]          w: the read-out

A baseline of AttCAT's authors (“AttGrads”): the maps of Generic Attention without the clamp, added over the layers
instead of multiplied.
"""

from typing import ClassVar

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall
from clearhead.methods.base import AttributionMethod, register_method
from clearhead.methods.cost import Cost


@register_method(
    "attention-x-gradient",
    family="attention",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="as a baseline in Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation "
    "tokens, NeurIPS",
    signed=True,
    target="any",
    measures="how much each attention weight adds to the target, to first order",
    misleads="the gradient vanishes where the softmax is saturated, and the content of the values is ignored",
    linear_in_target=True,
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
)
class AttentionXGradient(AttributionMethod):
    """Attention of the read-out row times its gradient, summed over layers."""

    tile_passes: ClassVar[int] = 1

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """w · (A ⊙ ∂y/∂A) of each head."""
        return MapReduction("product", self.unit_context.readout, has_negative_rows=False)
