"""Attention rollout (Abnar & Zuidema 2020): add the identity, normalise rows, multiply later layers from the left."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def normalise_with_identity(attention: Float[np.ndarray, "head row unit"], heads: Sequence[int] | None) -> np.ndarray:
    """rownorm(E_h A + I)."""
    heads = range(len(attention)) if heads is None else heads
    mixed = sum(attention[head] for head in heads) / len(heads) + np.eye(attention.shape[-1])
    for row in range(len(mixed)):
        mixed[row] = mixed[row] / mixed[row].sum()
    return mixed


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    joint = np.eye(seen.units)
    for layer in range(seen.layers) if layers is None else layers:
        joint = normalise_with_identity(seen.attention[layer], heads) @ joint
    return joint


def depths(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer unit"]:
    """Return the scores of rollout up to each layer."""
    layers = range(seen.layers) if layers is None else layers
    return np.array([readout @ matrix(seen, layers[: last + 1], heads) for last in range(len(layers))])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, layers, heads)
