"""Transition attention maps: s is a row of the last layer, s ← s · E_h A + s to the first, times the feedback."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def scores(
    seen: Seen,
    feedback: Float[np.ndarray, "row unit"],
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] = (1, 2),
) -> Float[np.ndarray, "unit"]:
    *lower_layers, last = layers
    total = np.zeros(seen.units)
    for row, weight in enumerate(readout):
        if weight:
            state = seen.attention[last].mean(0)[row]
            for layer in reversed(lower_layers):
                state = state @ seen.attention[layer].mean(0) + state
            total += weight * state * feedback[row]
    return total
