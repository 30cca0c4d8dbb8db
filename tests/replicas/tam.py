"""Transition attention maps: s from the last layer's row, s ← s · E_h A + s down to the first, times the feedback."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def scores(
    seen: Seen,
    wished: Float[np.ndarray, "row unit"],
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] = (1, 2),
) -> Float[np.ndarray, "unit"]:
    *below, last = layers
    total = np.zeros(seen.units)
    for row, weight in enumerate(readout):
        if weight:
            state = seen.attention[last].mean(0)[row]
            for layer in reversed(below):
                state = state @ seen.attention[layer].mean(0) + state
            total += weight * state * wished[row]
    return total
