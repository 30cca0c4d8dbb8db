"""Partial LRP: the read-out rows of E_h[P⁺] of one layer, or their mean over several layers."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.relevance import RelevanceRecord


def scores(
    record: RelevanceRecord,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] = (-1,),
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    total = np.zeros(len(readout))
    for layer in layers:
        maps = record.maps[layer]
        chosen_heads = range(len(maps)) if heads is None else heads
        for head in chosen_heads:
            for i, weight in enumerate(readout):
                for j in range(len(readout)):
                    total[j] += weight * max(maps[head, i, j], 0.0) / len(chosen_heads)
    return total / len(layers)
