"""GIM: Gradient Interaction Modifications, with a gradient that does not vanish where attention is saturated.

    r_i = Σ_k (x_ik − x′_ik) · g_ik          x_i: a token's word embedding, or the pixels of a patch; x′: a baseline

g is the gradient with three changes (`backward_rules/gim.py`): a softmax is differentiated as that of z / T, the
denominators of norms are treated as constants, and products of two activations give half of the gradient to each
factor. So queries and keys get a quarter each, and values and both factors of a gated unit a half each.

With T = 1 the softmax has its own gradient. The scores do not add up to the target. The baseline is the default one of
path methods; `baseline="zero"` gives input × gradient. The authors' package has the embedding of a blank.
"""

import math

from clearhead.backward_rules.gim import GIMRules
from clearhead.errors import InputError
from clearhead.methods._modified_backward import BaselineDifferenceMethod
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType

#: At lower temperatures softmaxes are step functions, whose gradient is rounding errors.
MIN_TEMPERATURE = 0.1


@register_method(
    "gim",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=1, backward=1, note="with propagation rules"),
    citation="Edin et al. (2025), GIM: improved interpretability for large language models, arXiv:2505.17630",
    signed=True,
    target="any",
    measures="first-order share of each unit in the target, with attention less saturated than it is",
    misleads="the scores do not add up, and the temperature decides how much queries and keys get",
    linear_in_target=True,
)
class GIM(BaselineDifferenceMethod):
    """Difference from a baseline times the gradient under the rules of GIM.

    Attributes:
        baseline: The baseline x′ by name; None for the default of the model.
        temperature: T, the temperature of softmaxes in the backward pass.
    """

    baseline: str | None = None
    temperature: float = 2.0

    def setup(self) -> None:
        """Check the temperature."""
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InputError(
                f"temperature={self.temperature} is not valid: use a number of at least {MIN_TEMPERATURE}, such as 2.0"
            )

    @property
    def rule_set(self) -> GIMRules:
        """The modified gradients of `backward_rules/gim.py`."""
        return GIMRules(self.temperature)
