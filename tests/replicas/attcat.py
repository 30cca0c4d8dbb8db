"""AttCAT (Qiang et al. 2022): each layer's CAT times the attention that the token gets in the layer it enters.

Weights "received": the mean over heads and over all queries; "row": the read-out row alone."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.cat import compute_cat
from tests.replicas.plain_pass import Seen


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    weights: str = "received",
) -> Float[np.ndarray, "layer head unit"]:
    layers = range(seen.layers) if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    result = np.zeros((len(layers), len(heads), seen.units))
    for a, layer in enumerate(layers):
        features = compute_cat(seen, layer)
        for b, head in enumerate(heads):
            for i in range(seen.units):
                column = seen.attention[layer, head, :, i]
                weight = column.mean() if weights == "received" else sum(readout * column)
                result[a, b, i] = weight / len(heads) * features[i]
    return result


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    weights: str = "received",
) -> Float[np.ndarray, "unit"]:
    return contributions(seen, readout, layers, heads, weights).sum((0, 1))
