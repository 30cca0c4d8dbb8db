"""Attention as a document: every head's map in bytes, pooled where a page would grow too large, and strong links."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from clearhead.render.array_codec import packed, quantised, tiles
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, between, picture_of, view

if TYPE_CHECKING:
    from clearhead.probes.attention_view import AttentionView
    from clearhead.probes.cross_attention_view import StreamsView

#: How many bytes all maps of a page take at most, and all that stand beside maps which are fetched one by one.
BUDGET, SMALL = 1_200_000, 240_000
#: Where maps are pooled: how many single links of each head are kept.
LINKS = 400
#: The layered graph has at most so many units, and so many links into each.
NODES, INTO = 40, 4


def attention(found: "AttentionView", inline: bool = True, budget: int | None = None) -> Document:
    """The document of one input's attention.

    inline: whether a page must do with it alone; if not, it may fetch each head's whole map
    budget: the most bytes that all maps of it take
    """
    from clearhead.probes.attention_view import SAYS

    layers, heads, high, wide = found.attention.shape
    room = (budget or (BUDGET if inline else SMALL)) / (layers * heads)
    size = fitted(high, wide, room)
    made = view(
        "attention",
        heading=_heading(found.prediction),
        model=name(found.model),
        prediction=name(found.prediction),
        tokens=[name(token) for token in found.tokens],
        row=found.row,
        size=list(size),
        tiles=tiles(quantised(pooled(found.attention, size))),
        patterns=[[found.pattern(layer, head) for head in range(heads)] for layer in range(layers)],
        depth={kind: packed(np.asarray(rows), _full(rows)) for kind, rows in found.by_depth.items()},
        says=SAYS,
    )
    if found.keys is None:
        made["graph"] = _graph(found.attention.mean(1), found.by_depth)
    else:
        made["keys"] = [name(token) for token in found.keys]
    if found.beside is not None:
        made["beside"] = [[found.pattern(layer, head, True) for head in range(heads)] for layer in range(layers)]
    if size != (high, wide) and inline:
        made["links"] = [[_strongest(found.attention[layer, head]) for head in range(heads)] for layer in range(layers)]
    return made


def by_stream(found: "StreamsView", inline: bool = True) -> Document:
    """The maps of each stream, and those from one to another, to choose from."""
    room, total = BUDGET if inline else SMALL, sum(own.attention.size for own in found.maps.values())
    share = min(1.0, room / total)
    maps = [
        {"name": name(title), **attention(own, inline, math.ceil(share * own.attention.size))}
        for title, own in found.maps.items()
    ]
    made = view("streams", heading=_heading(found.prediction), model=name(found.model), maps=maps)
    if found.links and found.told is not None:
        picture = found.told.picture
        made["links"] = between(found.links, found.told)
        made["picture"] = None if picture is None else picture_of(picture)
    return made


def _heading(prediction: str) -> str:
    return f"What it looks at when it says {name(prediction)}"


def fitted(high: int, wide: int, room: float) -> tuple[int, int]:
    """How many rows and columns of a map have room, in the shape that it has.

    >>> fitted(10, 20, 200), fitted(100, 400, 400), fitted(1, 900, 100)
    ((10, 20), (10, 40), (1, 100))
    """
    share = min(1.0, float(np.sqrt(room / (high * wide))))
    rows = max(1, int(high * share))
    return rows, max(1, min(wide, int(room / rows) if rows == 1 else int(wide * share)))


def pooled(
    maps: Float[np.ndarray, "*maps high wide"], size: tuple[int, int]
) -> Float[np.ndarray, "*maps {size[0]} {size[1]}"]:
    """The largest weight in each block, so that nothing that stands out is lost."""
    for axis, blocks in zip((-2, -1), size, strict=True):
        n = maps.shape[axis]
        if blocks < n:
            starts: Int[np.ndarray, blocks] = np.arange(blocks) * n // blocks
            maps = np.maximum.reduceat(maps, starts, axis=axis)
    return maps


def _full(rows: Float[np.ndarray, "layer unit"]) -> float:
    top = float(np.nanmax(rows)) if np.size(rows) else 0.0
    return top if np.isfinite(top) and top > 0 else 1.0


def _strongest(weights: Float[np.ndarray, "query key"]) -> Document:
    """The strongest links of one head: where from, where to, how strong."""
    flat = weights.ravel()
    count = min(LINKS, flat.size)
    most = np.argpartition(flat, -count)[-count:]
    query, key = np.unravel_index(most[np.lexsort((most, -flat[most]))], weights.shape)
    ends: Int[np.ndarray, "link 2"] = np.stack([query, key], 1).astype("<u2")
    strengths: UInt8[np.ndarray, link] = quantised(weights[query, key])
    return {
        "ends": {**tiles(ends.view(np.uint8)), "type": "u2", "shape": list(ends.shape)},
        "weights": tiles(strengths),
    }


def _graph(mean: Float[np.ndarray, "layer query key"], depth: "dict[str, Any]") -> Document:
    """Layers one above the other: the units that matter most, and the strongest links into each."""
    n = mean.shape[-1]
    told = np.asarray(depth.get("rollout", next(iter(depth.values()))))
    kept = np.sort(np.argsort(-np.nan_to_num(told).max(0), kind="stable")[:NODES]) if n > NODES else np.arange(n)
    links = []
    for layer, weights in enumerate(mean[:, kept][:, :, kept]):
        for query, row in enumerate(weights):
            for key in np.argsort(-row, kind="stable")[:INTO]:
                if row[key] >= 0.02:
                    links.append([layer, query, int(key), round(float(row[key]), 3)])
    return {"units": [int(place) for place in kept], "links": links, "of": n}
