"""Grad-SAM (Barkan et al. 2021): H = A ∘ ReLU(G), r_i = 1/(L·M·N) Σ_l Σ_m Σ_j H_ij; with `received`, H_ji."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    received: bool = False,
) -> Float[np.ndarray, "layer head unit"]:
    layers = range(seen.layers) if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    result = np.zeros((len(layers), len(heads), seen.units))
    for a, layer in enumerate(layers):
        for b, head in enumerate(heads):
            for i in range(seen.units):
                for j in range(seen.units):
                    cell = (layer, head, j, i) if received else (layer, head, i, j)
                    result[a, b, i] += seen.attention[cell] * max(seen.attention_gradient[cell], 0.0)
    return result / (len(layers) * len(heads) * seen.units)


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    received: bool = False,
) -> Float[np.ndarray, "unit"]:
    return contributions(seen, readout, layers, heads, received).sum((0, 1))
