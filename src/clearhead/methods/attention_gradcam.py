"""GradCAM on attention: heads weighted by their mean gradient, averaged, then clamped.

    w_h = mean of ∂y/∂A_h over the whole map,     r = w · (E_h[w_h A_h])⁺

The last layer by default; the mean over several layers. The clamp comes after the mean over heads (Generic Attention
and related methods clamp before it). If streams attend to each other, each map has its own weights.

With `region="row"` a head's weight is the mean gradient of the read-out row only, at units that are not special: r =
(E_h[w_h w·A_h])⁺ with w_h = mean of w·∂y/∂A_h, as in the authors' code for ViT and CLIP. With `scaled` each map is
rescaled to 0…1 before its read-out row is taken, as in the authors' code for BERT and VisualBERT: scores then depend on
rows other than the read-out, and are NaN if the clamp leaves a constant map. With `by_query` each row has one weight
for all heads, and a unit's score is the mean of its row: the wrong axis, as in the authors' code for mean-pooled
patches.
"""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Tape
from clearhead.errors import InputError
from clearhead.methods.attention import average_over_content_keys
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
    "attention-gradcam",
    family="attention",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Selvaraju et al. (2017), Grad-CAM, ICCV; on attention as in Chefer, Gur & Wolf (2021), CVPR",
    signed=False,
    target="any",
    measures="attention of the last layer, weighted by how much the target depends on each head",
    misleads="averaging the gradient over a head cancels entries of opposite sign, and only one layer is used",
    layers=(-1, None),
    supports=("layers", "heads", "rows"),
    layer_scores="contributions",
    sums_over_heads=False,  # the clamp comes after the mean over heads
)
class AttentionGradCAM(AttributionMethod):
    """Attention with heads weighted by their mean gradient.

    Attributes:
        region: Whether head weights are means over the full map ("map") or over the read-out row ("row").
        scaled: Whether each map is rescaled to 0…1 before the read-out row is taken.
        by_query: Whether to average over keys instead (the authors' code for image models with mean pooling).
    """

    region: Literal["map", "row"] = compat_option("map")
    scaled: bool = compat_option(False)
    by_query: bool = compat_option(False)

    tile_passes: ClassVar[int] = 2
    needs_masked_gradients: ClassVar[bool] = True

    @property
    def needs_full_maps(self) -> bool:
        """Whether an option of the authors' code is set; these need the map as a whole."""
        return self.by_query or self.scaled or self.region == "row"

    def on_tile(self, call: AttentionCall, queries: slice, previous_total: Tensor | None) -> Tensor:
        """Sum the gradients for w_h in the first tile pass, and the weighted read-out rows in the second."""
        if previous_total is None:
            return sum_gradients_per_head(call, self.unit_context)
        return self.unit_context.readout[:, :, queries] @ compute_weighted_attention(
            call, previous_total, self.unit_context, self.unit_context
        )

    def on_call_total(self, call: AttentionCall, total: Tensor) -> Float[Tensor, "batch 1 row unit"]:
        """Return w · (E_h[w_h A_h])⁺ as a single head, divided by the number of layers."""
        return total[:, None] / len(self.unit_context.layers)

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"] | None:
        """Compute the rows from the full map for the options of the authors' code, else by tiles."""
        if not self.needs_full_maps:
            return super().on_call(call)
        if self.by_query:
            assert call.attention is not None and call.attention_gradient is not None
            weight = average_over_content_keys(call.attention_gradient, self.unit_context).mean(1)
            rows = (weight * average_over_content_keys(call.attention, self.unit_context).mean(1)).clamp(min=0)[:, None]
        else:
            rows = compute_gradcam_rows(call, self.unit_context, self.unit_context, self.region, self.scaled)
        return rows[:, None] / len(self.unit_context.layers)


