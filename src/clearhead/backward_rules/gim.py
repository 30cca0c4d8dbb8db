"""GIM's rules: modified gradients (`modified_gradient.py`) with a softmax at a higher temperature.

    softmax        p_T ⊙ (g − p_T · g),  p_T = softmax(z / T)
    activation     its own derivative

Where attention is saturated, a softmax has a gradient of almost zero, because other keys would take over what one key
loses (self-repair). At a higher temperature it has not. The sum of input × gradient is not conserved.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backward_rules.base import apply_with_rule
from clearhead.backward_rules.modified_gradient import ModifiedGradientRules


@dataclass(frozen=True)
class GIMRules(ModifiedGradientRules):
    """Halved products, constant denominators of norms, and a softmax with a temperature in the backward pass.

    Attributes:
        temperature: T; at 1 a softmax has its own gradient.
    """

    temperature: float = 2.0

    name = "GIM"

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The ordinary gradient of the function as a whole, which may consist of operations that have rules."""

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            gradient: Tensor
            (gradient,) = torch.func.vjp(apply, x)[1](g)
            return (gradient,)

        return apply_with_rule(apply, rule, x)

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, axis: int, batch_size: int) -> Tensor:
        """g_x = p_T ⊙ (g − p_T · g)."""

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            p = (x / self.temperature).softmax(axis)
            return (p * (g - (p * g).sum(axis, keepdim=True)),)

        return apply_with_rule(apply, rule, x)
