"""Partial LRP: the rows of E_h[P⁺] that are read, of one layer, or of several on average."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.relevance import Found


def scores(
    found: Found, readout: Float[np.ndarray, "unit"], layers: Sequence[int] = (-1,), heads: Sequence[int] | None = None
) -> Float[np.ndarray, "unit"]:
    total = np.zeros(len(readout))
    for layer in layers:
        maps = found.maps[layer]
        chosen = range(len(maps)) if heads is None else heads
        for head in chosen:
            for i, weight in enumerate(readout):
                for j in range(len(readout)):
                    total[j] += weight * max(maps[head, i, j], 0.0) / len(chosen)
    return total / len(layers)
