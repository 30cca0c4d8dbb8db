"""Grads of AttCAT's figure: E_H(∇α) of the last layer, or the mean over the selected layers."""

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
    layers = [seen.layers - 1] if layers is None else list(layers)
    heads = range(seen.heads) if heads is None else heads
    result = [[readout @ seen.attention_gradient[layer, head] for head in heads] for layer in layers]
    return np.array(result) / (len(layers) * len(heads))


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
