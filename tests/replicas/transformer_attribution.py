"""Transformer Attribution (Chefer, Gur & Wolf 2021): C = I + E_h[(G ⊙ P)⁺], and w · C_{L-1} ⋯ C_s.

With `normalise`, rows are divided by their sums and keep the identity; otherwise the identity is subtracted."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.relevance import RelevanceRecord


def matrix(
    record: RelevanceRecord,
    gradients: Float[np.ndarray, "layer head query key"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    normalise: bool = False,
) -> Float[np.ndarray, "unit unit"]:
    """Return the full product; later layers are multiplied from the left."""
    units = gradients.shape[-1]
    result = np.eye(units)
    for layer in range(len(gradients)) if layers is None else layers:
        chosen_heads = range(gradients.shape[1]) if heads is None else heads
        step = np.eye(units)
        for i in range(units):
            for j in range(units):
                products = [gradients[layer, h, i, j] * record.maps[layer][h, i, j] for h in chosen_heads]
                step[i, j] += sum(max(product, 0.0) for product in products) / len(chosen_heads)
        if normalise:
            step = step / step.sum(1, keepdims=True)
        result = step @ result
    return result if normalise else result - np.eye(units)


def scores(
    record: RelevanceRecord,
    gradients: Float[np.ndarray, "layer head query key"],
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    normalise: bool = False,
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(record, gradients, layers, heads, normalise)
