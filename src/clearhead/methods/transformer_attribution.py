"""Transformer Attribution: LRP relevance of attention times its gradient, accumulated over the layers.

    Ā_l = E_h[(∂y/∂A_l ⊙ P_l)⁺],     R = (I + Ā_{L-1}) ⋯ (I + Ā_s),     r = w · (R − I)

P_l is the relevance of A_l by the authors' propagation rules (`backward_rules/lrp.py`). Only the read-out row is
pushed, from the last layer to the first, and the addition of each layer is kept: r ← r + r Ā_l. With `normalise` each
row of I + Ā_l is divided by its sum, as in the authors' code for BERT, and r = w · R: the remainder of w is part of the
scores, and of the contribution of the first layer. With `repeated`, each patch gets all the relevance of the patches'
mean, as in the authors' code for image models with mean pooling: too large by a factor of the number of patches.

If streams attend to each other (co-attention, encoder–decoders), as in the authors' comparisons: R accumulates the
self-attention of a read-out stream; for another stream, r = w · Ā of the last layer that attends to it. The layers of a
residual tower, which runs in parallel to a stream and is added to it after each of its layers (BridgeTower), count as
layers of the stream that attend to the tower (reason: `generic_cross_attention.py`): a row x of the stream and a row t
of the tower become x and t + (x + t) Ā. A stream without self-attention has R = I and contributes no scores.
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
from clearhead.methods.base import MethodScores, compat_option, push_rows, register_cross_stream_method, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "transformer-attribution",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("attention_gradient",),
    cost=Cost(forward=2, backward=2, note="in float64, one of each with propagation rules"),
    citation="Chefer, Gur & Wolf (2021), Transformer interpretability beyond attention visualization, CVPR",
    signed=False,
    target="any",
    measures="attention weighted by relevance and gradient, multiplied across layers",
    misleads="negative contributions are set to zero, and relevance is rescaled at every layer",
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
    note=LRP_PATENT_NOTE,
    rounding_amplification=1e4,
)
class TransformerAttribution(ModifiedBackwardMethod):
    """Relevance of attention times its gradient, for the read-out row.

    Attributes:
        normalise: Whether rows of I + Ā are divided by their sums (the authors' code for BERT).
        rules: The rule set of LRP.
        mask: Whether a mask is added to attention even if no token is masked, as in the authors' code for BERT.
        repeated: Whether each patch gets all the relevance of the patches' mean, as in the authors' code for mean
            pooling.
    """

    normalise: bool = False
    rules: Literal["ours", "orig"] = "ours"
    mask: bool = compat_option(False)
    repeated: bool = compat_option(False)

    needs_standard_gradient = True

    @property
    def rule_set(self) -> LRPRules:
        """The rules of the options; `repeated` sets `repeats_mean_relevance`."""
        return LRPRules(self.rules, mask_takes_relevance=self.mask, repeats_mean_relevance=self.repeated)

    def setup(self) -> None:
        self.relevance_rows = self.identity_rows = self.unit_context.readout

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"]:
        """r ← r + r Ā, with r Ā as contribution; `normalise` first divides r by the row sums of I + Ā."""
        relevance = compute_positive_relevance(call)
        if self.normalise:
            self._divide_by_row_sums(1 + relevance.mean(1).sum(-1))
        added = push_rows(self.relevance_rows, relevance)
        self.relevance_rows = self.relevance_rows + added.sum(1)
        return added

    def _divide_by_row_sums(self, sums: Float[Tensor, "batch unit"]) -> None:
        """Row-normalise Ā of this layer: R·Ā/s divides what later layers have contributed by the row sums s, too."""
        self.relevance_rows = self.relevance_rows / sums[:, None]
        self.identity_rows = self.identity_rows / sums[:, None]
        self.call_scores = [contribution / sums[:, None, None] for contribution in self.call_scores]

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Sum the contributions; with `normalise` the first layer's includes the remainder of w."""
        if self.normalise:
            self.call_scores[-1] = self.call_scores[-1] + self.identity_rows[:, None] / self.call_scores[-1].shape[1]
        return super().compute_scores(tape)


@register_cross_stream_method("transformer-attribution")
class CrossStreamTransformerAttribution(CrossStreamModifiedBackwardMethod):
    """Variant for models whose streams attend to each other; same options as `TransformerAttribution`.

    Attributes:
        normalise: As in `TransformerAttribution`.
        rules: As in `TransformerAttribution`.
        mask: As in `TransformerAttribution`.
        repeated: As in `TransformerAttribution`.
    """

    normalise: bool = False
    rules: Literal["ours", "orig"] = "ours"
    mask: bool = compat_option(False)
    repeated: bool = compat_option(False)

    needs_standard_gradient = True

    @property
    def rule_set(self) -> LRPRules:
        """The rules of the options; `repeated` sets `repeats_mean_relevance`."""
        return LRPRules(self.rules, mask_takes_relevance=self.mask, repeats_mean_relevance=self.repeated)

    def setup(self) -> None:
        self.self_relevance = {
            stream: StreamRelevanceRows(unit_context.readout) for stream, unit_context in self.unit_contexts.items()
        }
        self.cross_rows: dict[tuple[str, str], Float[Tensor, "batch row unit"]] = {}

    def on_call(self, call: AttentionCall) -> None:
        """Push the rows of a stream through its self-attention; keep w · Ā of the last cross-attention."""
        query_stream = call.query_stream
        key_stream = call.key_stream
        if query_stream == key_stream:
            self.self_relevance[query_stream].push_through(
                compute_positive_relevance(call).mean(1), call.module in self.residual_towers, self.normalise
            )
        elif (query_stream, key_stream) not in self.cross_rows:  # calls come from the last to the first
            readout = self.unit_contexts[query_stream].readout
            self.cross_rows[query_stream, key_stream] = push_rows(readout, compute_positive_relevance(call)).sum(1)

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Add the rows of each stream's self-attention and those of the attention to it."""
        rows = {stream: relevance.compute_rows(self.normalise) for stream, relevance in self.self_relevance.items()}
        for (_, key_stream), cross_rows in self.cross_rows.items():
            rows[key_stream] = rows[key_stream] + cross_rows
        return {stream: MethodScores(stream_rows) for stream, stream_rows in rows.items()}


class StreamRelevanceRows:
    """Rows of one stream while they are pushed from the last layer to the first.

    Attributes:
        identity_rows: The part of w that no layer has mixed.
        accumulated_rows: The relevance accumulated in the stream.
        tower_rows: The relevance accumulated in its residual tower.

    Args:
        readout: The weight of each unit's row for each read-out.
    """

    def __init__(self, readout: Float[Tensor, "batch row unit"]) -> None:
        self.identity_rows = readout
        self.accumulated_rows = torch.zeros_like(readout)
        self.tower_rows = torch.zeros_like(readout)
        self.has_pushed = False

    def push_through(self, relevance: Float[Tensor, "batch unit unit"], in_tower: bool, normalise: bool) -> None:
        """Push the rows through one layer.

        Args:
            relevance: Ā of the layer.
            in_tower: Whether the layer belongs to the residual tower.
            normalise: Whether the rows of I + Ā are divided by their sums.
        """
        self.has_pushed = True
        if normalise:
            sums = 1 + relevance.sum(-1)[:, None]
            self.identity_rows = self.identity_rows / sums
            self.accumulated_rows = self.accumulated_rows / sums
            if in_tower:
                self.tower_rows = self.tower_rows / sums
        if in_tower:
            self.tower_rows = (
                self.tower_rows + (self.identity_rows + self.accumulated_rows + self.tower_rows) @ relevance
            )
        else:
            self.accumulated_rows = self.accumulated_rows + (self.identity_rows + self.accumulated_rows) @ relevance

    def compute_rows(self, normalise: bool) -> Float[Tensor, "batch row unit"]:
        """Return the scores; with `normalise` they include the remainder of the read-out weights."""
        rows = self.accumulated_rows + self.tower_rows
        if normalise and self.has_pushed:
            rows = rows + self.identity_rows
        return rows


def compute_positive_relevance(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """Compute (∂y/∂A ⊙ P)⁺."""
    assert call.relevance is not None and call.attention_gradient is not None
    return (call.attention_gradient * call.relevance).clamp_(min=0)
