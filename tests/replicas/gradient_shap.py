"""Gradient SHAP: the mean of (x + ε − x′) · ∂y at random places between them, draw by draw."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.integrated_gradients import drawn, per_unit
from tests.replicas.path_passes import Walker


def scores(
    walker: Walker,
    baselines: Sequence[Float[np.ndarray, "*leaf"]],
    seed: int,
    patch: int,
    before: int,
    samples: int = 50,
    noise: float = 0.0,
) -> Float[np.ndarray, "unit"]:
    total = np.zeros_like(walker.x)
    for draw in range(samples):
        which = int(drawn(seed, draw, 1).integers(len(baselines))) if len(baselines) > 1 else 0
        epsilon = noise * drawn(seed, draw, 2).standard_normal(walker.x.size).reshape(walker.x.shape)
        way = walker.x + epsilon - baselines[which]
        total += way * walker.gradient(baselines[which] + drawn(seed, draw, 0).uniform() * way)[1] / samples
    return per_unit(total, patch, before, "sum")
