"""Gradient SHAP: the mean of (x + ε − x′) · ∂y at random points between them, draw by draw."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.integrated_gradients import make_generator, per_unit
from tests.replicas.path_passes import InputEvaluator


def scores(
    evaluator: InputEvaluator,
    baselines: Sequence[Float[np.ndarray, "*leaf"]],
    seed: int,
    patch: int,
    before: int,
    samples: int = 50,
    noise: float = 0.0,
) -> Float[np.ndarray, "unit"]:
    total = np.zeros_like(evaluator.x)
    for draw in range(samples):
        baseline_index = int(make_generator(seed, draw, 1).integers(len(baselines))) if len(baselines) > 1 else 0
        epsilon = noise * make_generator(seed, draw, 2).standard_normal(evaluator.x.size).reshape(evaluator.x.shape)
        difference = evaluator.x + epsilon - baselines[baseline_index]
        total += (
            difference
            * evaluator.gradient(baselines[baseline_index] + make_generator(seed, draw, 0).uniform() * difference)[1]
            / samples
        )
    return per_unit(total, patch, before, "sum")
