"""Value zeroing: the change of each token's state when the value vector of another token is set to zero.

    C_l[i,j] = 1 − cos(h_i, h_i without v_j),     r = w · Ĉ_L · … · Ĉ_1          w: the read-out

h_i is the output of layer l at token i. Without v_j, the value vector of token j is zero in all heads of that layer,
and the attention weights are unchanged. Ĉ is C with rows divided by their sums. No identity is added: the states
already include the residual connection of the layer.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "value-zeroing",
    pass_type=PassType.INTERVENTION,
    family="perturbation",
    requires=("attention", "values"),
    cost=Cost(forward=2, per_unit=1, note="layer by layer"),
    citation="Mohebbi et al. (2023), Quantifying context mixing in transformers, EACL",
    signed=False,
    target="none",
    measures="how much each unit's state changes when another unit's values are removed, layer by layer",
    misleads="it does not know the target, and later layers can undo the change",
    supports=("layers", "rows"),
    layer_scores="depths",
    axioms=("rows sum to one",),
    # the distance is half the squared difference of two almost equal states
    rounding_amplification=100.0,
)
class ValueZeroing(AttributionMethod):
    """Cosine distance of hidden states with and without the value vector of each token."""

    def setup(self) -> None:
        self.has_single_row = self.unit_context.readout.shape[1] == 1
        self.mixing_rows = self.unit_context.readout
        if self.has_single_row:  # one row per depth: the row of the read-out after layer l starts at layer l
            depths = len(self.unit_context.layers)
            self.mixing_rows = torch.zeros_like(self.unit_context.readout).repeat(1, depths, 1)

    def on_call(self, call: AttentionCall) -> None:
        """r ← r Ĉ, after the row whose read-out depth is this layer has started."""
        assert call.value_zeroing_distance is not None
        if self.has_single_row:
            self.mixing_rows[:, call.layer - self.unit_context.layers.start] = self.unit_context.readout[:, 0]
        self.mixing_rows = self.mixing_rows @ self._normalise_rows(call.value_zeroing_distance)

    def _normalise_rows(self, distances: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch query key"]:
        """Compute Ĉ: distances divided by their row sums, without padding."""
        valid = self.unit_context.valid_mask
        distances = distances.masked_fill(~(valid[:, :, None] & valid[:, None]), 0).to(self.mixing_rows)
        sums = distances.sum(-1, keepdim=True)
        return distances / torch.where(sums > 0, sums, 1)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Return the rows; of a single read-out row those of all depths, the last as scores."""
        if self.has_single_row:
            return MethodScores(self.mixing_rows[:, -1:], per_layer=self.mixing_rows)
        return MethodScores(self.mixing_rows)
