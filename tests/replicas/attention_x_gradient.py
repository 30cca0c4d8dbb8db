"""AttGrads of AttCAT's figure: Σ_l E_H(∇α ⊙ α), entry by entry."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def shares(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer head unit"]:
    layers = range(seen.layers) if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    found = np.zeros((len(layers), len(heads), seen.units))
    for place, layer in enumerate(layers):
        for number, head in enumerate(heads):
            for i in range(seen.units):
                for j in range(seen.units):
                    cell = seen.attention_gradient[layer, head, i, j] * seen.attention[layer, head, i, j]
                    found[place, number, j] += readout[i] * cell / len(heads)
    return found


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    return np.array([scores(seen, row, layers, heads) for row in np.eye(seen.units)])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    return shares(seen, readout, layers, heads).sum((0, 1))
