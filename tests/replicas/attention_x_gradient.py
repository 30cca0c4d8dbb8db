"""AttGrads of AttCAT's figure: Σ_l E_H(∇α ⊙ α), entry by entry."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer head unit"]:
    layers = range(seen.layers) if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    result = np.zeros((len(layers), len(heads), seen.units))
    for layer_index, layer in enumerate(layers):
        for head_index, head in enumerate(heads):
            for i in range(seen.units):
                for j in range(seen.units):
                    cell = seen.attention_gradient[layer, head, i, j] * seen.attention[layer, head, i, j]
                    result[layer_index, head_index, j] += readout[i] * cell / len(heads)
    return result


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
    return contributions(seen, readout, layers, heads).sum((0, 1))
