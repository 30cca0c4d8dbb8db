"""GIM (Edin et al. 2025): (x − x′) ⊙ gradient of a reimplemented model, in which

the denominators of norms are constant, a softmax is differentiated as that of z/T, and the gradient is halved at each
factor of a product: a quarter for queries and keys, half for values, gates and what they multiply. Activations have
their own derivative."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tests.replicas import attn_lrp


class Layers(attn_lrp.Layers):
    def __init__(self, model: Any, temperature: float = 2.0) -> None:
        super().__init__(model)
        self.temperature = temperature

    def activate(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        return f(z)

    def softmax(self, x: Tensor) -> Tensor:
        """Each entry of the Jacobian is p_i (δ_ij − p_j), with p at z/T."""
        p = (x.detach() / self.temperature).exp()
        p = p / p.sum()
        jacobian = torch.zeros(len(x), len(x), dtype=x.dtype)
        for i in range(len(x)):
            for j in range(len(x)):
                jacobian[i, j] = p[i] * (float(i == j) - p[j])
        linear = jacobian @ x
        return linear + (x.softmax(-1) - linear).detach()


def scores(
    layers: attn_lrp.Layers, forward: attn_lrp.Forward, vectors: Tensor, baseline: Tensor, label: int
) -> Float[np.ndarray, "*unit"]:
    """Σ_k (x_ik − x′_ik) g_ik over the embedding of a token; for an image, of each pixel."""
    leaf = vectors.detach().double().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(forward(layers, leaf)[label], leaf)
    products = ((leaf - baseline) * gradient).detach().numpy()
    return products.sum(-1) if products.ndim == 2 else products
