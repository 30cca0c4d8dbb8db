"""SmoothGrad: the mean gradient at x + N(0, σ²), σ a share of the range of pixels, or of the lengths of embeddings."""

import numpy as np
from jaxtyping import Float

from tests.replicas.integrated_gradients import drawn, lengths, per_unit
from tests.replicas.path_passes import Walker


def scores(
    walker: Walker, seed: int, patch: int, before: int, samples: int = 50, noise: float = 0.15, reduce: str = "l2"
) -> Float[np.ndarray, "unit"]:
    sizes = lengths(walker.x, walker.pixels)
    sigma = noise * (max(sizes) - min(sizes))
    total = np.zeros_like(walker.x)
    for draw in range(samples):
        epsilon = sigma * drawn(seed, draw, 2).standard_normal(walker.x.size).reshape(walker.x.shape)
        total += walker.gradient(walker.x + epsilon)[1] / samples
    return per_unit(total, patch, before, reduce)
