"""Partial LRP: the positive part of the relevance that is propagated to the attention of the last layer.

    r = w · E_h[P_l⁺]          w: the read-out,  P_l: the relevance of A_l

The last layer by default; the mean over several layers. `rules` is the rule set (`backward_rules/lrp.py`): "orig" as
published, or "ours", the rules of Transformer Attribution. If streams attend to each other, each map is read
separately.

With `scaled` each map keeps its negative values and is rescaled to 0…1 before its read-out row is taken, as in the
authors' code for LXMERT, VisualBERT and DETR: scores then depend on rows other than the read-out. With `repeated`, each
patch gets all the relevance of the patches' mean, as in the authors' code for image models with mean pooling.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import LRPRules
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods._modified_backward import (
    LRP_PATENT_NOTE,
    CrossStreamModifiedBackwardMethod,
    ModifiedBackwardMethod,
)
from clearhead.methods.base import (
    MethodScores,
    UnitContext,
    compat_option,
    push_rows,
    register_cross_stream_method,
    register_method,
)
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "partial-lrp",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("attention_gradient",),
    cost=Cost(forward=1, backward=1, note="with propagation rules, in float64"),
    citation="Voita et al. (2019), Analyzing multi-head self-attention, ACL; as in Chefer, Gur & Wolf (2021), "
    "Transformer interpretability beyond attention visualization, CVPR",
    signed=False,
    target="any",
    measures="the relevance of the attention weights of the last layer, combined over heads",
    misleads="only one layer is used",
    layers=(-1, None),
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
    note=LRP_PATENT_NOTE,
    rounding_amplification=1e4,
)
class PartialLRP(ModifiedBackwardMethod):
    """Positive relevance of the attention of the last layer.

    Attributes:
        rules: The rule set: "orig" as published, "ours" that of Transformer Attribution.
        mask: Whether a mask is added to attention even if no token is masked, as in the authors' code for BERT.
        repeated: Whether each patch gets all the relevance of the patches' mean, as in the authors' code for mean
            pooling.
        scaled: Whether each map keeps negative values and is rescaled to 0…1 before the read-out row is taken.
    """

    rules: Literal["orig", "ours"] = "orig"
    mask: bool = compat_option(False)
    repeated: bool = compat_option(False)
    scaled: bool = compat_option(False)

    @property
    def rule_set(self) -> LRPRules:
        """The rules of the options; `repeated` sets `repeats_mean_relevance`."""
        return LRPRules(self.rules, mask_takes_relevance=self.mask, repeats_mean_relevance=self.repeated)

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"]:
        """w · P⁺ of each head, divided by the number of layers."""
        return push_rows(
            self.unit_context.readout, compute_relevance_map(call, self.unit_context, self.unit_context, self.scaled)
        ) / len(self.unit_context.layers)


@register_cross_stream_method("partial-lrp")
class CrossStreamPartialLRP(CrossStreamModifiedBackwardMethod):
    """Variant for models whose streams attend to each other; same options as `PartialLRP`.

    Attributes:
        rules: As in `PartialLRP`.
        mask: As in `PartialLRP`.
        repeated: As in `PartialLRP`.
        scaled: As in `PartialLRP`.
    """

    rules: Literal["orig", "ours"] = "orig"
    mask: bool = compat_option(False)
    repeated: bool = compat_option(False)
    scaled: bool = compat_option(False)

    @property
    def rule_set(self) -> LRPRules:
        """The rules of the options; `repeated` sets `repeats_mean_relevance`."""
        return LRPRules(self.rules, mask_takes_relevance=self.mask, repeats_mean_relevance=self.repeated)

    def setup(self) -> None:
        self.scores_by_stream = {
            stream: torch.zeros_like(unit_context.readout) for stream, unit_context in self.unit_contexts.items()
        }

    def on_call(self, call: AttentionCall) -> None:
        """Add w · P⁺ to the key stream, divided by the number of layers of this pair of streams."""
        query_context = self.unit_contexts[call.query_stream]
        key_context = self.unit_contexts[call.key_stream]
        if not self.has_readout(query_context.stream):
            return
        num_layers = len(self.layers[query_context.stream, key_context.stream])
        relevance_map = compute_relevance_map(call, query_context, key_context, self.scaled)
        rows = push_rows(query_context.readout, relevance_map).sum(1)
        self.scores_by_stream[key_context.stream] = self.scores_by_stream[key_context.stream] + rows / num_layers

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Return the accumulated rows of each stream."""
        return {stream: MethodScores(rows) for stream, rows in self.scores_by_stream.items()}


def compute_relevance_map(
    call: AttentionCall, query_context: UnitContext, key_context: UnitContext, rescale: bool
) -> Float[Tensor, "batch head query key"]:
    """Return P⁺ per head; or E_h P as a single head, with the map of each sample rescaled to 0…1."""
    assert call.relevance is not None
    if not rescale:
        return call.relevance.clamp(min=0)
    mean = call.relevance.mean(1, keepdim=True)
    padding = ~(query_context.valid_mask[:, None, :, None] & key_context.valid_mask[:, None, None])
    low = mean.masked_fill(padding, torch.inf).amin((2, 3), keepdim=True)
    high = mean.masked_fill(padding, -torch.inf).amax((2, 3), keepdim=True)
    return ((mean - low) / (high - low)).masked_fill(padding, 0)
