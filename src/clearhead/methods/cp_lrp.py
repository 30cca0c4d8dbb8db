"""CP-LRP: conservative propagation, in which relevance passes attention through the values only.

    r_i = Σ_k x_ik · g_ik          x_i: a token's word embedding, or the pixels of a patch

g is the gradient with four changes (`backward_rules/cp_lrp.py`): attention is a constant; gates of gated units are
constants; activation functions have the factor f(z)/z; the denominator of norms is treated as a constant. Relevance is
conserved except for what biases, positions and other constants absorb.

The authors change attention and norms only; the rules of activations and gates are those of LXT's CP-LRP. Without gated
units `libragrad` has the same scores.
"""

from clearhead.backward_rules.cp_lrp import CPLRPRules
from clearhead.methods._modified_backward import LRP_PATENT_NOTE, ModifiedGradientMethod
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "cp-lrp",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=1, backward=1, note="with propagation rules"),
    citation="Ali et al. (2022), XAI for transformers: better explanations through conservative propagation, ICML",
    signed=True,
    target="any",
    measures="how much of the target each unit contributed through values, with attention and gates as they are",
    misleads="units that steer attention get nothing for it, as the key of a look-up",
    linear_in_target=True,
    note=LRP_PATENT_NOTE,
)
class CPLRP(ModifiedGradientMethod):
    """Input × gradient under the rules of CP-LRP."""

    @property
    def rule_set(self) -> CPLRPRules:
        """The modified gradients of `backward_rules/cp_lrp.py`."""
        return CPLRPRules()
