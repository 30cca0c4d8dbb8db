"""Grad-SAM: attention times the positive part of its gradient.

    H_lh = A_lh ⊙ (∂y/∂A_lh)⁺,     r_i = 1/(L·M·N) Σ_l Σ_h Σ_j H_lh[i, j]

The sum runs over the keys of token i's row, as in the paper: how token i attends to other tokens. With `received=True`
it runs over the queries of its column: how other tokens attend to token i. N includes special tokens.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall
from clearhead.methods.base import AttributionMethod, register_method
from clearhead.methods.cost import Cost


@register_method(
    "grad-sam",
    family="relevance",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Barkan et al. (2021), Grad-SAM: explaining transformers via gradient self-attention maps, CIKM",
    signed=False,
    target="any",
    measures="attention multiplied by its positive gradient, averaged over heads and layers",
    misleads="information that early layers move between tokens is credited to the receiving token",
    supports=("layers", "heads"),
    layer_scores="contributions",
)
class GradSAM(AttributionMethod):
    """Attention times its positive gradient, averaged over layers and heads.

    Attributes:
        received: Whether to sum over the queries that attend to a token, instead of its own keys.
    """

    tile_passes: ClassVar[int] = 1
    received: bool = False

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """(A ⊙ ∂y/∂A)⁺ summed over keys; with `received` over queries, as a row of ones."""
        # A is never negative, so A ⊙ G⁺ = (A ⊙ G)⁺, a reduction that other methods use, too
        ones = torch.ones_like(self.unit_context.readout[:, :1])
        return MapReduction("positive", ones if self.received else None, has_negative_rows=False)

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        """Divide the sums by layers × heads × length."""
        lengths = self.unit_context.lengths.to(total.dtype)[:, None, None, None]
        if self.received:  # a reduction with row weights is already divided by the number of heads
            return total / (len(self.unit_context.layers) * lengths)
        return total[:, :, None] / (len(self.unit_context.layers) * total.shape[1] * lengths)
