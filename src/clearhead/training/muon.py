"""Muon: an optimiser that orthogonalises momentum updates, for the weight matrices of a Transformer.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Matrices of the same shape are stacked, so that a step
is a few batched products instead of hundreds of small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def orthogonalise(
    matrices: Float[Tensor, "n rows columns"], num_iterations: int = 5
) -> Float[Tensor, "n rows columns"]:
    """Move all singular values close to one by a quintic Newton–Schulz iteration, in bfloat16.

    Args:
        matrices: A stack of matrices.
        num_iterations: Number of iterations.

    Returns:
        The orthogonalised matrices.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # coefficients of the quintic polynomial
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if is_tall:
        x = x.mT
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon optimiser for two-dimensional weights. Use AdamW for all other parameters.

    Args:
        params: Matrices to train.
        lr: Learning rate.
        momentum: Weight of the past in the running average of gradients.
        weight_decay: Fraction of a weight, times the learning rate, that is subtracted per step.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients.

        Args:
            closure: Not supported; part of torch's interface.
        """
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                directions = torch.stack(
                    [self._compute_momentum_update(weight, group["momentum"]) for weight in weights]
                )
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(orthogonalise(directions)), alpha=-group["lr"] * scale)

    def _compute_momentum_update(self, weight: Tensor, momentum: float) -> Tensor:
        """Update the running average of the gradient, and return Nesterov's momentum."""
        state = self.state[weight]
        if "average" not in state:
            state["average"] = torch.zeros_like(weight)
        assert weight.grad is not None
        average = state["average"].lerp_(weight.grad, 1.0 - momentum)
        return weight.grad.lerp(average, momentum)
