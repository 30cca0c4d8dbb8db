"""Rules that relevance as input × gradient has in common: the gradient is ordinary except for

    activation f       f(z) / z
    product of two     halved, for each factor
    norms              the denominator is a constant

so that Σ input × gradient is conserved by each of these operations. Rule sets add what happens at a softmax
(`attn_lrp.py`, `cp_lrp.py`, `libragrad.py`, `gim.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.backward_rules.base import MissingRuleError, RuleSet, apply_with_rule

ZERO_INPUT_EPS = 1e-9


class ModifiedGradientRules(RuleSet):
    """Base class of rule sets whose relevance is input × gradient; a subclass has a name and a rule for softmaxes."""

    # Mixtures of experts select and combine experts with these; the experts themselves are linear maps.
    unmodified_ops = frozenset(("topk", "max", "index_add", "index_add_", "grouped_mm", "_grouped_mm"))

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        """Ordinary gradient g W: Σ x ⊙ g is conserved, except for the share of the bias."""
        return apply(x)

    def convolution(
        self, apply: Callable[[Tensor], Tensor], convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        """Ordinary gradient, as of `linear`."""
        return apply(x)

    def add(self, a: Tensor, b: Tensor, batch_size: int, in_place: bool = False) -> Tensor:
        """Ordinary gradient: a ⊙ g and b ⊙ g add up to the relevance (a + b) ⊙ g."""
        return a.add_(b) if in_place else a + b

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        """Half the ordinary gradient for each factor, so that Σ a ⊙ g_a + Σ b ⊙ g_b is conserved."""
        return apply(_halve_gradient(a), _halve_gradient(b))

    def linear_map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Ordinary gradient, with which Σ x ⊙ g is conserved."""
        return apply(x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Ordinary gradient, factor ⊙ g."""
        return apply(x)

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """g_x = g ⊙ f(x) / x, so that x ⊙ g_x = f(x) ⊙ g; no rule if f(0) ≠ 0: unbounded."""
        with torch.no_grad():
            at_zero = apply(x.new_zeros(1))
        if at_zero.item() != 0:  # f(z)/z is unbounded
            raise MissingRuleError(
                f"the operator {_get_operation_name(apply)}, whose value at zero is not zero, has no rule in "
                f"{self.name}"
            )

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            # f(z)/z tends to the derivative at zero, since f(0) = 0.
            z = torch.where(x.abs() < ZERO_INPUT_EPS, ZERO_INPUT_EPS, x)
            return (g * apply(z) / z,)

        rule.is_activation = True  # type: ignore[attr-defined]
        return apply_with_rule(apply, rule, x)

    def norm(
        self,
        apply: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor | None,
        num_axes: int,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        """g_x = g ⊙ weight / σ with σ as a constant, minus its mean if the norm is centred."""
        axes = tuple(range(-num_axes, 0))

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            if is_centred:
                x = x - x.mean(axes, keepdim=True)
            scale = torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
            if weight is not None:
                g = g * weight
            g = g * scale
            if is_centred:
                g = g - g.mean(axes, keepdim=True)
            return (g,)

        return apply_with_rule(apply, rule, x)


def _halve_gradient(x: Tensor) -> Tensor:
    """Copy x; the backward pass halves the gradient."""
    return apply_with_rule(lambda x: x.clone(), lambda g, x: (g / 2,), x)


def _get_operation_name(apply: Callable[[Tensor], Tensor]) -> str:
    """The name of an operation, or of the module if the operation is its forward method."""
    module = getattr(apply, "__self__", None)
    if module is None:
        return apply.__name__
    return type(module).__name__
