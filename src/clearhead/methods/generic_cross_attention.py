"""Generic Attention for streams that attend to each other (co-attention, encoder–decoders): rules 5–11 of the paper.

    Ā = E_h[(∂y/∂A ⊙ A)⁺]                                                             (5)
    s attends to itself:   R_ss ← R_ss + Ā R_ss,     R_sq ← R_sq + Ā R_sq             (6, 7)
    s attends to q:        R_sq ← R_sq + R̄_ssᵀ Ā R̄_qq,    R_ss ← R_ss + Ā R_qs      (10, 11)
    R̄ = R̂ / (row sums of R̂) + I,     R̂ = R − I                                      (8, 9)

from R_ss = I, R_sq = 0. R̂ is accumulated instead of R, so that small values are not lost in rounding next to the
identity, and a zero row of it stays zero. With another `guard` R is accumulated, the identity is subtracted before rows
are divided, and a zero row is divided by zero, as in the authors' code. If two streams attend to each other
simultaneously, as in a block of LXMERT, both are read before either is updated. The scores are the read-out rows of
R̂_ss and R_sq.

A residual tower t runs in parallel to a stream s and is added to it after each of its layers (BridgeTower). Its layers
count as layers of the stream that attend to the tower:

    R_tt ← R_tt + Ā R_tt,     R_ss ← R_ss + Ā R_tt

because the state of the stream is the sum of both: the tower before the layer, and the output of the layer. So each Ā
counts once: its gradient already measures how much of it reaches y over all bridges. (The mean of both R would halve,
at every bridge, the relevance measured below it; their sum would count the lower layers of the tower, and the identity,
again at every bridge.) Without `aggregate` such a layer replaces R_ss, like every other layer. Adding a state to itself
does not change R, since the layer norm that follows removes the factor.

If every stream that is attended to attends to itself only, as in encoder–decoders, the read-out rows are computed
without R (`_generic_encoder_decoder.py`), with default options.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import LRPRules
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods._generic_encoder_decoder import RelevanceRows, compute_rows_by_stream
from clearhead.methods._stream_maps import (
    StreamMap,
    StreamMatrix,
    build_deferred_map,
    build_stream_map,
    is_unidirectional,
    iter_simultaneous_maps,
)
from clearhead.methods.base import CrossStreamMethod, MethodScores, compat_option, register_cross_stream_method
from clearhead.methods.generic import HeadFusion, ZeroRowGuard, compute_head_relevance

StreamPair = tuple[str, str]


@dataclass(frozen=True)
class SelfRelevance:
    """The relevance R̂_ss of a stream to itself, or R_ss, which includes the identity.

    R_ss is stored after a replacement, which leaves no separate identity, and to reproduce the authors' code.

    Attributes:
        relevance: The matrix.
        includes_identity: Whether the matrix is R_ss.
    """

    relevance: StreamMatrix
    includes_identity: bool = False


@register_cross_stream_method("generic")
class CrossStreamGenericAttention(CrossStreamMethod):
    """Generic Attention for models whose streams attend to each other.

    Attributes:
        aggregate: Whether R is added to over the layers; else it is replaced.
        normalise: Whether rows of R̂ are divided by their sums (rules 8 and 9).
        within: Whether cross-attention is multiplied by the relevance within both streams (rule 10).
        guard: Handling of zero rows when rows are divided by their sums.
        fusion: How heads are combined.
        lrp: Whether LRP relevance replaces attention in the product with the gradient.
        needs_standard_gradient: The ordinary gradient is recorded next to the relevance.
    """

    aggregate: bool = True
    normalise: bool = True
    within: bool = True
    guard: ZeroRowGuard = "rows"
    fusion: HeadFusion = compat_option("clamp-mean")
    lrp: bool = compat_option(False)

    needs_standard_gradient: ClassVar[bool] = True

    @property
    def rule_set(self) -> LRPRules:
        """The propagation rules of the option `lrp`; the authors' code for DETR has different ones."""
        if "queries" in self.unit_contexts:
            return LRPRules(positions_take_relevance=False, conserves_linear=True)
        return LRPRules()

    def setup(self) -> None:
        self.stream_maps: list[StreamMap] = []

    @property
    def uses_row_form(self) -> bool:
        """Whether the scores can be computed from rows, without relevance matrices."""
        as_published = self.aggregate and self.normalise and self.within and self.guard == "rows"
        return as_published and is_unidirectional(self)

    @property
    def defers_reductions(self) -> bool:
        """Whether products of rows with the maps suffice, with the default options."""
        return self.uses_row_form and self.fusion == "clamp-mean" and not self.lrp

    def on_call(self, call: AttentionCall) -> None:
        """Keep Ā of the call, as a matrix or as a deferred map."""
        if call.deferred is not None:
            self.stream_maps.append(build_deferred_map(self, call, "positive"))
        else:
            head_mean = compute_head_relevance(call, self.fusion, self.lrp).mean(1)
            self.stream_maps.append(build_stream_map(self, call, head_mean))

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Apply the rules to the maps of all calls, by rows or by matrices."""
        rows = self._compute_by_rows() if self.uses_row_form else self._compute_by_matrices()
        self.stream_maps = []  # free the maps, which are as large as the inputs, before the next method runs
        return {stream: MethodScores(stream_rows) for stream, stream_rows in rows.items()}

    def _compute_by_rows(self) -> dict[str, RelevanceRows]:
        """Push the read-out rows through the maps, without relevance matrices."""
        readout_streams = [*filter(self.has_readout, self.unit_contexts)]
        return compute_rows_by_stream(self.stream_maps[::-1], self.unit_contexts, readout_streams)

    def _compute_by_matrices(self) -> dict[str, RelevanceRows]:
        """Update R̂_ss and R_sq call by call, the first call first, and read out both."""
        self.self_relevance = {stream: self._build_initial_relevance(stream) for stream in self.unit_contexts}
        self.tower_relevance = dict(self.self_relevance)
        self.cross_relevance: dict[StreamPair, StreamMatrix] = {}  # R_sq
        for step in iter_simultaneous_maps(self.stream_maps):
            previous_self = dict(self.self_relevance)
            previous_cross = dict(self.cross_relevance)
            for stream_map in step:
                if stream_map.query_stream == stream_map.key_stream:
                    self._apply_self_attention(stream_map)
                else:
                    self._apply_cross_attention(stream_map, previous_self, previous_cross)
        rows = {stream: torch.zeros_like(unit_context.readout) for stream, unit_context in self.unit_contexts.items()}
        # only streams with a read-out: others may hold NaN, which the authors' code does not read either
        for stream in filter(self.has_readout, self.unit_contexts):
            readout = self.unit_contexts[stream].readout
            rows[stream] = rows[stream] + readout @ self._remove_identity(stream)
            for (query_stream, key_stream), relevance in self.cross_relevance.items():
                if query_stream == stream:
                    rows[key_stream] = rows[key_stream] + readout @ relevance
        return rows

    def _build_initial_relevance(self, stream: str) -> SelfRelevance:
        """R̂_ss = 0; R_ss = I for the guards of the authors' code, which subtract it later."""
        if self.guard == "rows" or not self.aggregate:
            return SelfRelevance(self._build_zeros(stream, stream))
        identity = self._build_identity(stream)
        batch_size = len(self.unit_contexts[stream].readout)
        return SelfRelevance(identity.expand(batch_size, *identity.shape), includes_identity=True)

    def _remove_identity(self, stream: str) -> StreamMatrix:
        """Return R̂_ss; after a replacement R_ss has no identity to remove."""
        state = self.self_relevance[stream]
        if state.includes_identity and self.aggregate:
            return state.relevance - self._build_identity(stream)
        return state.relevance

    def _apply_self_attention(self, stream_map: StreamMap) -> None:
        """Rules 6 and 7; the layer of a tower updates the tower and its stream."""
        stream = stream_map.query_stream
        states = [self.self_relevance]
        if stream_map.in_tower:
            states.append(self.tower_relevance)
        attended = states[-1][stream]
        added = stream_map.head_mean @ attended.relevance  # ĀR
        if not attended.includes_identity:
            added = stream_map.head_mean + added
        for state in states:
            state[stream] = self._accumulate(state[stream], added)
        if stream_map.in_tower:
            return  # a tower does not depend on other streams
        for pair in [pair for pair in self.cross_relevance if pair[0] == stream]:
            previous = self.cross_relevance[pair] if self.aggregate else 0
            self.cross_relevance[pair] = previous + stream_map.head_mean @ self.cross_relevance[pair]

    def _accumulate(self, state: SelfRelevance, added: StreamMatrix) -> SelfRelevance:
        """Add to R; without aggregation, replace it."""
        if not self.aggregate:
            return SelfRelevance(added, includes_identity=True)
        return SelfRelevance(state.relevance + added, state.includes_identity)

    def _apply_cross_attention(
        self,
        stream_map: StreamMap,
        previous_self: dict[str, SelfRelevance],
        previous_cross: dict[StreamPair, StreamMatrix],
    ) -> None:
        """Rules 10 and 11; the relevance of the key stream is that before the simultaneous calls of the step."""
        s = stream_map.query_stream
        q = stream_map.key_stream
        added = stream_map.head_mean
        if self.within:
            query_relevance = self._normalise_rows(s, self.self_relevance[s])
            added = query_relevance.mT @ stream_map.head_mean @ self._normalise_rows(q, previous_self[q])
            if self.guard == "additions":
                added = added.masked_fill(added.isnan(), 0)
        added_to_self = stream_map.head_mean @ previous_cross.get((q, s), self._build_zeros(q, s))
        previous = self.cross_relevance.get((s, q), 0) if self.aggregate else 0
        self.cross_relevance[s, q] = previous + added
        is_mutual = any((item.query_stream, item.key_stream) == (q, s) for item in self.stream_maps)
        if self.aggregate or is_mutual:
            self.self_relevance[s] = self._accumulate(self.self_relevance[s], added_to_self)

    def _normalise_rows(self, stream: str, state: SelfRelevance) -> StreamMatrix:
        """Compute R̄_ss (rules 8 and 9); without normalisation return R_ss."""
        relevance = state.relevance
        if state.includes_identity:
            if not self.normalise:
                return relevance
            relevance = relevance - self._build_identity(stream)
        if self.normalise:
            padding = ~self.unit_contexts[stream].valid_mask[..., None]
            sums = relevance.sum(-1, keepdim=True).masked_fill(padding, 1)
            if self.guard == "rows":
                sums = torch.where(sums == 0, 1, sums)
            relevance = relevance / sums
        return relevance + self._build_identity(stream)

    def _build_zeros(self, query_stream: str, key_stream: str) -> StreamMatrix:
        """R_sq = 0 between the units of two streams."""
        query_readout = self.unit_contexts[query_stream].readout
        key_readout = self.unit_contexts[key_stream].readout
        return query_readout.new_zeros(len(query_readout), query_readout.shape[2], key_readout.shape[2])

    def _build_identity(self, stream: str) -> Float[Tensor, "row row"]:
        """I over the units of a stream, without batch axis."""
        readout = self.unit_contexts[stream].readout
        return torch.eye(readout.shape[2], dtype=readout.dtype, device=readout.device)
