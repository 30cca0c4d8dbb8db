"""Calls of several streams as one map each, in the order of the pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold
from clearhead.recording.tape import Call

Matrix = Float[Tensor, "batch row column"]


@dataclass(frozen=True)
class Map:
    """One call with its heads joined."""

    looks: str
    seen: str
    joined: Matrix
    tower: bool
    block: str | None


def map_of(fold: AcrossFold, call: Call, joined: Matrix) -> Map:
    return Map(call.query_stream, call.key_stream, joined, call.module in fold.towers, fold.blocks.get(call.module))


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
