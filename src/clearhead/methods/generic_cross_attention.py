"""Generic Attention where streams look at each other (co-attention, encoder–decoders): rules 5–11 of the paper.

    Ā = E_h[(∂y/∂A ⊙ A)⁺]                                                             (5)
    s looks at itself:     R_ss ← R_ss + Ā R_ss,     R_sq ← R_sq + Ā R_sq             (6, 7)
    s looks at q:          R_sq ← R_sq + R̄_ssᵀ Ā R̄_qq,    R_ss ← R_ss + Ā R_qs      (10, 11)
    R̄ = R̂ / (row sums of R̂) + I,     R̂ = R − I                                      (8, 9)

from R_ss = I, R_sq = 0. R̂ is gathered instead of R, so that nothing small is lost beside the identity, and a row of it
that is zero stays zero; with another `guard` R is gathered, the identity is subtracted where rows are divided, and a
row that is zero is divided by zero, as in the authors' code. Two streams that look at each other at once, as in a block
of LXMERT, are both read before either is changed. The scores are the read-out rows of R̂_ss and R_sq.

Where a tower t goes on beside a stream s and is added to it again after each of its layers (BridgeTower), these are
layers of the stream, too, which look at the tower:

    R_tt ← R_tt + Ā R_tt,     R_ss ← R_ss + Ā R_tt

since the sum of both states is the stream's, which holds the tower as it was before, and what the layer added. So each
Ā counts once: its gradient has measured how much of it reaches y over all bridges together. (The mean of both R would
halve at every bridge what was measured below; their sum would count the tower's lower layers, and the identity, anew at
every bridge.) Without `aggregate` such a layer replaces R_ss, as every other does. A state that is joined with itself
stays what it is, as it does under the layer norm that follows.

Where a stream that is looked at looks at itself alone, as in encoder–decoders, the rows that are read are made without
any R (`_generic_encoder_decoder.py`), as long as no option says otherwise.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.lrp import Relevance
from clearhead.capture.tape import Call, Tape
from clearhead.methods._generic_encoder_decoder import Rows, rows_by_stream
from clearhead.methods._stream_maps import Map, Matrix, aside_of, map_of, one_way, steps
from clearhead.methods.base import AcrossFold, Scores, across, of_authors
from clearhead.methods.generic import Fusion, Guard, relevance_of

Pair = tuple[str, str]


@dataclass(frozen=True)
class Own:
    """R̂_ss; or R_ss itself: once it was replaced, which leaves no identity to set aside, and as authors gather it."""

    relevance: Matrix
    whole: bool = False


@across("generic")
class GenericAcross(AcrossFold):
    aggregate: bool = True
    normalise: bool = True
    within: bool = True
    guard: Guard = "rows"
    fusion: Fusion = of_authors("clamp-mean")
    lrp: bool = of_authors(False)

    beside: ClassVar[bool] = True

    @property
    def family(self) -> Relevance:
        """Rules of relevance; those of the authors' DETR differ."""
        return Relevance(positions=False, kept=True) if "queries" in self.frames else Relevance()

    def begin(self) -> None:
        self.maps: list[Map] = []

    @property
    def by_rows(self) -> bool:
        """Whether no R is needed."""
        as_published = self.aggregate and self.normalise and self.within and self.guard == "rows"
        return as_published and one_way(self)

    @property
    def sets_aside(self) -> bool:
        return self.by_rows and self.fusion == "clamp-mean" and not self.lrp

    def visit(self, call: Call) -> None:
        if call.aside is not None:
            self.maps.append(aside_of(self, call, "positive"))
        else:
            self.maps.append(map_of(self, call, relevance_of(call, self.fusion, self.lrp).mean(1)))

    def finish(self, tape: Tape) -> dict[str, Scores]:
        rows = self._by_rows() if self.by_rows else self._by_matrices()
        self.maps = []  # as large as the inputs, and there are others to come
        return {stream: Scores(row) for stream, row in rows.items()}

    def _by_rows(self) -> dict[str, Rows]:
        return rows_by_stream(self.maps[::-1], self.frames, [*filter(self.speaks, self.frames)])

    def _by_matrices(self) -> dict[str, Rows]:
        self.own = {stream: self._first(stream) for stream in self.frames}
        self.of_towers = dict(self.own)
        self.between: dict[Pair, Matrix] = {}  # R_sq
        for step in steps(self.maps):
            own, between = dict(self.own), dict(self.between)
            for one in step:
                if one.looks == one.seen:
                    self._look_within(one)
                else:
                    self._look_across(one, own, between)
        rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}
        for stream in filter(self.speaks, self.frames):  # what is NaN elsewhere, the authors do not read either
            rows[stream] = rows[stream] + self.frames[stream].readout @ self._without_identity(stream)
            for (looks, seen), relevance in self.between.items():
                if looks == stream:
                    rows[seen] = rows[seen] + self.frames[looks].readout @ relevance
        return rows

    def _first(self, stream: str) -> Own:
        if self.guard == "rows" or not self.aggregate:
            return Own(self._zeros(stream, stream))
        identity = self._identity(stream)
        return Own(identity.expand(len(self.frames[stream].readout), *identity.shape), whole=True)

    def _without_identity(self, stream: str) -> Matrix:
        own = self.own[stream]
        return own.relevance - self._identity(stream) if own.whole and self.aggregate else own.relevance

    def _look_within(self, one: Map) -> None:
        stream, states = one.looks, [self.own, self.of_towers] if one.tower else [self.own]
        seen = states[-1][stream]
        added = one.joined @ seen.relevance  # ĀR
        added = added if seen.whole else one.joined + added
        for state in states:
            state[stream] = self._gathered(state[stream], added)
        if one.tower:
            return  # it has seen no other stream
        for pair in [pair for pair in self.between if pair[0] == stream]:
            kept = self.between[pair] if self.aggregate else 0
            self.between[pair] = kept + one.joined @ self.between[pair]

    def _gathered(self, own: Own, added: Matrix) -> Own:
        """Without aggregation R is replaced, not added to."""
        return Own(own.relevance + added, own.whole) if self.aggregate else Own(added, whole=True)

    def _look_across(self, one: Map, own: dict[str, Own], between: dict[Pair, Matrix]) -> None:
        """`own` and `between` are what is seen of the other stream."""
        s, q = one.looks, one.seen
        across = one.joined
        if self.within:
            across = self._normalised(s, self.own[s]).mT @ one.joined @ self._normalised(q, own[q])
            across = across.masked_fill(across.isnan(), 0) if self.guard == "additions" else across
        back = one.joined @ between.get((q, s), self._zeros(q, s))
        kept = self.between.get((s, q), 0) if self.aggregate else 0
        self.between[s, q] = kept + across
        if self.aggregate or any((other.looks, other.seen) == (q, s) for other in self.maps):
            self.own[s] = self._gathered(self.own[s], back)

    def _normalised(self, stream: str, own: Own) -> Matrix:
        """R̄_ss; R_ss itself without normalisation."""
        relevance = own.relevance
        if own.whole:
            if not self.normalise:
                return relevance
            relevance = relevance - self._identity(stream)
        if self.normalise:
            sums = relevance.sum(-1, keepdim=True)
            sums = sums.masked_fill(~self.frames[stream].valid[..., None], 1)  # padding is none of the sample's rows
            relevance = relevance / (torch.where(sums == 0, 1, sums) if self.guard == "rows" else sums)
        return relevance + self._identity(stream)

    def _zeros(self, looks: str, seen: str) -> Matrix:
        one, other = self.frames[looks].readout, self.frames[seen].readout
        return one.new_zeros(len(one), one.shape[2], other.shape[2])

    def _identity(self, stream: str) -> Float[Tensor, "row row"]:
        readout = self.frames[stream].readout
        return torch.eye(readout.shape[2], dtype=readout.dtype, device=readout.device)
