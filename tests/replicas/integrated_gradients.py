"""Integrated gradients: Σ_k (x − x′)_ik · ∫ ∂y/∂x_ik along the straight path, one step after the other."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.input_x_gradient import reduce_vector, unit_vectors
from tests.replicas.path_passes import InputEvaluator


def compute_quadrature(rule: str, steps: int) -> list[tuple[float, float]]:
    """Return the points and weights of a quadrature rule."""
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
    evaluator: InputEvaluator,
    baseline: Float[np.ndarray, "*leaf"],
    patch: int,
    before: int,
    steps: int = 50,
    rule: str = "gauss-legendre",
    reduce: str = "sum",
) -> Float[np.ndarray, "unit"]:
    difference = evaluator.x - baseline
    total = np.zeros_like(difference)
    for point, weight in compute_quadrature(rule, steps):
        total += weight * evaluator.gradient(baseline + point * difference)[1]
    return per_unit(difference * total, patch, before, reduce)


def per_unit(products: Float[np.ndarray, "*leaf"], patch: int, before: int, reduce: str) -> Float[np.ndarray, "unit"]:
    return np.array([reduce_vector(vector, reduce) for vector in unit_vectors(products[0], patch, before)])


def make_generator(seed: int, draw: int, purpose: int) -> np.random.Generator:
    """Return the random generator for a seed (from the content of the input), a draw, and the purpose of the draw."""
    return np.random.default_rng([seed, draw, purpose])


def compute_lengths(vectors: Float[np.ndarray, "*leaf"], pixels: bool) -> Sequence[float]:
    return vectors.ravel().tolist() if pixels else [float(np.sqrt((row**2).sum())) for row in vectors[0]]
