"""LRU cache of full-resolution attention maps, quantised to bytes and served head by head."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from clearhead.probes import AttentionView, MultiStreamAttentionView
from clearhead.render.array_codec import quantise_sqrt
from clearhead.render.view_model import ViewModel, build_view_model
from clearhead.render.views.attention import MAX_INLINE_MAP_BYTES

AttentionMapsByName = Mapping[str, UInt8[np.ndarray, "layer head query key"]]


class AttentionCache:
    """Maps by an unguessable key; the least recently used are dropped.

    Args:
        max_bytes: Size of all maps together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.maps_by_key: OrderedDict[str, AttentionMapsByName] = OrderedDict()
        self.lock = threading.Lock()

    def cache_and_build_view(self, view: AttentionView | MultiStreamAttentionView) -> ViewModel:
        """Build the view model; if its maps are pooled, cache the full maps and return their key as "maps_key"."""
        views = view.views if isinstance(view, MultiStreamAttentionView) else {"": view}
        total = sum(stream_view.attention.size for stream_view in views.values())
        if not MAX_INLINE_MAP_BYTES < total <= self.max_bytes:
            return {"view": build_view_model(view), "maps_key": None}
        return {"view": build_view_model(view, inline=False), "maps_key": self.add(views)}

    def add(self, views: Mapping[str, AttentionView]) -> str:
        """Cache the maps of all views and return their key."""
        key = secrets.token_urlsafe(12)
        maps = {name: quantise_sqrt(view.attention) for name, view in views.items()}
        with self.lock:
            self.maps_by_key[key] = maps
            while sum(_compute_num_bytes(cached_maps) for cached_maps in self.maps_by_key.values()) > self.max_bytes:
                self.maps_by_key.popitem(last=False)
        return key

    def get_head_map(self, key: str, map_name: str, layer: int, head: int) -> bytes:
        """Return the map of one head: one byte per weight, its square root, row by row.

        Raises:
            KeyError: There is no such map, or it was dropped.
        """
        with self.lock:
            attention = self.maps_by_key[key][map_name]
            self.maps_by_key.move_to_end(key)
        if not (layer < attention.shape[0] and head < attention.shape[1]):
            raise KeyError((layer, head))
        return attention[layer, head].tobytes()


def _compute_num_bytes(maps: AttentionMapsByName) -> int:
    """Return the size of all maps of one cached input."""
    return sum(attention.nbytes for attention in maps.values())
