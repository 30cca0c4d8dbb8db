"""AttnLRP as modified gradients (`modified_gradient.py`).

    softmax        its Jacobian, averaged between equal logits and the logits z (`path_softmax.py`)

Every operation conserves Σ input × gradient except the softmax, which keeps what equal attention to all visible keys
would give. With the Jacobian at z alone, as published, it keeps the constant term of its first-order expansion: almost
everything where attention is saturated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from clearhead.backward_rules.base import apply_with_rule
from clearhead.backward_rules.modified_gradient import ModifiedGradientRules
from clearhead.backward_rules.path_softmax import compute_path_softmax_vjp, make_uniform_logits

SoftmaxForm = Literal["path", "gradient"]


@dataclass(frozen=True)
class AttnLRPRules(ModifiedGradientRules):
    """AttnLRP's rules, in their formulation as modified gradients.

    Attributes:
        softmax_form: The Jacobian of softmaxes: "path" averages it between equal logits and z; "gradient", as
            published, is that at z.
    """

    softmax_form: SoftmaxForm = "path"

    name = "AttnLRP"

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, axis: int, batch_size: int) -> Tensor:
        """g_x = M′ᵀ g, so that Σ (x − x₀) ⊙ g_x = (p − p₀) · g with equal p₀; or the ordinary gradient."""
        if self.softmax_form == "gradient":
            return apply(x)

        def rule(g: Tensor, x: Tensor) -> tuple[Tensor]:
            return (compute_path_softmax_vjp(x, make_uniform_logits(x, axis), g, axis),)

        return apply_with_rule(apply, rule, x)
