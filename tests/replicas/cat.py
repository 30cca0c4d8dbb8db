"""CAT (Qiang et al. 2022): Σ_k h_ik · ∂y/∂h_ik for the input of each layer, summed over the layers."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def compute_cat(seen: Seen, state: int) -> Float[np.ndarray, "unit"]:
    """CAT^l: hidden state l times its gradient, summed over the model's width."""
    result = np.zeros(seen.hidden.shape[1])
    for i in range(seen.hidden.shape[1]):
        for k in range(seen.hidden.shape[2]):
            result[i] += seen.hidden[state, i, k] * seen.hidden_gradient[state, i, k]
    return result


def contributions(
    seen: Seen, readout: Float[np.ndarray, "unit"], layers: Sequence[int] | None = None
) -> Float[np.ndarray, "layer 1 unit"]:
    return np.array([[compute_cat(seen, layer)] for layer in (range(seen.layers) if layers is None else layers)])


def scores(
    seen: Seen, readout: Float[np.ndarray, "unit"], layers: Sequence[int] | None = None
) -> Float[np.ndarray, "unit"]:
    return contributions(seen, readout, layers).sum((0, 1))
