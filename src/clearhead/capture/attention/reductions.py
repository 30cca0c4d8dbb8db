"""Sums of a map that kernels make without the map: what most methods fold from attention and its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.capture.tape import Call


@dataclass(frozen=True)
class Reduce:
    """Rows pushed down through the maps M of one call; or columns pulled up through them; without either, the sum of
    each row of M over its keys.

    of: M is (A ⊙ ∂y/∂A)⁺ ("positive"), A ⊙ ∂y/∂A ("product"), or A ("attention"), head by head
    heads: the heads that were chosen; None for all

    What comes of it is batch × head × row × key as `push` has it, batch × head × column × query as `pull` has it, or
    batch × head × query.
    """

    of: Literal["positive", "product", "attention"]
    rows: Float[Tensor, "batch row query"] | None = None
    heads: Sequence[int] | None = None
    columns: Float[Tensor, "batch column key"] | None = None

    def of_samples(self, own: slice, device: torch.device) -> "Reduce":
        """The same of some samples, where their maps are."""

        def part(given: Tensor | None) -> Tensor | None:
            return None if given is None else given[own].to(device)

        return replace(self, rows=part(self.rows), columns=part(self.columns))

    def of_tile(self, call: Call, queries: slice, count: int) -> Tensor:
        """What these of `count` queries add to it; `call` has the maps of the tile, with the chosen heads alone."""
        maps = self.maps(call)
        if self.rows is not None:
            return push(self.rows[:, :, queries], maps)
        own = maps.sum(3) if self.columns is None else pull(self.columns, maps)
        return pad(own, (queries.start, count - queries.stop))

    def maps(self, call: Call) -> Float[Tensor, "batch head query key"]:
        if self.of == "positive":
            return call.positive
        assert call.attention is not None
        if self.of == "attention":
            return call.attention
        assert call.attention_gradient is not None
        return call.attention * call.attention_gradient


def push(
    rows: Float[Tensor, "batch row query"], maps: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head row key"]:
    """Rows pushed down through the maps, divided by the number of heads, so that the sum over heads is r · E_h[maps].

    One row is kept head by head, which costs nothing; many rows are pushed through the mean map.
    """
    if rows.shape[1] == 1:
        return (rows[:, None] @ maps) / maps.shape[1]
    return (rows @ maps.mean(1))[:, None]


def pull(
    columns: Float[Tensor, "batch column key"], maps: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head column query"]:
    """Columns pulled up through the maps, as `push` does with rows: the sum over heads is E_h[maps] · c."""
    if columns.shape[1] == 1:
        return (columns[:, None] @ maps.mT) / maps.shape[1]
    return (columns @ maps.mean(1).mT)[:, None]
