"""Generic Attention: relevance accumulated over the layers from attention times its gradient.

    Ā_l = E_h[(∂y/∂A_l ⊙ A_l)⁺],     R ← R + Ā_l R  from R = I,     r = w · (R − I)

Only the read-out row is pushed, from the last layer to the first: r ← r + r Ā_l. The addition of each layer is kept, so
the scores are the sum of the contributions of layers and heads. The identity is never added: subtracting it afterwards
would lose everything below float32's 1e-7. For streams that attend to each other see `generic_cross_attention.py`; the
options `normalise`, `within` and `guard` concern its rules and are refused elsewhere. The other options apply always:
`aggregate` (without it R is replaced, not added to), `fusion`, and `lrp`, the authors' ablation, which uses the
relevance of A_l by propagation rules (`backward_rules/lrp.py`) in place of A_l.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import LRPRules
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.errors import InputError
from clearhead.methods.base import AttributionMethod, MethodScores, compat_option, push_rows, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType

#: Handling of zero rows of relevance when rows are divided by their sums: "rows" keeps them zero (default),
#: "additions" produces NaN and skips updates where they are NaN (the authors' code for DETR), "none" keeps NaN (their
#: code for LXMERT).
ZeroRowGuard = Literal["rows", "additions", "none"]
#: How heads are combined: clamp, then mean over heads (as published); mean, then clamp (Beyond Intuition's code for
#: ViT); separate means of attention and gradient, then product and clamp (InterpretDL).
HeadFusion = Literal["clamp-mean", "mean-clamp", "separate-means"]


@register_method(
    "generic",
    family="relevance",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Chefer, Gur & Wolf (2021), Generic attention-model explainability for interpreting bi-modal and "
    "encoder-decoder transformers, ICCV",
    signed=False,
    target="any",
    measures="attention weighted by its gradient, multiplied across layers",
    misleads="negative contributions are set to zero, and in decoders the first token often receives most of the score",
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
)
class GenericAttention(AttributionMethod):
    """Generic Attention for models with one stream, or streams without cross-attention.

    Attributes:
        aggregate: Whether R is added to over the layers; else it is replaced.
        normalise: Only for streams that attend to each other (rules 8 and 9).
        within: Only for streams that attend to each other (rule 10).
        guard: Only for streams that attend to each other: handling of zero rows.
        fusion: How heads are combined.
        lrp: Whether LRP relevance replaces attention in the product with the gradient.
        needs_standard_gradient: The ordinary gradient is recorded next to the relevance.
        rule_set: The LRP rules for `lrp=True`.
    """

    tile_passes: ClassVar[int] = 1
    aggregate: bool = True
    normalise: bool = compat_option(True)
    within: bool = compat_option(True)
    guard: ZeroRowGuard = compat_option("rows")
    fusion: HeadFusion = compat_option("clamp-mean")
    lrp: bool = compat_option(False)

    needs_standard_gradient: ClassVar[bool] = True
    rule_set: ClassVar[LRPRules] = LRPRules()

    @classmethod
    def get_pass_type(cls, options: Mapping[str, Any]) -> PassType:
        """A modified backward pass with `lrp`, for which relevance of attention is recorded; else the clean pass."""
        if options.get("lrp"):
            return PassType.MODIFIED_BACKWARD
        return PassType.TAPE

    @classmethod
    def get_cost(cls, options: Mapping[str, Any]) -> Cost:
        """Return the declared cost; with `lrp` there is a second pass, for the relevance of attention."""
        if options.get("lrp"):
            return Cost(forward=2, backward=2, note="in float64, one of each with propagation rules")
        return cls.declaration.cost

    def setup(self) -> None:
        if not self.normalise or not self.within or self.guard != "rows":
            raise InputError(
                "normalise=, within= and guard= apply only to streams that attend to each other (rules 8 to 10), but "
                "each stream of this model attends only to itself: leave them out"
            )
        self.relevance_rows = self.unit_context.readout

    def request_reduction(self, call: AttentionCall) -> MapReduction | None:
        """r (A ⊙ ∂y/∂A)⁺ with the rows r so far; None if `fusion` or `lrp` needs the tiles."""
        if self.fusion != "clamp-mean" or self.lrp:
            return None
        return MapReduction("positive", self.relevance_rows, has_negative_rows=False)

    def on_tile(
        self, call: AttentionCall, queries: slice, previous_total: Tensor | None
    ) -> Float[Tensor, "batch head row unit"]:
        """r Ā of the tile's queries, with the options `fusion` and `lrp`."""
        return push_rows(self.relevance_rows[:, :, queries], compute_head_relevance(call, self.fusion, self.lrp))

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        """r ← r + r Ā, with r Ā as the contribution; without `aggregate` r ← r Ā."""
        if self.aggregate:
            self.relevance_rows = self.relevance_rows + total.sum(1)
            return total
        self.relevance_rows = total.sum(1)
        if call.layer == self.unit_context.layers.start:
            return total
        return torch.zeros_like(total)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Sum the contributions; there are none of heads if `fusion` averages heads before the clamp."""
        result = super().compute_scores(tape)
        if self.fusion == "clamp-mean":
            return result
        return replace(result, per_head=None)  # the other modes average heads before the clamp


def compute_head_relevance(
    call: AttentionCall, fusion: HeadFusion, lrp: bool = False
) -> Float[Tensor, "batch head query key"]:
    """Compute the clamped product of attention and gradient: per head for "clamp-mean", else one map for all heads."""
    if lrp:
        call = replace(call, attention=call.relevance)
    if fusion == "clamp-mean":
        return call.positive_product
    assert call.attention is not None and call.attention_gradient is not None
    if fusion == "mean-clamp":
        return (call.attention * call.attention_gradient).mean(1, keepdim=True).clamp_(min=0)
    return (call.attention.mean(1, keepdim=True) * call.attention_gradient.mean(1, keepdim=True)).clamp_(min=0)