@register_cross_stream_method("attention-gradcam")
class CrossStreamAttentionGradCAM(CrossStreamMethod):
    """Variant for models whose streams attend to each other; same options as `AttentionGradCAM`.

    Attributes:
        region: As in `AttentionGradCAM`.
        scaled: As in `AttentionGradCAM`.
        by_query: As in `AttentionGradCAM`.
    """

    tile_passes: ClassVar[int] = 2
    needs_masked_gradients: ClassVar[bool] = True
    region: Literal["map", "row"] = compat_option("map")
    scaled: bool = compat_option(False)
    by_query: bool = compat_option(False)

    def setup(self) -> None:
        if self.by_query:
            raise InputError("by_query=True needs a model with one stream, but here streams attend to each other")
        self.scores_by_stream = {
            stream: torch.zeros_like(unit_context.readout) for stream, unit_context in self.unit_contexts.items()
        }

    @property
    def needs_full_maps(self) -> bool:
        """Whether an option of the authors' code is set; these need the map as a whole."""
        return self.scaled or self.region == "row"

    def on_tile(self, call: AttentionCall, queries: slice, previous_total: Tensor | None) -> Tensor:
        """Sum the gradients for w_h in the first tile pass, and the weighted read-out rows in the second."""
        query_context = self.unit_contexts[call.query_stream]
        key_context = self.unit_contexts[call.key_stream]
        if previous_total is None:
            return sum_gradients_per_head(call, key_context)
        return query_context.readout[:, :, queries] @ compute_weighted_attention(
            call, previous_total, query_context, key_context
        )

    def on_call_total(self, call: AttentionCall, total: Tensor) -> None:
        """Add the rows to the key stream, divided by the number of layers of this pair."""
        key_stream = call.key_stream
        num_layers = len(self.layers[call.query_stream, key_stream])
        self.scores_by_stream[key_stream] = self.scores_by_stream[key_stream] + total / num_layers

    def on_call(self, call: AttentionCall) -> None:
        """Compute the rows from the full map for the options of the authors' code, else by tiles."""
        if not self.needs_full_maps:
            super().on_call(call)
            return
        query_context = self.unit_contexts[call.query_stream]
        key_context = self.unit_contexts[call.key_stream]
        self.on_call_total(call, compute_gradcam_rows(call, query_context, key_context, self.region, self.scaled))

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Return the accumulated rows of each stream."""
        return {stream: MethodScores(rows) for stream, rows in self.scores_by_stream.items()}


def compute_gradcam_rows(
    call: AttentionCall,
    query_context: UnitContext,
    key_context: UnitContext,
    region: Literal["map", "row"],
    rescale: bool,
) -> Float[Tensor, "batch row key"]:
    """Return the read-out rows of the weighted map, with the weights of the whole map or of the read-out rows."""
    if region == "map":
        return query_context.readout @ compute_gradcam_map(call, query_context, key_context, rescale)
    assert call.attention is not None and call.attention_gradient is not None
    readout = query_context.readout[:, None]
    content = key_context.content_mask.to(call.attention.dtype)
    weight = (readout @ call.attention_gradient) @ content[:, None, :, None] / content.sum(-1)[:, None, None, None]
    return (weight * (readout @ call.attention)).mean(1).clamp_(min=0)


def compute_gradcam_map(
    call: AttentionCall, query_context: UnitContext, key_context: UnitContext, rescale: bool = False
) -> Float[Tensor, "batch query key"]:
    """Compute (E_h[w_h A_h])⁺, with w_h the mean gradient over the cells that are not padding."""
    cam = compute_weighted_attention(call, sum_gradients_per_head(call, key_context), query_context, key_context)
    if not rescale:
        return cam
    padding = ~(query_context.valid_mask[:, :, None] & key_context.valid_mask[:, None])
    low = cam.masked_fill(padding, torch.inf).flatten(1).amin(1)[:, None, None]
    high = cam.masked_fill(padding, -torch.inf).flatten(1).amax(1)[:, None, None]
    return ((cam - low) / (high - low)).masked_fill(padding, 0)


def sum_gradients_per_head(call: AttentionCall, key_context: UnitContext) -> Float[Tensor, "batch head"]:
    """Return the gradient of each head, summed over the cells that are not padding."""
    assert call.attention_gradient is not None
    # Padded rows have no gradient, but padded columns do: the gradient of masked attention is not zero.
    valid = key_context.valid_mask.to(call.attention_gradient.dtype)
    return (call.attention_gradient @ valid[:, None, :, None]).sum((2, 3))


def compute_weighted_attention(
    call: AttentionCall,
    gradient_sums: Float[Tensor, "batch head"],
    query_context: UnitContext,
    key_context: UnitContext,
) -> Float[Tensor, "batch query key"]:
    """Compute (E_h[w_h A_h])⁺ from the gradient sums of each head."""
    assert call.attention is not None
    cells = query_context.valid_mask.sum(-1) * key_context.valid_mask.sum(-1)
    weight = gradient_sums / cells[:, None]
    return (weight[:, :, None, None] * call.attention).mean(1).clamp_(min=0)
