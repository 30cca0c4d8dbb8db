"""The softmax's Jacobian, averaged along a straight path of logits, so that saturated attention keeps its relevance.

    M = Σ_k w_k [diag(p_k) − p_k p_kᵀ] ≈ ∫₀¹ J(z₀ + α Δz) dα,   p_k = softmax(z₀ + α_k Δz),   Δz = z − z₀
    M′ = M + (Δp − M Δz) Δzᵀ / ‖Δz‖²

α_k and w_k are the nodes and weights of Gauss–Legendre quadrature. Where a softmax is saturated, its Jacobian J(z)
vanishes, and with it everything that reaches the output through queries and keys. M does not vanish, because it also
sees the logits between z₀ and z. The integral maps Δz to Δp exactly; the term of rank one makes the same true of M′.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

#: Nodes of the quadrature. Known evidence is found nearly as well with three.
NUM_NODES = 8
#: An entry whose logit is this far below the largest is masked: models add −10,000 or less to what is not visible.
MASKED_LOGIT_DISTANCE = 5_000


def compute_path_softmax_jvp(
    z: Float[Tensor, "*shape"], z0: Float[Tensor, "*shape"], dz: Float[Tensor, "*shape"], axis: int
) -> Float[Tensor, "*shape"]:
    """Return M′ dz: the change of the probabilities for a change of the logits.

    Args:
        z: Logits at the end of the path; −∞, or a very negative number, for masked entries.
        z0: Logits at its start, with the same mask.
        dz: The change of the logits.
        axis: The axis that the softmax sums over.
    """
    error, direction = _compute_correction(z, z0, axis)
    return _apply_mean_jacobian(z, z0, dz, axis) + error * (direction * dz).sum(axis, keepdim=True)


def compute_path_softmax_vjp(
    z: Float[Tensor, "*shape"], z0: Float[Tensor, "*shape"], g: Float[Tensor, "*shape"], axis: int
) -> Float[Tensor, "*shape"]:
    """Return M′ᵀ g: the gradient at the logits for a gradient g at the probabilities. Arguments as of the JVP."""
    error, direction = _compute_correction(z, z0, axis)
    return _apply_mean_jacobian(z, z0, g, axis) + direction * (error * g).sum(axis, keepdim=True)


def make_uniform_logits(z: Float[Tensor, "*shape"], axis: int) -> Float[Tensor, "*shape"]:
    """Return logits that give all visible entries the same probability: their mean logit. Masked entries stay."""
    is_visible = z > z.amax(axis, keepdim=True) - MASKED_LOGIT_DISTANCE
    visible_sum = torch.where(is_visible, z, 0.0).sum(axis, keepdim=True)
    return torch.where(is_visible, visible_sum / is_visible.sum(axis, keepdim=True), z)


def _apply_mean_jacobian(z: Tensor, z0: Tensor, v: Tensor, axis: int) -> Tensor:
    """M v; M is symmetric."""
    result = torch.zeros_like(v)
    for alpha, weight in _compute_nodes():
        p = (alpha * z + (1 - alpha) * z0).softmax(axis)  # lerp would make NaN of two −∞
        result = result + weight * p * (v - (p * v).sum(axis, keepdim=True))
    return result


def _compute_correction(z: Tensor, z0: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Δp − M Δz and Δz / ‖Δz‖², which is zero where Δz is zero or masked on both sides."""
    dz = torch.where(torch.isinf(z) & torch.isinf(z0), 0.0, z - z0)
    error = z.softmax(axis) - z0.softmax(axis) - _apply_mean_jacobian(z, z0, dz, axis)
    return error, dz / dz.square().sum(axis, keepdim=True).clamp(min=torch.finfo(dz.dtype).tiny)


def _compute_nodes() -> list[tuple[float, float]]:
    """The nodes of Gauss–Legendre quadrature on [0, 1], each with its weight."""
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    return [((1 + node) / 2, weight / 2) for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True)]
