"""LibraGrad: input × gradient, with backward paths pruned and scaled so that the scores add up.

    r_i = Σ_k x_ik · g_ik          x_i: a token's word embedding, or the pixels of a patch

g is the gradient with four changes (`backward_rules/libragrad.py`): attention is a constant, so that queries and keys
get nothing; activation functions have the factor f(z)/z; gated units give half of the gradient to each factor; the
denominator of norms is treated as a constant. The model is then linear around its input, and the sum of the scores is
the target, except for what biases, positions and other constants add: exactly the target in a Llama.

The paper balances several gradient methods in this way. This is input × gradient; FullGrad+, which also attributes
biases, is not included. Without gated units `cp-lrp` has the same scores.
"""

from clearhead.backward_rules.libragrad import LibraGradRules
from clearhead.methods._modified_backward import ModifiedGradientMethod
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "libragrad",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=1, backward=1, note="with propagation rules"),
    citation="Mehri, Soleymani Baghshah & Pilehvar (2025), LibraGrad: balancing gradient flow for universally better "
    "vision transformer attributions, CVPR",
    signed=True,
    target="any",
    measures="how much of the target each unit contributed through values, with attention as it is",
    misleads="units that steer attention get nothing for it, as the key of a look-up",
    linear_in_target=True,
)
class LibraGrad(ModifiedGradientMethod):
    """Input × gradient under the rules of LibraGrad."""

    @property
    def rule_set(self) -> LibraGradRules:
        """The modified gradients of `backward_rules/libragrad.py`."""
        return LibraGradRules()
