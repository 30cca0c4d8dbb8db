"""Transformer Attribution (Chefer, Gur & Wolf 2021): C = I + E_h[(G ⊙ P)⁺], and w · C_{L-1} ⋯ C_s.

Rows that are divided by their sums keep the identity's part; otherwise it is taken off."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.relevance import Found


def matrix(
    found: Found,
    gradients: Float[np.ndarray, "layer head query key"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    normalise: bool = False,
) -> Float[np.ndarray, "unit unit"]:
    """The whole product; the later layer stands on the left."""
    units = gradients.shape[-1]
    whole = np.eye(units)
    for layer in range(len(gradients)) if layers is None else layers:
        chosen = range(gradients.shape[1]) if heads is None else heads
        step = np.eye(units)
        for i in range(units):
            for j in range(units):
                products = [gradients[layer, h, i, j] * found.maps[layer][h, i, j] for h in chosen]
                step[i, j] += sum(max(product, 0.0) for product in products) / len(chosen)
        if normalise:
            step = step / step.sum(1, keepdims=True)
        whole = step @ whole
    return whole if normalise else whole - np.eye(units)


def scores(
    found: Found,
    gradients: Float[np.ndarray, "layer head query key"],
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    normalise: bool = False,
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(found, gradients, layers, heads, normalise)
