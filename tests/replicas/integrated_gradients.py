"""Integrated gradients: Σ_k (x − x′)_ik · ∫ ∂y/∂x_ik along the straight way, one step after the other."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.input_x_gradient import reduced, unit_vectors
from tests.replicas.path_passes import Walker


def points(rule: str, steps: int) -> list[tuple[float, float]]:
    """Places and weights by the book."""
    if rule == "gauss-legendre":
        # the roots of the n-th Legendre polynomial on 0…1, w = 1 / ((1 − t²) P′(t)²)
        polynomial = np.polynomial.legendre.Legendre.basis(steps)
        slope = polynomial.deriv()
        return [((1 + t) / 2, 1 / ((1 - t**2) * slope(t) ** 2)) for t in polynomial.roots().real]
    if rule == "riemann-trapezoid":
        h = 1 / (steps - 1)
        return [(k * h, h / 2 if k in (0, steps - 1) else h) for k in range(steps)]
    shift = {"riemann-left": 0, "riemann-middle": 0.5, "riemann-right": 1}[rule]
    return [((k + shift) / steps, 1 / steps) for k in range(steps)]


def scores(
    walker: Walker,
    baseline: Float[np.ndarray, "*leaf"],
    patch: int,
    before: int,
    steps: int = 50,
    rule: str = "gauss-legendre",
    reduce: str = "sum",
) -> Float[np.ndarray, "unit"]:
    way = walker.x - baseline
    total = np.zeros_like(way)
    for place, weight in points(rule, steps):
        total += weight * walker.gradient(baseline + place * way)[1]
    return per_unit(way * total, patch, before, reduce)


def per_unit(products: Float[np.ndarray, "*leaf"], patch: int, before: int, reduce: str) -> Float[np.ndarray, "unit"]:
    return np.array([reduced(vector, reduce) for vector in unit_vectors(products[0], patch, before)])


def drawn(seed: int, draw: int, what: int) -> np.random.Generator:
    """How random places are keyed: by the content of the input, the draw, and what is drawn."""
    return np.random.default_rng([seed, draw, what])


def lengths(vectors: Float[np.ndarray, "*leaf"], pixels: bool) -> Sequence[float]:
    return vectors.ravel().tolist() if pixels else [float(np.sqrt((row**2).sum())) for row in vectors[0]]
