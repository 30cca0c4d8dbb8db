"""Attention as a document: every head's map in bytes, pooled where a page would grow too large, and strong links."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from clearhead.show.documents import Document, view
from clearhead.show.layout import name
from clearhead.show.packing import packed, quantised, tiles

if TYPE_CHECKING:
    from clearhead.probes.viewing import AttentionView

#: How many bytes all maps of a page take at most, and all that stand beside maps which are fetched one by one.
BUDGET, SMALL = 1_200_000, 240_000
#: Where maps are pooled: how many single links of each head are kept.
LINKS = 400
#: The layered graph has at most so many units, and so many links into each.
NODES, INTO = 40, 4


def attention(found: "AttentionView", inline: bool = True) -> Document:
    """The document of one input's attention.

    inline: whether a page must do with it alone; if not, it may fetch each head's `tile`
    """
    from clearhead.probes.viewing import SAYS

    layers, heads, n, _ = found.attention.shape
    size = min(n, max(1, int(np.sqrt((BUDGET if inline else SMALL) / (layers * heads)))))
    made = view(
        "attention",
        heading=f"What it attends to: {name(found.prediction)}",
        model=name(found.model),
        prediction=name(found.prediction),
        tokens=[name(token) for token in found.tokens],
        row=found.row,
        size=size,
        tiles=tiles(quantised(pooled(found.attention, size))),
        patterns=[[found.pattern(layer, head) for head in range(heads)] for layer in range(layers)],
        depth={kind: packed(np.asarray(rows), _full(rows)) for kind, rows in found.by_depth.items()},
        graph=_graph(found.attention.mean(1), found.by_depth),
        says=SAYS,
    )
    if found.beside is not None:
        made["beside"] = [[found.pattern(layer, head, True) for head in range(heads)] for layer in range(layers)]
    if size < n:
        made["links"] = [[_strongest(found.attention[layer, head]) for head in range(heads)] for layer in range(layers)]
    return made


def tile(found: "AttentionView", layer: int, head: int) -> bytes:
    """One head's whole map, a byte for each weight's square root, query by query."""
    return quantised(found.map(layer, head)).tobytes()


def pooled(maps: Float[np.ndarray, "*maps n n"], size: int) -> Float[np.ndarray, "*maps {size} {size}"]:
    """The largest weight in each block, so that nothing that stands out is lost."""
    n = maps.shape[-1]
    if size >= n:
        return maps
    starts: Int[np.ndarray, size] = np.arange(size) * n // size
    return np.maximum.reduceat(np.maximum.reduceat(maps, starts, axis=-2), starts, axis=-1)


def _full(rows: Float[np.ndarray, "layer unit"]) -> float:
    top = float(np.nanmax(rows)) if np.size(rows) else 0.0
    return top if np.isfinite(top) and top > 0 else 1.0


def _strongest(weights: Float[np.ndarray, "query key"]) -> Document:
    """The strongest links of one head: where from, where to, how strong."""
    flat = weights.ravel()
    most = np.argpartition(flat, -LINKS)[-LINKS:]  # maps are pooled only where they have far more weights than this
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
    told = np.asarray(depth.get("rollout", depth["raw"]))
    kept = np.sort(np.argsort(-np.nan_to_num(told).max(0), kind="stable")[:NODES]) if n > NODES else np.arange(n)
    links = []
    for layer, weights in enumerate(mean[:, kept][:, :, kept]):
        for query, row in enumerate(weights):
            for key in np.argsort(-row, kind="stable")[:INTO]:
                if row[key] >= 0.02:
                    links.append([layer, query, int(key), round(float(row[key]), 3)])
    return {"units": [int(place) for place in kept], "links": links, "of": n}
