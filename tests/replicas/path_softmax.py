"""The softmax's mean Jacobian as an explicit matrix, for one row of visible logits, in numpy."""

import numpy as np
from jaxtyping import Float


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def mean_jacobian(z: Float[np.ndarray, "key"], z0: Float[np.ndarray, "key"]) -> Float[np.ndarray, "key key"]:
    """Σ_k w_k [diag(p_k) − p_k p_kᵀ] at eight Gauss–Legendre nodes, plus (Δp − M Δz) Δzᵀ / ‖Δz‖²."""
    result = np.zeros((len(z), len(z)))
    for node, weight in zip(*np.polynomial.legendre.leggauss(8), strict=True):
        p = softmax(z0 + (node + 1) / 2 * (z - z0))
        result += weight / 2 * (np.diag(p) - np.outer(p, p))
    dz = z - z0
    if dz.any():
        result += np.outer(softmax(z) - softmax(z0) - result @ dz, dz) / (dz**2).sum()
    return result
