"""The gradient of attention: where more attention would increase the target.

    r = w · E_h[∂y/∂A_l]          w: the read-out

The last layer by default; the mean over several layers. A baseline of AttCAT's authors (“Grads”).
"""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall
from clearhead.methods.base import AttributionMethod, push_rows, register_method
from clearhead.methods.cost import Cost


@register_method(
    "attention-gradient",
    family="attention",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Barkan et al. (2021), CIKM; as a baseline in Qiang et al. (2022), AttCAT, NeurIPS",
    signed=True,
    target="any",
    measures="how much the target would change with each attention weight",
    misleads="the gradient vanishes where the softmax is saturated, even if the weight matters to the target",
    linear_in_target=True,
    layers=(-1, None),
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
)
class AttentionGradient(AttributionMethod):
    """Gradient of the target at the attention of the read-out row."""

    tile_passes: ClassVar[int] = 1
    needs_masked_gradients: ClassVar[bool] = True

    def on_tile(
        self, call: AttentionCall, queries: slice, previous_total: Tensor | None
    ) -> Float[Tensor, "batch head row unit"]:
        """w · ∂y/∂A of the tile's queries, by head, zero at padding, divided by the number of layers."""
        assert call.attention_gradient is not None
        # The gradient of attention to padding is not zero, although that attention is masked.
        valid = self.unit_context.valid_mask[:, None, None].to(call.attention_gradient.dtype)
        return (
            push_rows(self.unit_context.readout[:, :, queries], call.attention_gradient)
            * valid
            / len(self.unit_context.layers)
        )
