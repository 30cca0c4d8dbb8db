"""Raw attention: the mean over heads (and over the chosen layers), row by row."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    layers = [seen.layers - 1] if layers is None else layers
    return np.mean([_mean_map(seen, layer, heads) for layer in layers], axis=0)


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer head unit"]:
    layers = [seen.layers - 1] if layers is None else layers
    heads = range(seen.heads) if heads is None else heads
    count = len(layers) * len(heads)
    return np.array([[readout @ seen.attention[layer, head] / count for head in heads] for layer in layers])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, layers, heads)


def _mean_map(seen: Seen, layer: int, heads: Sequence[int] | None) -> np.ndarray:
    heads = range(seen.heads) if heads is None else heads
    total = np.zeros((seen.units, seen.units))
    for head in heads:
        total += seen.attention[layer, head]
    return total / len(heads)
