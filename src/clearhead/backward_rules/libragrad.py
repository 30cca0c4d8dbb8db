"""LibraGrad's rules: modified gradients (`modified_gradient.py`) with constant attention.

    softmax        constant: nothing reaches queries and keys
    gated unit     halved, for the gate and for what it multiplies

Attention is then linear in its values, so the gradient through them is not halved. Every operation is locally linear:
Σ input × gradient is the target, except for what biases, positions and other constants add.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from clearhead.backward_rules.modified_gradient import ModifiedGradientRules


@dataclass(frozen=True)
class LibraGradRules(ModifiedGradientRules):
    """Constant attention, halved gates, f(z)/z for activations, and constant denominators of norms."""

    name = "LibraGrad"

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, axis: int, batch_size: int) -> Tensor:
        """A constant."""
        return apply(x.detach())
