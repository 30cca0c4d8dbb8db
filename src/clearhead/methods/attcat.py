"""AttCAT: CAT weighted, in each layer, by the attention that the token receives.

    a^l_i = E_h of the attention that token i receives,     AttCAT_i = Σ_l a^l_i · CAT^l_i

`weights="received"` averages the attention over all queries (sentence classification). `weights="row"` uses the
read-out row only (the authors' variant for a masked token). For an answer span, the scores of its start and its end are
added. With `absolute` their absolute values are added, as in the authors' code for SQuAD 2; there are then no
contributions of layers.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods.base import AttributionMethod, MethodScores, compat_option, register_method
from clearhead.methods.cat import compute_features_x_gradient
from clearhead.methods.cost import Cost


@register_method(
    "attcat",
    family="relevance",
    requires=("attention", "block_input", "block_input_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation tokens, NeurIPS",
    signed=True,
    target="any",
    measures="the contribution of each token's hidden states to the target, distributed along attention",
    misleads="layers are added up although each builds on the previous one, so early evidence is counted several times",
    linear_in_target=True,
    supports=("layers", "heads"),
    layer_scores="contributions",
)
class AttCAT(AttributionMethod):
    """CAT weighted by the attention that each token receives.

    Attributes:
        weights: Attention averaged over all queries ("received"), or of the read-out row ("row").
        absolute: Whether to add the absolute values of the scores of an answer's start and end.
    """

    tile_passes: ClassVar[int] = 1
    weights: Literal["received", "row"] = "received"
    absolute: bool = compat_option(False)

    @property
    def linear_in_target(self) -> bool:
        """False with `absolute`, which adds absolute values."""
        return not self.absolute

    @property
    def depends_on_readout(self) -> bool:
        """True for `weights="row"`; attention averaged over all queries has no read-out."""
        return self.weights == "row"

    def setup(self) -> None:
        self.query_weights = self.unit_context.readout
        if self.weights == "received":
            valid = self.unit_context.valid_mask[:, None].to(self.unit_context.readout.dtype)
            self.query_weights = valid / valid.sum(-1, keepdim=True)

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """The attention that each token receives, weighted over the queries."""
        return MapReduction("attention", self.query_weights)

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        """Multiply the received attention of each head with CAT^l_i of the token."""
        return total * compute_features_x_gradient(call)[:, None, None]

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Sum the contributions; with `absolute` take absolute values, and drop layers and heads."""
        result = super().compute_scores(tape)
        if not self.absolute:
            return result
        return replace(result, scores=result.scores.abs(), per_layer=None, per_head=None)
