"""GradCAM on attention: a head's weight is the mean of its gradient over the whole map; mean over heads, then clamp."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def cam(
    attention: Float[np.ndarray, "head row unit"], gradient: Float[np.ndarray, "head row unit"]
) -> Float[np.ndarray, "row unit"]:
    total = np.zeros(attention.shape[1:])
    for head in range(len(attention)):
        weight = sum(float(g) for row in gradient[head] for g in row) / gradient[head].size
        total += weight * attention[head]
    return np.maximum(total / len(attention), 0)


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    layers = [seen.layers - 1] if layers is None else layers
    chosen_heads = list(range(seen.heads) if heads is None else heads)
    maps = [(seen.attention[layer][chosen_heads], seen.attention_gradient[layer][chosen_heads]) for layer in layers]
    return np.mean([cam(*pair) for pair in maps], axis=0)


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer 1 unit"]:
    """The clamp follows the mean over heads, so only layers have contributions."""
    layers = [seen.layers - 1] if layers is None else layers
    return np.array([[readout @ matrix(seen, [layer], heads) / len(layers)] for layer in layers])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, layers, heads)


def compute_row_cam(
    attention: Float[np.ndarray, "head row unit"],
    gradient: Float[np.ndarray, "head row unit"],
    readout: Float[np.ndarray, "unit"],
    inside: Sequence[int],
) -> Float[np.ndarray, "unit"]:
    """The weight of a head is the mean gradient of the read-out row over the units `inside`; the map is that row."""
    total = np.zeros(len(readout))
    for head in range(len(attention)):
        slopes = [sum(readout[i] * gradient[head, i, j] for i in range(len(readout))) for j in inside]
        total += sum(slopes) / len(slopes) * (readout @ attention[head])
    return np.maximum(total / len(attention), 0)
