"""PA-LRP (Bakish et al. 2025): AttnLRP whose inputs are pairs of a token and its positions.

A position embedding that is added to a token takes its share of the sum. The cosines and sines of rotary embeddings are
factors of products, each of which gives half of its relevance to either factor."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tests.replicas import attn_lrp


class Layers(attn_lrp.Layers):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.positions: list[Tensor] = []

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self._keep(positions)

    def rotate(self, x: Tensor, theta: float) -> Tensor:
        cos, sin = map(self._keep, attn_lrp.rotary_factors(len(x), x.shape[-1], theta))
        halve = attn_lrp.halve_gradient
        return halve(x) * halve(cos) + halve(attn_lrp.rotate_half(x)) * halve(sin)

    def _keep(self, positions: Tensor) -> Tensor:
        self.positions.append(positions.detach().double().clone().requires_grad_())
        return self.positions[-1]


class PublishedLayers(Layers):
    """With the softmax's own Jacobian."""

    path = False


def scores(model: Any, forward: attn_lrp.Forward, vectors: Tensor, label: int) -> Float[np.ndarray, "unit"]:
    """The relevance of each token and of its position."""
    return sum(relevance(Layers(model), forward, vectors, label))


def relevance(
    layers: Layers, forward: attn_lrp.Forward, vectors: Tensor, label: int
) -> tuple[Float[np.ndarray, "*unit"], Float[np.ndarray, "position"]]:
    """Return x ⊙ g of the input, summed over each embedding, and the relevance of each position, over all layers."""
    leaf = vectors.detach().double().clone().requires_grad_()
    y = forward(layers, leaf)[label]
    gradients = torch.autograd.grad(y, [leaf, *layers.positions])
    products = (leaf * gradients[0]).detach()
    by_position = sum(
        (positions * gradient).detach().flatten(1).sum(1)
        for positions, gradient in zip(layers.positions, gradients[1:], strict=True)
    )
    assert isinstance(by_position, Tensor)
    return (products.sum(-1) if products.dim() == 2 else products).numpy(), by_position.numpy()
