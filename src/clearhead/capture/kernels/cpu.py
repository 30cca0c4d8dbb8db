"""Streaming attention on a CPU: torch's own kernel forward, and on the way back tiles that stay in the cache.

    A = softmax(Q Kᵀ s + mask);     ∂y/∂A = ∂y/∂O Vᵀ,  ∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A)

The formula of `materialised.py`, for some queries and heads of one sample at a time: whatever is made of a tile is made
before the next one, so that maps never go to memory. It is for models that run with torch's own kernel, which heeds a
scale and a mask and nothing else; other attention is the model's own eager one, in tiles (`tiled.py`).
"""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention import chunked_sdpa
from clearhead.capture.attention.lazy_mask import Seeing
from clearhead.capture.attention.materialised import KNOWN, as_models_have, each_head, joined_heads
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiled import Gradients, Streamed

#: How many numbers a tile has (2 MiB); but no fewer queries than these, with which matrix products are slow, and no
#: more than are worth it.
CELLS = 2**19
LEAST_ROWS, MOST_ROWS = 128, 512


class CachedTiles:
    name = "cached tiles"

    def takes(self, call: Streamed, reductions: Sequence[Reduce]) -> bool:
        parts = (call.query, call.key, call.value)
        plain = all(part.device.type == "cpu" and part.dtype == torch.float32 for part in parts)
        told = {name for name, part in call.more.items() if part is not None} <= KNOWN
        square = not call.causal or call.query.shape[2] == call.key.shape[2]
        wide = call.mask is None or call.mask.dim() == 4
        return call.forward is not None and plain and told and square and wide

    def output(self, call: Streamed) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        return chunked_sdpa.output(call), ()

    def backward(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"], reductions: Sequence[Reduce]
    ) -> tuple[Gradients, list[Tensor]]:
        if not reductions:
            return chunked_sdpa.gradients(call, gradient), []
        back = _Gradients(call)
        samples = [_Sample(call, i, one.transpose(0, 1)) for i, one in enumerate(gradient)]
        sums = [_Sum(one, call) for one in reductions]
        for sample, tile in _tiles(call, samples):
            for one in sums:
                one.add(sample.i, tile)
            back.add(sample, tile)
        return back.joined(), [one.total for one in sums]

    def reduced(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"] | None, reductions: Sequence[Reduce]
    ) -> list[Tensor]:
        if not reductions:
            return []
        slopes = [None] * len(call.query) if gradient is None else [one.transpose(0, 1) for one in gradient]
        sums = [_Sum(one, call) for one in reductions]
        for sample, tile in _tiles(call, [_Sample(call, i, one) for i, one in enumerate(slopes)]):
            for one in sums:
                one.add(sample.i, tile)
        return [one.total for one in sums]


@dataclass
class _Tile:
    """Some queries' attention to the keys that they see, in some heads, and the gradient of it."""

    heads: slice
    rows: slice
    keys: slice
    attention: Float[Tensor, "head query key"]
    gradient: Float[Tensor, "head query key"] | None
    spare: Float[Tensor, "head query key"]

    def maps(self, of: str) -> Float[Tensor, "head query key"]:
        """Until the next are asked for."""
        if of == "attention":
            return self.attention
        assert self.gradient is not None
        torch.mul(self.attention, self.gradient, out=self.spare)
        return self.spare.clamp_(min=0) if of == "positive" else self.spare


class _Sample:
    """One sample of a call, with a key and a value for each head."""

    def __init__(self, call: Streamed, i: int, gradient: Float[Tensor, "head query width"] | None) -> None:
        self.scale, self.i, self.gradient, self.query = call.scaling, i, gradient, call.query[i]
        heads = len(self.query)
        self.key, self.value = each_head(call.key[i], heads), each_head(call.value[i], heads)

    def tile(self, heads: slice, rows: slice, keys: slice, seen: "_Seen", room: Float[Tensor, "3 cell"]) -> _Tile:
        query, key, value = self.query[heads, rows], self.key[heads, keys], self.value[heads, keys]
        shape = len(query), query.shape[1], key.shape[1]
        maps, slope, spare = (part[: math.prod(shape)].view(shape) for part in room)
        maps.baddbmm_(query, key.mT, beta=0, alpha=self.scale)
        if seen.mask is not None:
            maps[:, :, seen.at] += self._own(seen.mask, heads)
        torch.softmax(maps, -1, out=maps)
        if seen.some is not None:
            maps *= self._own(seen.some, heads)
        if self.gradient is None:
            return _Tile(heads, rows, keys, maps, None, spare)
        torch.bmm(self.gradient[heads, rows], value.mT, out=slope)
        return _Tile(heads, rows, keys, maps, slope, spare)

    def _own(self, part: Float[Tensor, "batch some query key"], heads: slice) -> Float[Tensor, "head query key"]:
        own = part[self.i if len(part) > 1 else 0]
        return own[heads] if len(own) > 1 else own


@dataclass
class _Seen:
    """What some queries see. mask: is added to the scores of the keys `at` these places. some: which see anything."""

    mask: Float[Tensor, "batch some query key"] | None
    at: slice
    some: Seeing

    @classmethod
    def of(cls, call: Streamed, rows: slice, keys: slice) -> "_Seen":
        # of causal attention, all that comes before the first of these queries is seen by each of them
        masked = slice(rows.start, keys.stop) if call.causal else keys
        at = slice(masked.start - keys.start, masked.stop - keys.start)
        return cls(call.added(rows, masked, torch.float32), at, call.seeing(rows, keys))


