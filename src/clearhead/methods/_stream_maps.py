"""Calls of several streams as one map each, in the order of the pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.deferred import Aside
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call
from clearhead.methods.base import AcrossFold

Matrix = Float[Tensor, "batch row column"]
Of = Literal["positive", "attention"]


@dataclass(frozen=True)
class Map:
    """One call with its heads joined."""

    looks: str
    seen: str
    joined: Matrix
    tower: bool
    block: str | None

    def push(self, rows: Float[Tensor, "batch row query"]) -> Float[Tensor, "batch row key"]:
        return rows @ self.joined

    def pull(self, columns: Float[Tensor, "batch column key"]) -> Float[Tensor, "batch column query"]:
        return columns @ self.joined.mT

    def sums(self) -> Float[Tensor, "batch 1 query"]:
        """Of its rows."""
        return self.joined.sum(-1)[:, None]


@dataclass(frozen=True)
class MapAside(Map):
    """One call of a streaming pass, which has no matrix.

    looking: one for queries that count; None where others have no relevance anyway
    """

    aside: Aside
    of: Of
    heads: Sequence[int] | None
    looking: Float[Tensor, "batch 1 query"] | None

    def push(self, rows: Float[Tensor, "batch row query"]) -> Float[Tensor, "batch row key"]:
        return self._asked(rows=self._of_looking(rows)).sum(1).to(rows)

    def pull(self, columns: Float[Tensor, "batch column key"]) -> Float[Tensor, "batch column query"]:
        return self._of_looking(self._asked(columns=columns).sum(1).to(columns))

    def sums(self) -> Float[Tensor, "batch 1 query"]:
        return self._of_looking(self._asked().mean(1, keepdim=True).to(self.joined))

    def _asked(self, **weights: Tensor) -> Tensor:
        return self.aside.sums([Reduce(self.of, heads=self.heads, **weights)])[0]

    def _of_looking(self, part: Float[Tensor, "batch some query"]) -> Float[Tensor, "batch some query"]:
        return part if self.looking is None else part * self.looking


def map_of(fold: AcrossFold, call: Call, joined: Matrix) -> Map:
    return Map(call.query_stream, call.key_stream, joined, *_where(fold, call))


def aside_of(fold: AcrossFold, call: Call, of: Of, looking: Float[Tensor, "batch 1 query"] | None = None) -> MapAside:
    nothing = fold.frames[call.query_stream].readout.new_empty(0)
    assert call.aside is not None
    about = call.query_stream, call.key_stream, nothing, *_where(fold, call)
    return MapAside(*about, call.aside, of, fold.heads, looking)


def _where(fold: AcrossFold, call: Call) -> tuple[bool, str | None]:
    """Whether it is in a tower, and in which block."""
    return call.module in fold.towers, fold.blocks.get(call.module)


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
