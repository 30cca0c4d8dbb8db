"""SmoothGrad: the mean gradient at x + N(0, σ²), σ a fraction of the range of pixels, or of embedding lengths."""

import numpy as np
from jaxtyping import Float

from tests.replicas.integrated_gradients import compute_lengths, make_generator, per_unit
from tests.replicas.path_passes import InputEvaluator


def scores(
    evaluator: InputEvaluator,
    seed: int,
    patch: int,
    before: int,
    samples: int = 50,
    noise: float = 0.15,
    reduce: str = "l2",
) -> Float[np.ndarray, "unit"]:
    sizes = compute_lengths(evaluator.x, evaluator.pixels)
    sigma = noise * (max(sizes) - min(sizes))
    total = np.zeros_like(evaluator.x)
    for draw in range(samples):
        epsilon = sigma * make_generator(seed, draw, 2).standard_normal(evaluator.x.size).reshape(evaluator.x.shape)
        total += evaluator.gradient(evaluator.x + epsilon)[1] / samples
    return per_unit(total, patch, before, reduce)
