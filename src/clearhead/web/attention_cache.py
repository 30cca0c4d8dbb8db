"""The heads of inputs that were looked at lately: their whole maps, kept in bytes, given out one by one."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from clearhead.probes import AttentionView, StreamsView
from clearhead.render.array_codec import quantised
from clearhead.render.view_model import Document, document
from clearhead.render.views.attention import BUDGET

Maps = Mapping[str, UInt8[np.ndarray, "layer head query key"]]


class Heads:
    """Maps by a key that nobody can guess. Those that were asked for longest ago make room for new ones."""

    def __init__(self, most: int) -> None:
        """most: bytes that all maps take together"""
        self.most = most
        self.kept: OrderedDict[str, Maps] = OrderedDict()
        self.lock = threading.Lock()

    def shown(self, found: AttentionView | StreamsView) -> Document:
        """The document of what was found, and the key of its whole maps where the document has them pooled alone."""
        views = found.maps if isinstance(found, StreamsView) else {"": found}
        total = sum(own.attention.size for own in views.values())
        if not BUDGET < total <= self.most:
            return {"view": document(found), "heads": None}
        return {"view": document(found, inline=False), "heads": self.keep(views)}

    def keep(self, views: Mapping[str, AttentionView]) -> str:
        key, maps = secrets.token_urlsafe(12), {name: quantised(own.attention) for name, own in views.items()}
        with self.lock:
            self.kept[key] = maps
            while sum(_size(own) for own in self.kept.values()) > self.most:
                self.kept.popitem(last=False)
        return key

    def tile(self, key: str, name: str, layer: int, head: int) -> bytes:
        """One head's map, a byte for each weight's square root, row by row; KeyError where there is none (any more)."""
        with self.lock:
            own = self.kept[key][name]
            self.kept.move_to_end(key)
        if not (layer < own.shape[0] and head < own.shape[1]):
            raise KeyError((layer, head))
        return own[layer, head].tobytes()


def _size(maps: Maps) -> int:
    return sum(own.nbytes for own in maps.values())
