"""The softmax's Jacobian, averaged along a straight path of logits, so that saturated attention keeps its relevance.

    M = Σ_k w_k [diag(p_k) − p_k p_kᵀ] ≈ ∫₀¹ J(z₀ + α Δz) dα,   p_k = softmax(z₀ + α_k Δz),   Δz = z − z₀
    M′ = M + (Δp − M Δz) Δzᵀ / ‖Δz‖²

α_k and w_k are the nodes and weights of Gauss–Legendre quadrature. Where a softmax is saturated, its Jacobian J(z)
vanishes, and with it everything that reaches the output through queries and keys. M does not vanish, because it also
sees the logits between z₀ and z. The integral maps Δz to Δp exactly; the term of rank one makes the same true of M′.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

#: Nodes of the quadrature. Known evidence is found nearly as well with three.
NUM_NODES = 8
#: Shorter paths are corrected less: quadrature is exact there, and rounding errors of Δp are divided by ‖Δz‖.
MIN_CORRECTED_DISTANCE = 0.01
#: An entry whose logit is this far below the largest is masked: models add −10,000 or less to what is not visible.
MASKED_LOGIT_DISTANCE = 5_000


def compute_path_softmax_vjp(
    z: Float[Tensor, "*shape"], z0: Float[Tensor, "*shape"], g: Float[Tensor, "*shape"], axis: int
) -> Float[Tensor, "*shape"]:
    """Return M′ᵀ g: the gradient at the logits for a gradient g at the probabilities.

    Args:
        z: Logits at the end of the path; −∞, or a very negative number, for masked entries.
        z0: Logits at its start, with the same mask.
        g: Gradient at the probabilities.
        axis: The axis that the softmax sums over.
    """
    dz = torch.where(torch.isinf(z) & torch.isinf(z0), 0.0, z - z0)
    mean_jacobian_g, mean_jacobian_dz = _apply_mean_jacobian(z, z0, axis, g, dz)
    error = z.softmax(axis) - z0.softmax(axis) - mean_jacobian_dz
    squared_length = dz.square().sum(axis, keepdim=True).clamp(min=MIN_CORRECTED_DISTANCE**2)
    return mean_jacobian_g + dz / squared_length * (error * g).sum(axis, keepdim=True)


class PathSoftmaxFunction(torch.autograd.Function):
    """Connects a change of the logits to the probabilities: its gradient is M′ᵀ g.

    The result is zero, because DeepLIFT needs the gradient alone. Only z and z₀ are kept for the backward pass, not the
    probabilities of all nodes.
    """

    @staticmethod
    def forward(ctx: Any, dz: Tensor, z: Tensor, z0: Tensor, axis: int) -> Tensor:
        """Return zeros in the shape of dz."""
        ctx.save_for_backward(z, z0)
        ctx.axis = axis
        return torch.zeros_like(dz)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return M′ᵀ g."""
        z, z0 = ctx.saved_tensors
        return compute_path_softmax_vjp(z, z0, gradient[0], ctx.axis), None, None, None


def make_uniform_logits(z: Float[Tensor, "*shape"], axis: int) -> Float[Tensor, "*shape"]:
    """Return logits that give all visible entries the same probability: their mean logit. Masked entries stay."""
    is_visible = z > z.amax(axis, keepdim=True) - MASKED_LOGIT_DISTANCE
    visible_sum = torch.where(is_visible, z, 0.0).sum(axis, keepdim=True)
    return torch.where(is_visible, visible_sum / is_visible.sum(axis, keepdim=True), z)


def _apply_mean_jacobian(z: Tensor, z0: Tensor, axis: int, *vectors: Tensor) -> list[Tensor]:
    """M v for each vector v; M is symmetric."""
    products = [torch.zeros_like(v) for v in vectors]
    for alpha, weight in _compute_nodes():
        p = (alpha * z + (1 - alpha) * z0).softmax(axis)  # lerp would make NaN of two −∞
        for product, v in zip(products, vectors, strict=True):
            product += weight * p * (v - (p * v).sum(axis, keepdim=True))
    return products


def _compute_nodes() -> list[tuple[float, float]]:
    """The nodes of Gauss–Legendre quadrature on [0, 1], each with its weight."""
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    return [((1 + node) / 2, weight / 2) for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True)]
