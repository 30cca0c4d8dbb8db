"""LibraGrad (Mehri et al. 2025): input × gradient, with balanced gradients:

queries and keys are pruned (constant attention), an activation z ⊙ s(z) is linear in z with s constant, denominators
of norms are constant, and the gradient through a gated unit is halved."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tests.replicas import attn_lrp


class Layers(attn_lrp.Layers):
    def softmax(self, x: Tensor) -> Tensor:
        return x.softmax(-1).detach()

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b  # the weights a are constant

    def gate(self, f: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        product = self.activate(f, gate) * up
        return product / 2 + product.detach() / 2


def scores(model: Any, forward: attn_lrp.Forward, vectors: Tensor, label: int) -> Float[np.ndarray, "*unit"]:
    """Σ_k x_ik g_ik over the embedding of a token; for an image, x ⊙ g of each pixel."""
    return attn_lrp.scores(model, forward, vectors, label, Layers(model))
