"""Raw attention: the attention weights of the read-out row, unchanged.

    r = w · E_h A_l          w: the read-out

The last layer by default; the mean over several layers. If streams attend to each other, the read-out rows of the maps
to each stream are used.

With `by_query` a unit's score is instead its mean attention to the units that are not special, which is almost the same
for all units: the authors' code for image models with mean pooling averages along the wrong axis.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.errors import InputError
from clearhead.methods.base import (
    AttributionMethod,
    CrossStreamMethod,
    MethodScores,
    UnitContext,
    compat_option,
    register_cross_stream_method,
    register_method,
)
from clearhead.methods.cost import Cost


@register_method(
    "attention",
    family="attention",
    requires=("attention",),
    cost=Cost(forward=1),
    citation="Bahdanau, Cho & Bengio (2015), Neural machine translation by jointly learning to align and translate",
    signed=False,
    target="none",
    measures="how much the read-out position attends to each unit, averaged over heads and layers",
    misleads="a unit can be attended to but not used, and the first token often receives most of the attention",
    layers=(-1, None),
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
    axioms=("rows sum to one",),
)
class RawAttention(AttributionMethod):
    """Attention of the read-out row.

    Attributes:
        by_query: Whether to average over keys instead (the authors' code for image models with mean pooling).
    """

    tile_passes: ClassVar[int] = 1
    by_query: bool = compat_option(False)

    @property
    def needs_full_maps(self) -> bool:
        """True with `by_query`, which needs whole rows of the map."""
        return self.by_query

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """w · A, the read-out row of each head."""
        return MapReduction("attention", self.unit_context.readout, has_negative_rows=False)

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        """Divide by the number of layers, so that the sum over layers is their mean."""
        return total / len(self.unit_context.layers)

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"] | None:
        """With `by_query` average each unit's attention over content keys, heads and layers."""
        if not self.by_query:
            return super().on_call(call)
        assert call.attention is not None
        return average_over_content_keys(call.attention, self.unit_context)[:, :, None] / (
            call.attention.shape[1] * len(self.unit_context.layers)
        )


@register_cross_stream_method("attention")
class CrossStreamRawAttention(CrossStreamMethod):
    """Variant for models whose streams attend to each other; same options as `RawAttention`.

    Attributes:
        by_query: As in `RawAttention`.
    """

    tile_passes: ClassVar[int] = 1
    by_query: bool = compat_option(False)

    def setup(self) -> None:
        if self.by_query:
            raise InputError("by_query=True needs a model with one stream, but here streams attend to each other")
        self.scores_by_stream = {
            stream: torch.zeros_like(unit_context.readout) for stream, unit_context in self.unit_contexts.items()
        }

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """w · A with the read-out of the query stream."""
        readout = self.unit_contexts[call.query_stream].readout
        return MapReduction("attention", readout, has_negative_rows=False)

    def on_call_total(self, call: AttentionCall, total: Tensor) -> None:
        """Add the row to the key stream, divided by the number of layers of this pair of streams."""
        key_stream = call.key_stream
        num_layers = len(self.layers[call.query_stream, key_stream])
        self.scores_by_stream[key_stream] = self.scores_by_stream[key_stream] + total.sum(1) / num_layers

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Return the accumulated row of each stream."""
        return {stream: MethodScores(rows) for stream, rows in self.scores_by_stream.items()}


def average_over_content_keys(
    query_key_maps: Float[Tensor, "batch head unit unit"], unit_context: UnitContext
) -> Float[Tensor, "batch head unit"]:
    """Return the mean of each row of a map over the keys that are not special tokens."""
    content = unit_context.content_mask.to(query_key_maps.dtype)
    return (query_key_maps @ content[:, None, :, None])[..., 0] / content.sum(-1)[:, None, None]
