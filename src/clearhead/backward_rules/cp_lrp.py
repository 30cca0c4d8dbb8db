"""CP-LRP's rules: modified gradients (`modified_gradient.py`) with constant attention and constant gates.

    softmax        constant: nothing reaches queries and keys
    gated unit     the gate f(z) is constant: all relevance goes to what it multiplies

Ali et al. change attention and norms only; the rules of activations and gates are those of LXT's CP-LRP. Without gated
units the rules are LibraGrad's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from clearhead.backward_rules.base import BackwardRule
from clearhead.backward_rules.libragrad import LibraGradRules


@dataclass(frozen=True)
class CPLRPRules(LibraGradRules):
    """Constant attention and gates, f(z)/z for activations, and constant denominators of norms."""

    name = "CP-LRP"

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        """The ordinary gradient for the factor that is not a gate; half for each if both are, or neither."""
        if _is_activation_output(a) == _is_activation_output(b):
            return super().product(apply, a, b)
        return apply(a.detach(), b) if _is_activation_output(a) else apply(a, b.detach())


def _is_activation_output(x: Tensor) -> bool:
    """Whether a tensor is the direct output of an activation function."""
    rule: BackwardRule | None = getattr(x.grad_fn, "rule", None)
    return getattr(rule, "is_activation", False)
