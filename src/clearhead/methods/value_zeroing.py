"""Value zeroing: the change of each token's state when the value vector of another token is set to zero.

    C_l[i,j] = 1 − cos(h_i, h_i without v_j),     r = w · Ĉ_L · … · Ĉ_1          w: the read-out

h_i is the output of layer l at token i. Without v_j, the value vector of token j is zero in all heads of that layer,
and the attention weights are unchanged. Ĉ is C with rows divided by their sums. No identity is added: the states
already include the residual connection of the layer.

In a decoder the first token attends only to itself, and without an identity the product moves the read-out towards it
layer by layer: after 30 layers it has 1.0, and the other tokens 1e-9 to 1e-27. A row whose distances are all rounding
errors has an order, too, because rows are divided by their sums: the certificate has the share of the mixing that
passes through such rows, in the layer where it is largest (`rounding_share`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType

#: The distance of hidden states that differ by this many rounding errors counts as zero.
_ROUNDING_ERRORS = 4


@register_method(
    "value-zeroing",
    pass_type=PassType.INTERVENTION,
    family="perturbation",
    requires=("attention", "values"),
    cost=Cost(forward=2, per_unit=1, note="layer by layer"),
    citation="Mohebbi et al. (2023), Quantifying context mixing in transformers, EACL",
    signed=False,
    target="none",
    measures="how much each unit's hidden state changes when another unit's values are set to zero, layer by layer",
    misleads="it does not depend on the target, and later layers can undo the change",
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
        self.rounding_share = self.unit_context.readout.new_zeros(len(self.unit_context.readout))

    def on_call(self, call: AttentionCall) -> None:
        """r ← r Ĉ, after the row whose read-out depth is this layer has started."""
        assert call.value_zeroing_distance is not None
        if self.has_single_row:
            self.mixing_rows[:, call.layer - self.unit_context.layers.start] = self.unit_context.readout[:, 0]
        self.rounding_share = self.rounding_share.maximum(self._compute_rounding_share(call.value_zeroing_distance))
        self.mixing_rows = self.mixing_rows @ self._normalise_rows(call.value_zeroing_distance)

    def _compute_rounding_share(self, distances: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch"]:
        """Compute which share of the mixing rows is on queries whose distances are rounding errors, but not zero."""
        largest_rounding_error = _ROUNDING_ERRORS * torch.finfo(self.unit_context.model_dtype).eps
        largest = distances.masked_fill(~self.unit_context.valid_mask[:, None], 0).amax(-1)
        is_rounding = (largest > 0) & (largest <= largest_rounding_error**2 / 2)
        rows = self.mixing_rows[:, -1:] if self.has_single_row else self.mixing_rows
        return (rows * is_rounding[:, None]).sum((1, 2)) / rows.sum((1, 2)).clamp(min=1e-30)

    def _normalise_rows(self, distances: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch query key"]:
        """Compute Ĉ: distances divided by their row sums, without padding."""
        valid = self.unit_context.valid_mask
        distances = distances.masked_fill(~(valid[:, :, None] & valid[:, None]), 0).to(self.mixing_rows)
        sums = distances.sum(-1, keepdim=True)
        return distances / torch.where(sums > 0, sums, 1)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Return the rows; of a single read-out row those of all depths, the last as scores."""
        diagnostics = {"rounding_share": self.rounding_share}
        if self.has_single_row:
            return MethodScores(self.mixing_rows[:, -1:], per_layer=self.mixing_rows, diagnostics=diagnostics)
        return MethodScores(self.mixing_rows, diagnostics=diagnostics)
