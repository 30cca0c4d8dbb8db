"""Attention rollout: attention multiplied over the layers, averaged with the identity for the residual connection.

    Â_l = (E_h A_l + I) / 2,     r = w · Â_{L-1} ⋯ Â_s

with rows divided by their sums (2, or less if part of the attention goes to a sink). A row is pushed from the last
layer to the first; no matrices are multiplied. `per_layer[l]` is the read-out after layer l (R^l[p, :] of the paper's
figures).

If a stream s attends to another stream q, the last map between them connects the two rollouts (Chefer et al., 2021):

    R_sq = R_ssᵀ · E_h A_sq · R_qq

A residual tower t runs in parallel to a stream s and is added to it after each of its layers (BridgeTower). Its layers
count as layers of the stream that attend to the tower (reason: `generic_cross_attention.py`), and rows still sum to
one:

    R_tt ← (E_h A + I) / 2 · R_tt,     R_ss ← (E_h A · R_tt + R_ss) / 2

Without `half` rows are not halved, as in the authors' code for VisualBERT: the scores are larger by a factor of 2 per
layer.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods._stream_maps import (
    StreamMap,
    StreamMatrix,
    build_deferred_map,
    build_stream_map,
    is_unidirectional,
    iter_simultaneous_maps,
)
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
    "rollout",
    family="attention",
    requires=("attention",),
    cost=Cost(forward=1),
    citation="Abnar & Zuidema (2020), Quantifying attention flow in transformers, ACL",
    signed=False,
    target="none",
    measures="how attention mixes the units, multiplied across layers",
    misleads="it does not depend on the target, and it ignores values and gradients",
    supports=("layers", "heads", "rows"),
    layer_scores="depths",
    axioms=("rows sum to one",),
)
class AttentionRollout(AttributionMethod):
    """Product of the attention maps of all layers, for the read-out row.

    Attributes:
        half: Whether attention and identity are averaged, not summed.
    """

    tile_passes: ClassVar[int] = 1
    half: bool = compat_option(True)

    def setup(self) -> None:
        self.has_single_row = self.unit_context.readout.shape[1] == 1
        self.rollout_rows = self.unit_context.readout
        if self.has_single_row:  # one row per depth: the row of the read-out after layer l starts at layer l
            depths = len(self.unit_context.layers)
            self.rollout_rows = torch.zeros_like(self.unit_context.readout).repeat(1, depths, 1)

    def insert_readout_row(self, call: AttentionCall) -> Float[Tensor, "batch row unit"]:
        """Return the rows that enter a call, after starting the one whose read-out depth is this layer."""
        if self.has_single_row:
            self.rollout_rows[:, call.layer - self.unit_context.layers.start] = self.unit_context.readout[:, 0]
        return self.rollout_rows

    def on_tile(
        self, call: AttentionCall, queries: slice, previous_total: Tensor | None
    ) -> Float[Tensor, "batch row unit"]:
        """r Â of the tile's queries: r / s + (r / s) E_h A; s: row sums of E_h A + I, or 1 without `half`."""
        rows = self.insert_readout_row(call)[:, :, queries]
        if self.half:
            rows = rows / _sum_rows_with_identity(call.mean_attention).mT
        residual = pad(rows, (queries.start, self.rollout_rows.shape[2] - queries.stop))
        return residual + rows @ call.mean_attention

    def request_reduction(self, call: AttentionCall) -> MapReduction:
        """(r / 2) E_h A, as rows of A sum to one here; r E_h A without `half`."""
        rows = self.insert_readout_row(call)
        return MapReduction("attention", rows / 2 if self.half else rows, has_negative_rows=False)

    def receive_reduction(self, call: AttentionCall, total: Tensor) -> None:
        """Add the identity's part of r Â to the reduction, which leaves it out."""
        residual = self.rollout_rows / 2 if self.half else self.rollout_rows
        self.tile_sums = [residual + total.sum(1)]

    def on_call_total(self, call: AttentionCall, total: Tensor) -> None:
        """Push the rows through a layer: r ← r Â."""
        self.rollout_rows = total

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Return the rows; of a single read-out row those of all depths, the last as scores."""
        if self.has_single_row:
            return MethodScores(self.rollout_rows[:, -1:], per_layer=self.rollout_rows)
        return MethodScores(self.rollout_rows)


@register_cross_stream_method("rollout")
class CrossStreamAttentionRollout(CrossStreamMethod):
    """Variant for models whose streams attend to each other; same options as `AttentionRollout`.

    Attributes:
        half: As in `AttentionRollout`.
    """

    half: bool = compat_option(True)

    def setup(self) -> None:
        self.stream_maps: list[StreamMap] = []

    @property
    def defers_reductions(self) -> bool:
        """Whether products of rows and columns with the maps suffice."""
        return is_unidirectional(self)

    def on_call(self, call: AttentionCall) -> None:
        """Keep E_h A of the call, with the rows of padded queries set to zero."""
        if call.deferred is not None:
            self.stream_maps.append(build_deferred_map(self, call, "attention", self._build_query_mask(call)))
        else:
            self.stream_maps.append(build_stream_map(self, call, call.mean_attention * self._build_query_mask(call).mT))

    def _build_query_mask(self, call: AttentionCall) -> Float[Tensor, "batch 1 query"]:
        """Return zero for padded queries and those after the explained token, since R_ssᵀ reads columns of the map."""
        unit_context = self.unit_contexts[call.query_stream]
        return unit_context.valid_mask[:, None].to(unit_context.readout)

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Multiply the maps of all calls, by rows and columns or by matrices."""
        rows = self._compute_by_rows(self.stream_maps[::-1]) if is_unidirectional(self) else self._compute_by_matrices()
        self.stream_maps = []  # free the maps, which are as large as the inputs, before the next method runs
        return {stream: MethodScores(stream_rows) for stream, stream_rows in rows.items()}

    def _compute_by_rows(self, maps: Sequence[StreamMap]) -> dict[str, StreamMatrix]:
        """Roll out encoder–decoders by vector–matrix products from the read-out rows, without a full matrix R.

        Rows are multiplied with R_qq from its last layer to its first, columns with R_ssᵀ from the first to the last.
        """
        rows = {stream: unit_context.readout for stream, unit_context in self.unit_contexts.items()}
        rows |= {stream: self._push_rows(maps, stream, rows[stream]) for stream in rows if self.has_readout(stream)}
        last_call_index = {
            (stream_map.query_stream, stream_map.key_stream): call_index
            for call_index, stream_map in enumerate(maps)
            if stream_map.query_stream != stream_map.key_stream
        }
        for (query_stream, key_stream), call_index in last_call_index.items():
            readout = self.unit_contexts[query_stream].readout
            cross_rows = maps[call_index].push(
                self._pull_columns_within_stream(maps[:call_index], query_stream, readout)
            )
            rows[key_stream] = rows[key_stream] + self._push_rows(maps[:call_index], key_stream, cross_rows)
        return rows

    def _push_rows(self, maps: Sequence[StreamMap], stream: str, rows: StreamMatrix) -> StreamMatrix:
        """Multiply rows with the rollout of one stream's self-attention, from the last layer to the first."""
        for stream_map in reversed(maps):
            if stream_map.query_stream == stream_map.key_stream == stream:
                rows = self._divide_by_row_sums(rows, stream_map)
                rows = rows + stream_map.push(rows)
        return rows

    def _pull_columns_within_stream(
        self, maps: Sequence[StreamMap], stream: str, columns: StreamMatrix
    ) -> StreamMatrix:
        """Multiply the rollout of one stream's self-attention with columns, from the first layer to the last."""
        for stream_map in maps:
            if stream_map.query_stream == stream_map.key_stream == stream:
                columns = self._divide_by_row_sums(columns + stream_map.pull(columns), stream_map)
        return columns

    def _compute_by_matrices(self) -> dict[str, StreamMatrix]:
        """Compute the scores of any layout of streams from the matrices R."""
        rollouts = {stream: _build_identity(unit_context) for stream, unit_context in self.unit_contexts.items()}
        towers = dict(rollouts)
        cross_rollouts: dict[tuple[str, str], Tensor] = {}
        for step in iter_simultaneous_maps(self.stream_maps):
            previous = dict(rollouts)
            for stream_map in step:
                query_stream = stream_map.query_stream
                key_stream = stream_map.key_stream
                if query_stream != key_stream:
                    cross_rollouts[query_stream, key_stream] = (
                        rollouts[query_stream].mT @ stream_map.head_mean @ previous[key_stream]
                    )
                    continue
                attended = towers if stream_map.in_tower else rollouts
                added = stream_map.head_mean @ attended[key_stream]
                rollouts[query_stream] = self._average(rollouts[query_stream], added, stream_map)
                if stream_map.in_tower:
                    towers[query_stream] = self._average(towers[query_stream], added, stream_map)
        rows = {stream: unit_context.readout @ rollouts[stream] for stream, unit_context in self.unit_contexts.items()}
        for (query_stream, key_stream), rollout in cross_rollouts.items():
            rows[key_stream] = rows[key_stream] + self.unit_contexts[query_stream].readout @ rollout
        return rows

    def _average(self, rollout: StreamMatrix, added: StreamMatrix, stream_map: StreamMap) -> StreamMatrix:
        """Return the mean of a rollout and its product with the attention of a layer (the sum without `half`)."""
        return self._divide_by_row_sums((rollout + added).mT, stream_map).mT

    def _divide_by_row_sums(self, values: StreamMatrix, stream_map: StreamMap) -> StreamMatrix:
        """Divide rows or columns over the queries by the row sums of E_h A + I."""
        if not self.half:
            return values
        return values / (1 + stream_map.compute_row_sums())


def _sum_rows_with_identity(attention: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch query 1"]:
    """Return the row sums of E_h A + I: two, or less if part of the attention goes to a sink that is not a unit."""
    return 1 + attention.sum(-1, keepdim=True)


def _build_identity(unit_context: UnitContext) -> Float[Tensor, "batch unit unit"]:
    """I over the units of a stream, for each sample."""
    batch, _, width = unit_context.readout.shape
    identity = torch.eye(width, dtype=unit_context.readout.dtype, device=unit_context.readout.device)
    return identity.expand(batch, width, width)
