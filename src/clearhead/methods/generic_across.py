"""Generic Attention where streams look at each other (co-attention, encoder–decoders): rules 5–11 of the paper.

    Ā = E_h[(∂y/∂A ⊙ A)⁺]                                                             (5)
    s looks at itself:     R_ss ← R_ss + Ā R_ss,     R_sq ← R_sq + Ā R_sq             (6, 7)
    s looks at q:          R_sq ← R_sq + R̄_ssᵀ Ā R̄_qq,    R_ss ← R_ss + Ā R_qs      (10, 11)
    R̄ = R̂ / (row sums of R̂) + I,     R̂ = R − I                                      (8, 9)

from R_ss = I, R_sq = 0. R̂ is gathered instead of R, so that nothing small is lost beside the identity, and a row of it
that is zero stays zero (the authors divide by zero there). Two streams that look at each other at once, as in a block
of LXMERT, are both read before either is changed. The scores are the read-out rows of R̂_ss and R_sq.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold, Scores, across, of_authors
from clearhead.methods.generic import Fusion, Guard, relevance_of
from clearhead.recording.tape import Call, Tape
from clearhead.rules.relevance import Relevance

Matrix = Float[Tensor, "batch row column"]


@dataclass(frozen=True)
class Map:
    """One call with its heads fused."""

    looks: str
    seen: str
    relevance: Matrix


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

    def visit(self, call: Call) -> None:
        self.maps.append(Map(call.query_stream, call.key_stream, relevance_of(call, self.fusion, self.lrp).mean(1)))

    def finish(self, tape: Tape) -> dict[str, Scores]:
        # R̂_ss; R_ss itself once it was replaced, which leaves no identity to set aside (to subtract it loses digits)
        self.within_streams = {stream: self._zeros(stream, stream) for stream in self.frames}
        self.replaced: set[str] = set()
        self.between: dict[tuple[str, str], Matrix] = {}  # R_sq
        waiting = self.maps[::-1]  # the first call first
        while waiting:
            first = waiting.pop(0)
            if first.looks == first.seen:
                self._look_within(first)
            elif waiting and (waiting[0].looks, waiting[0].seen) == (first.seen, first.looks):
                self._look_across([first, waiting.pop(0)])
            else:
                self._look_across([first])
        rows = {stream: frame.readout @ self.within_streams[stream] for stream, frame in self.frames.items()}
        for (looks, seen), relevance in self.between.items():
            rows[seen] = rows[seen] + self.frames[looks].readout @ relevance
        return {stream: Scores(row) for stream, row in rows.items()}

    def _look_within(self, one: Map) -> None:
        own, stream = self.within_streams[one.looks], one.looks
        added = one.relevance @ own if stream in self.replaced else one.relevance + one.relevance @ own  # ĀR
        if self.aggregate:
            self.within_streams[stream] = own + added
        else:
            self._replace(stream, added)
        for pair in [pair for pair in self.between if pair[0] == stream]:
            kept = self.between[pair] if self.aggregate else 0
            self.between[pair] = kept + one.relevance @ self.between[pair]

    def _replace(self, stream: str, relevance: Matrix) -> None:
        """Without aggregation R is replaced, not added to."""
        self.within_streams[stream] = relevance
        self.replaced.add(stream)

    def _look_across(self, maps: list[Map]) -> None:
        additions = []
        for one in maps:
            s, q = one.looks, one.seen
            across = one.relevance
            if self.within:
                across = self._normalised(s).mT @ one.relevance @ self._normalised(q)
                across = across.nan_to_num(0.0) if self.guard == "additions" else across
            back = one.relevance @ self._between(q, s)
            additions.append((s, q, across, back))
        for s, q, across, back in additions:
            if self.aggregate:
                self.between[s, q] = self._between(s, q) + across
                self.within_streams[s] = self.within_streams[s] + back
            else:
                self.between[s, q] = across
                if any((other.looks, other.seen) == (q, s) for other in self.maps):
                    self._replace(s, back)

    def _normalised(self, stream: str) -> Matrix:
        """R̄_ss; R_ss itself without normalisation."""
        relevance = self.within_streams[stream]
        if stream in self.replaced:
            if not self.normalise:
                return relevance
            relevance = relevance - self._identity(stream)
        if self.normalise:
            sums = relevance.sum(-1, keepdim=True)
            sums = sums.masked_fill(~self.frames[stream].valid[..., None], 1)  # padding is none of the sample's rows
            relevance = relevance / (torch.where(sums == 0, 1, sums) if self.guard == "rows" else sums)
        return relevance + self._identity(stream)

    def _between(self, looks: str, seen: str) -> Matrix:
        return self.between[looks, seen] if (looks, seen) in self.between else self._zeros(looks, seen)

    def _zeros(self, looks: str, seen: str) -> Matrix:
        one, other = self.frames[looks].readout, self.frames[seen].readout
        return one.new_zeros(len(one), one.shape[2], other.shape[2])

    def _identity(self, stream: str) -> Float[Tensor, "row row"]:
        readout = self.frames[stream].readout
        return torch.eye(readout.shape[2], dtype=readout.dtype, device=readout.device)
