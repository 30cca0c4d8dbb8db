"""Attention as a document: every head's map in bytes, pooled where a page would grow too large, and strong links."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from clearhead.render.array_codec import encode_array, encode_weight_bytes, quantise_sqrt
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, build_image_view_model, build_links_view_model, make_view_model

if TYPE_CHECKING:
    from clearhead.probes.attention_view import AttentionView
    from clearhead.probes.cross_attention_view import MultiStreamAttentionView

#: How many bytes all maps of a page take at most, and all that stand beside maps which are fetched one by one.
MAX_INLINE_MAP_BYTES, MAX_PREVIEW_MAP_BYTES = 1_200_000, 240_000
#: Where maps are pooled: how many single links of each head are kept.
MAX_LINKS_PER_HEAD = 400
#: The layered graph has at most so many units, and so many links into each.
MAX_GRAPH_UNITS, MAX_LINKS_PER_NODE = 40, 4


def build_attention_view_model(
    attention_view: "AttentionView", inline: bool = True, max_bytes: int | None = None
) -> ViewModel:
    """The document of one input's attention.

    inline: whether a page must do with it alone; if not, it may fetch each head's whole map
    budget: the most bytes that all maps of it take
    """
    from clearhead.probes.attention_view import CONCLUSION

    layers, heads, high, wide = attention_view.attention.shape
    room = (max_bytes or (MAX_INLINE_MAP_BYTES if inline else MAX_PREVIEW_MAP_BYTES)) / (layers * heads)
    size = fit_map_size(high, wide, room)
    made = make_view_model(
        "attention",
        heading=_format_attention_heading(attention_view.prediction),
        model=escape_invisible(attention_view.model),
        prediction=escape_invisible(attention_view.prediction),
        tokens=[escape_invisible(token) for token in attention_view.tokens],
        readout_row=attention_view.readout_row,
        map_size=list(size),
        maps=encode_weight_bytes(quantise_sqrt(max_pool_maps(attention_view.attention, size))),
        patterns=[
            [attention_view.format_head_pattern(layer, head) for head in range(heads)] for layer in range(layers)
        ],
        scores_by_depth={
            kind: encode_array(np.asarray(rows), _compute_rows_vmax(rows))
            for kind, rows in attention_view.scores_by_depth.items()
        },
        conclusion=CONCLUSION,
    )
    if attention_view.key_names is None:
        made["layer_graph"] = _build_layer_graph(attention_view.attention.mean(1), attention_view.scores_by_depth)
    else:
        made["key_tokens"] = [escape_invisible(token) for token in attention_view.key_names]
    if attention_view.mean_head_statistics is not None:
        made["mean_patterns"] = [
            [attention_view.format_head_pattern(layer, head, True) for head in range(heads)] for layer in range(layers)
        ]
    if size != (high, wide) and inline:
        made["head_links"] = [
            [_encode_strongest_links(attention_view.attention[layer, head]) for head in range(heads)]
            for layer in range(layers)
        ]
    return made


def build_multi_stream_view_model(multi_stream_view: "MultiStreamAttentionView", inline: bool = True) -> ViewModel:
    """The maps of each stream, and those from one to another, to choose from."""
    room, total = (
        MAX_INLINE_MAP_BYTES if inline else MAX_PREVIEW_MAP_BYTES,
        sum(own.attention.size for own in multi_stream_view.views.values()),
    )
    share = min(1.0, room / total)
    maps = [
        {
            "name": escape_invisible(title),
            **build_attention_view_model(own, inline, math.ceil(share * own.attention.size)),
        }
        for title, own in multi_stream_view.views.items()
    ]
    made = make_view_model(
        "multi_stream_attention",
        heading=_format_attention_heading(multi_stream_view.prediction),
        model=escape_invisible(multi_stream_view.model),
        maps=maps,
    )
    if multi_stream_view.links and multi_stream_view.explanation is not None:
        picture = multi_stream_view.explanation.image
        made["links"] = build_links_view_model(multi_stream_view.links, multi_stream_view.explanation)
        made["image"] = None if picture is None else build_image_view_model(picture)
    return made


def _format_attention_heading(prediction: str) -> str:
    return f"Attention for the prediction {escape_invisible(prediction)}"


def fit_map_size(num_rows: int, num_columns: int, max_elements: float) -> tuple[int, int]:
    """How many rows and columns of a map have room, in the shape that it has.

    >>> fit_map_size(10, 20, 200), fit_map_size(100, 400, 400), fit_map_size(1, 900, 100)
    ((10, 20), (10, 40), (1, 100))
    """
    share = min(1.0, float(np.sqrt(max_elements / (num_rows * num_columns))))
    rows = max(1, int(num_rows * share))
    return rows, max(1, min(num_columns, int(max_elements / rows) if rows == 1 else int(num_columns * share)))


def max_pool_maps(
    maps: Float[np.ndarray, "*maps high wide"], size: tuple[int, int]
) -> Float[np.ndarray, "*maps {size[0]} {size[1]}"]:
    """The largest weight in each block, so that nothing that stands out is lost."""
    for axis, blocks in zip((-2, -1), size, strict=True):
        n = maps.shape[axis]
        if blocks < n:
            starts: Int[np.ndarray, blocks] = np.arange(blocks) * n // blocks
            maps = np.maximum.reduceat(maps, starts, axis=axis)
    return maps


def _compute_rows_vmax(rows: Float[np.ndarray, "layer unit"]) -> float:
    top = float(np.nanmax(rows)) if np.size(rows) else 0.0
    return top if np.isfinite(top) and top > 0 else 1.0


def _encode_strongest_links(weights: Float[np.ndarray, "query key"]) -> ViewModel:
    """The strongest links of one head: where from, where to, how strong."""
    flat = weights.ravel()
    count = min(MAX_LINKS_PER_HEAD, flat.size)
    most = np.argpartition(flat, -count)[-count:]
    query, key = np.unravel_index(most[np.lexsort((most, -flat[most]))], weights.shape)
    pairs: Int[np.ndarray, "link 2"] = np.stack([query, key], 1).astype("<u2")
    strengths: UInt8[np.ndarray, link] = quantise_sqrt(weights[query, key])
    return {
        "pairs": {**encode_weight_bytes(pairs.view(np.uint8)), "dtype": "u2", "shape": list(pairs.shape)},
        "weights": encode_weight_bytes(strengths),
    }


def _build_layer_graph(mean: Float[np.ndarray, "layer query key"], depth: "dict[str, Any]") -> ViewModel:
    """Layers one above the other: the units that matter most, and the strongest links into each."""
    n = mean.shape[-1]
    told = np.asarray(depth.get("rollout", next(iter(depth.values()))))
    kept = (
        np.sort(np.argsort(-np.nan_to_num(told).max(0), kind="stable")[:MAX_GRAPH_UNITS])
        if n > MAX_GRAPH_UNITS
        else np.arange(n)
    )
    links = []
    for layer, weights in enumerate(mean[:, kept][:, :, kept]):
        for query, row in enumerate(weights):
            for key in np.argsort(-row, kind="stable")[:MAX_LINKS_PER_NODE]:
                if row[key] >= 0.02:
                    links.append([layer, query, int(key), round(float(row[key]), 3)])
    return {"units": [int(place) for place in kept], "links": links, "num_units": n}
