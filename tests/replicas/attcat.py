"""AttCAT (Qiang et al. 2022): each layer's CAT times the attention that the token gets in the layer it enters.

Received: the mean over heads and over all queries; row: the read-out row alone."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.cat import of_state
from tests.replicas.plain_pass import Seen


def shares(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    weights: str = "received",
) -> Float[np.ndarray, "layer head unit"]:
    layers = range(seen.layers) if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    found = np.zeros((len(layers), len(heads), seen.units))
    for a, layer in enumerate(layers):
        features = of_state(seen, layer)
        for b, head in enumerate(heads):
            for i in range(seen.units):
                column = seen.attention[layer, head, :, i]
                looked_at = column.mean() if weights == "received" else sum(readout * column)
                found[a, b, i] = looked_at / len(heads) * features[i]
    return found


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    weights: str = "received",
) -> Float[np.ndarray, "unit"]:
    return shares(seen, readout, layers, heads, weights).sum((0, 1))
