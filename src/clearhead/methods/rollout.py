"""Attention rollout: attention multiplied through the layers, half of each layer being the residual stream.

    Â_l = (E_h A_l + I) / 2,     r = w · Â_{L-1} ⋯ Â_s

with rows divided by their sums (2, or less where part of the attention goes to a sink), pushed as a row from the last
layer to the first; no matrices are multiplied. `per_layer[l]` is the same read-out taken
after layer l (R^l[p, :] of the paper's figures).

Where a stream s looks at another, q, the two rollouts meet in the last map between them (Chefer et al., 2021):

    R_sq = R_ssᵀ · E_h A_sq · R_qq

Where a tower t goes on beside a stream s and is added to it again after each of its layers (BridgeTower), these are
layers of the stream, too, which look at the tower (why: `generic_cross_attention.py`), and rows still sum to one:

    R_tt ← (E_h A + I) / 2 · R_tt,     R_ss ← (E_h A · R_tt + R_ss) / 2

Without `half` nothing is halved, as in the authors' VisualBERT: the scores are larger by a factor of 2 a layer.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call, Tape
from clearhead.methods._stream_maps import Map, Matrix, aside_of, map_of, one_way, steps
from clearhead.methods.base import AcrossFold, Fold, Frame, Scores, across, of_authors, register


@register(
    "rollout",
    family="attention",
    asks=("attention",),
    cost="one forward",
    citation="Abnar & Zuidema (2020), Quantifying attention flow in transformers, ACL",
    signed=False,
    target="none",
    has=("layers", "heads", "rows"),
    parts="depths",
    axioms=("rows sum to one",),
)
class Rollout(Fold):
    sweeps: ClassVar[int] = 1
    half: bool = of_authors(True)

    def begin(self) -> None:
        self.one_row = self.frame.readout.shape[1] == 1
        # One row per depth: the row that is read after layer l starts when the fold comes to layer l.
        depths = len(self.frame.layers)
        self.rows = torch.zeros_like(self.frame.readout).repeat(1, depths, 1) if self.one_row else self.frame.readout

    def started(self, call: Call) -> Float[Tensor, "batch row unit"]:
        """The rows that come to a call, among them the one that starts there."""
        if self.one_row:
            self.rows[:, call.layer - self.frame.layers.start] = self.frame.readout[:, 0]
        return self.rows

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Float[Tensor, "batch row unit"]:
        rows = self.started(call)[:, :, queries]
        rows = rows / _sums(call.mean_attention).mT if self.half else rows
        kept = pad(rows, (queries.start, self.rows.shape[2] - queries.stop))
        return kept + rows @ call.mean_attention

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("attention", self.started(call) / 2 if self.half else self.started(call))

    def fold_sum(self, call: Call, total: Tensor) -> None:
        kept = self.rows / 2 if self.half else self.rows
        self.tile_sums = [kept + total.sum(1)]

    def joined(self, call: Call, total: Tensor) -> None:
        self.rows = total

    def finish(self, tape: Tape) -> Scores:
        if self.one_row:
            return Scores(self.rows[:, -1:], per_layer=self.rows)
        return Scores(self.rows)


@across("rollout")
class RolloutAcross(AcrossFold):
    half: bool = of_authors(True)

    def begin(self) -> None:
        self.maps: list[Map] = []

    @property
    def sets_aside(self) -> bool:
        return one_way(self)

    def visit(self, call: Call) -> None:
        if call.aside is not None:
            self.maps.append(aside_of(self, call, "attention", self._looking(call)))
        else:
            self.maps.append(map_of(self, call, call.mean_attention * self._looking(call).mT))

    def _looking(self, call: Call) -> Float[Tensor, "batch 1 query"]:
        """The transpose in R_sq reads columns: padding, and what comes after the word explained, looks nowhere."""
        frame = self.frames[call.query_stream]
        return frame.valid[:, None].to(frame.readout)

    def finish(self, tape: Tape) -> dict[str, Scores]:
        rows = self._by_rows(self.maps[::-1]) if one_way(self) else self._by_matrices()
        self.maps = []  # as large as the inputs, and there are others to come
        return {stream: Scores(row) for stream, row in rows.items()}

    def _by_rows(self, maps: Sequence[Map]) -> dict[str, Matrix]:
        """A row times R_qq is pushed from its last layer to its first; R_ssᵀ, which takes columns, the other way."""
        rows = {stream: frame.readout for stream, frame in self.frames.items()}
        rows |= {stream: self._pushed(maps, stream, rows[stream]) for stream in rows if self.speaks(stream)}
        last = {(one.looks, one.seen): place for place, one in enumerate(maps) if one.looks != one.seen}
        for (looks, seen), place in last.items():
            met = maps[place].push(self._pulled(maps[:place], looks, self.frames[looks].readout))
            rows[seen] = rows[seen] + self._pushed(maps[:place], seen, met)
        return rows

    def _pushed(self, maps: Sequence[Map], stream: str, rows: Matrix) -> Matrix:
        for one in reversed([one for one in maps if one.looks == one.seen == stream]):
            rows = self._halved(rows, one)
            rows = rows + one.push(rows)
        return rows

    def _pulled(self, maps: Sequence[Map], stream: str, columns: Matrix) -> Matrix:
        for one in maps:
            if one.looks == one.seen == stream:
                columns = self._halved(columns + one.pull(columns), one)
        return columns

    def _by_matrices(self) -> dict[str, Matrix]:
        rolled = {stream: _identity(frame) for stream, frame in self.frames.items()}
        towers = dict(rolled)
        between: dict[tuple[str, str], Tensor] = {}
        for step in steps(self.maps):
            before = dict(rolled)
            for one in step:
                looks, seen = one.looks, one.seen
                if looks == seen:
                    added = one.joined @ (towers if one.tower else rolled)[seen]
                    rolled[looks] = self._halved((rolled[looks] + added).mT, one).mT
                    if one.tower:
                        towers[looks] = self._halved((towers[looks] + added).mT, one).mT
                else:
                    between[looks, seen] = rolled[looks].mT @ one.joined @ before[seen]
        rows = {stream: frame.readout @ rolled[stream] for stream, frame in self.frames.items()}
        for (looks, seen), rollout in between.items():
            rows[seen] = rows[seen] + self.frames[looks].readout @ rollout
        return rows

    def _halved(self, both: Matrix, one: Map) -> Matrix:
        """Rows or columns over the queries, divided by the sums of the rows of E_h A + I."""
        return both / (1 + one.sums()) if self.half else both


def _sums(attention: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch query 1"]:
    """The sums of the rows of E_h A + I: two, but where part of the attention goes to a sink that is no unit."""
    return 1 + attention.sum(-1, keepdim=True)


def _identity(frame: Frame) -> Float[Tensor, "batch unit unit"]:
    batch, _, width = frame.readout.shape
    return torch.eye(width, dtype=frame.readout.dtype, device=frame.readout.device).expand(batch, width, width)