class _Gradients:
    """What comes to the queries, keys and values of a call, for each head."""

    def __init__(self, call: Streamed) -> None:
        self.whole, self.scale, heads = (call.query, call.key, call.value), call.scaling, call.query.shape[1]
        # where many tiles add to each key, its sums lie as their products do
        laid = as_models_have if _rows(call) == call.query.shape[2] else _as_products_are
        layouts = zip((as_models_have, laid, laid), self.whole, strict=True)
        self.sums = [lay(part, heads).zero_() for lay, part in layouts]

    def add(self, sample: _Sample, tile: _Tile) -> None:
        """What a tile brings; its gradient is written over."""
        assert sample.gradient is not None and tile.gradient is not None
        heads, rows, keys, steep = tile.heads, tile.rows, tile.keys, tile.gradient
        into_query, into_key, into_value = (part[sample.i, heads] for part in self.sums)
        # a map that stands on the right is read as it lies
        into_value[:, keys] += (sample.gradient[heads, rows].mT @ tile.attention).mT
        torch.ops.aten._softmax_backward_data.out(steep, tile.attention, -1, steep.dtype, grad_input=steep)
        into_query[:, rows].add_(steep @ sample.key[heads, keys], alpha=self.scale)
        into_key[:, keys].add_((sample.query[heads, rows].mT @ steep).mT, alpha=self.scale)

    def joined(self) -> Gradients:
        pairs = zip(self.sums, self.whole, strict=True)
        dq, dk, dv = (joined_heads(sum_, part.shape[1], 1) for sum_, part in pairs)
        return dq, dk, dv


def _as_products_are(part: Float[Tensor, "batch some key width"], heads: int) -> Float[Tensor, "batch head key width"]:
    batch, _, keys, width = part.shape
    return part.new_empty(batch, heads, width, keys).mT


_kept = threading.local()


def _room(cells: int) -> Float[Tensor, "3 cell"]:
    """The same memory for each tile of this thread: to touch it first takes longer than what is done with it."""
    room: Tensor | None = getattr(_kept, "room", None)
    if room is None or room.shape[1] < cells:
        room = torch.empty(3, max(cells, CELLS), dtype=torch.float32, device="cpu")
    if room.shape[1] <= CELLS:  # more is not kept beyond a call
        _kept.room = room
    return room


def _rows(call: Streamed) -> int:
    """How many queries a tile has."""
    queries, keys = call.outline.shape[2:]
    return min(queries, call.tiles.rows or min(max(CELLS // keys, LEAST_ROWS), MOST_ROWS))


def _tiles(call: Streamed, samples: Sequence[_Sample]) -> Iterator[tuple[_Sample, _Tile]]:
    """The tiles of all samples; a mask is made once for them."""
    _, heads, queries, width = call.outline.shape
    size = _rows(call)
    room = _room(size * width)
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        keys = call.span(rows)
        seen = _Seen.of(call, rows, keys)
        some = max(1, CELLS // (size * (keys.stop - keys.start)))
        for sample in samples:
            for head in range(0, heads, some):
                yield sample, sample.tile(slice(head, min(head + some, heads)), rows, keys, seen, room)


class _Sum:
    """One sum over all tiles, as `Reduce` has it."""

    def __init__(self, wanted: Reduce, call: Streamed) -> None:
        batch, heads, queries, keys = call.outline.shape
        self.wanted, self.chosen = wanted, range(heads) if wanted.heads is None else wanted.heads
        apart, pulled = len(self.chosen), wanted.columns is not None
        self.weights = wanted.columns if pulled else wanted.rows
        if self.weights is None:
            self.total = call.query.new_zeros(batch, apart, queries)
        else:
            count = self.weights.shape[1]
            self.total = call.query.new_zeros(batch, apart if count == 1 else 1, count, queries if pulled else keys)
        self.last = max(self.chosen)
        self.joined: Tensor | None = None

    def add(self, i: int, tile: _Tile) -> None:
        places = [place for place, head in enumerate(self.chosen) if tile.heads.start <= head < tile.heads.stop]
        if not places:
            return
        maps, total = tile.maps(self.wanted.of), self.total[i]
        if self.wanted.heads is not None:
            maps = maps[[self.chosen[place] - tile.heads.start for place in places]]
        into = slice(places[0], places[-1] + 1) if self.wanted.heads is None else places
        if self.weights is None:
            total[into, tile.rows] += maps.sum(2)
            return
        pulled = self.wanted.columns is not None
        through, onto = (tile.keys, tile.rows) if pulled else (tile.rows, tile.keys)
        weights = self.weights[i, :, through].float() / len(self.chosen)
        if len(weights) == 1:
            total[into, :, onto] += weights.expand(len(maps), 1, -1) @ (maps.mT if pulled else maps)
            return
        # as many rows as queries take as long as the maps themselves: all heads together, once
        self.joined = maps.sum(0) if self.joined is None else self.joined.add_(maps.sum(0))
        if self.last < tile.heads.stop:
            total[0, :, onto] += weights @ (self.joined.mT if pulled else self.joined)
            self.joined = None
