"""Input × gradient: Σ_k x_ik · ∂y/∂x_ik over the embedding of a token, or over the pixels of a patch."""

import math

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def reduce_vector(vector: list[float], reduce: str) -> float:
    if reduce == "sum":
        return math.fsum(vector)
    if reduce == "abs":
        return math.fsum(abs(x) for x in vector)
    return math.sqrt(math.fsum(x * x for x in vector))


def unit_vectors(leaf: Float[np.ndarray, "*leaf"], patch: int, before: int) -> list[list[float]]:
    """Return one vector per unit: an embedding, or the pixels of a patch; empty for special tokens of images."""
    if leaf.ndim == 2:
        return [list(map(float, vector)) for vector in leaf]
    channels, height, width = leaf.shape
    vectors: list[list[float]] = [[] for _ in range(before + (height // patch) * (width // patch))]
    for y in range(height // patch * patch):
        for x in range(width // patch * patch):
            unit = before + (y // patch) * (width // patch) + x // patch
            vectors[unit] += [float(leaf[channel, y, x]) for channel in range(channels)]
    return vectors


def scores(seen: Seen, patch: int, before: int, reduce: str = "sum") -> Float[np.ndarray, "unit"]:
    products = seen.inputs * seen.input_gradient
    return np.array([reduce_vector(vector, reduce) for vector in unit_vectors(products, patch, before)])
