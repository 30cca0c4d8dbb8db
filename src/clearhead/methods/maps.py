"""Calls of several streams as one map each, in the order of the pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold
from clearhead.recording.kept import Kept
from clearhead.recording.reduce import Reduce
from clearhead.recording.tape import Call

Matrix = Float[Tensor, "batch row column"]
Of = Literal["positive", "attention"]


@dataclass(frozen=True)
class Map:
    """One call with its heads joined: as a matrix, or kept after a streaming pass, as what rows and columns become."""

    looks: str
    seen: str
    joined: Matrix
    tower: bool
    block: str | None
    kept: Kept | None = None
    of: Of = "positive"
    heads: Sequence[int] | None = None
    #: One for queries that count: padding looks somewhere, too.
    looking: Float[Tensor, "batch 1 query"] | None = None

    def push(self, rows: Float[Tensor, "batch row query"]) -> Float[Tensor, "batch row key"]:
        if self.kept is None:
            return rows @ self.joined
        rows = rows if self.looking is None else rows * self.looking
        return self.kept.sums([Reduce(self.of, rows, self.heads)])[0].sum(1).to(rows)

    def pull(self, columns: Float[Tensor, "batch column key"]) -> Float[Tensor, "batch column query"]:
        if self.kept is None:
            return columns @ self.joined.mT
        found = self.kept.sums([Reduce(self.of, heads=self.heads, columns=columns)])[0].sum(1).to(columns)
        return found if self.looking is None else found * self.looking


def map_of(fold: AcrossFold, call: Call, joined: Matrix) -> Map:
    return Map(call.query_stream, call.key_stream, joined, call.module in fold.towers, fold.blocks.get(call.module))


def kept_of(fold: AcrossFold, call: Call, of: Of) -> Map:
    """Of a call whose maps were never whole."""
    frame = fold.frames[call.query_stream]
    nothing, looking = frame.readout.new_empty(0), frame.valid[:, None].to(frame.readout)
    return replace(map_of(fold, call, nothing), kept=call.kept, of=of, heads=fold.heads, looking=looking)


def one_way(fold: AcrossFold) -> bool:
    """Whether no stream that another looks at looks at others (encoder–decoders), and all happens one after the
    other."""
    seen = {q for s, q in fold.layers if s != q}
    return not (fold.towers or fold.blocks or any(s in seen and s != q for s, q in fold.layers))


def steps(visited: Sequence[Map]) -> Iterator[list[Map]]:
    """Maps in the order of the pass (they are visited from the last to the first), those that happen at once together:
    the calls of a block, and two streams that look at each other."""
    step: list[Map] = []
    for one in reversed(visited):
        if step and not _at_once(step, one):
            yield step
            step = []
        step.append(one)
    yield step


def _at_once(step: Sequence[Map], after: Map) -> bool:
    last = step[-1]
    if last.block is not None:
        return last.block == after.block
    mutual = last.looks != last.seen and (last.looks, last.seen) == (after.seen, after.looks)
    return mutual and len(step) == 1  # the next two look at each other anew
