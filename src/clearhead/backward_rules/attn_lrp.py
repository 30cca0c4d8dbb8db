"""AttnLRP as modified gradients: relevance is input × gradient, and the gradient is ordinary but for

    activation f       f(z) / z
    product of two     halved, for each of the two
    norms              what divides is a constant

so that Σ input × gradient stays the same through every operation but the softmax, whose first-order expansion has a
constant part, as biases have.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backward_rules.base import Family, NoRule, ruled

TINY = 1e-9


@dataclass(frozen=True)
class AttnLRP(Family):
    name = "AttnLRP"
    # Mixtures of experts pick and put together; the experts themselves are linear maps.
    ordinary = frozenset(("topk", "max", "index_add", "index_add_", "grouped_mm", "_grouped_mm"))

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        return apply(x)

    def convolution(
        self, apply: Callable[[Tensor], Tensor], map: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        return apply(x)

    def add(self, a: Tensor, b: Tensor, size: int, in_place: bool = False) -> Tensor:
        return a.add_(b) if in_place else a + b

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        return apply(_halved(a), _halved(b))

    def map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return apply(x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        return apply(x)

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            at_zero = apply(x.new_zeros(1))
        if at_zero.item() != 0:  # f(z)/z has no bounds
            raise NoRule(f"the operator {_name(apply)}, which is not zero at zero, has no rule in {self.name}")

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            z = torch.where(x.abs() < TINY, TINY, x)  # f(z)/z at zero: the slope there, of an f that is zero at zero
            return (g * apply(z) / z,)

        return ruled(apply, rule, x)

    def norm(
        self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, axes: int, eps: float, centred: bool
    ) -> Tensor:
        over = tuple(range(-axes, 0))

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            centre = x.mean(over, keepdim=True) if centred else 0
            scale = torch.rsqrt((x - centre).square().mean(over, keepdim=True) + eps)
            g = (g if weight is None else g * weight) * scale
            return (g - g.mean(over, keepdim=True) if centred else g,)

        return ruled(apply, rule, x)

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
        return apply(x)


def _halved(x: Tensor) -> Tensor:
    return ruled(lambda x: x.clone(), lambda g, x: (g / 2,), x)


def _name(apply: Callable[[Tensor], Tensor]) -> str:
    """Of an operation, or of the module whose forward pass it is."""
    owner = getattr(apply, "__self__", None)
    return apply.__name__ if owner is None else type(owner).__name__
