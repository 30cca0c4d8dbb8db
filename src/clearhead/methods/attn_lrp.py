"""AttnLRP: input × gradient, with a backward pass modified so that relevance is conserved.

    r_i = Σ_k x_ik · g_ik          x_i: a token's word embedding, or the pixels of a patch

g is the gradient with four changes (`backward_rules/attn_lrp.py`): activation functions have the factor f(z)/z,
products of two activations, such as attention and gated units, give half of the gradient to each factor, the
denominator of norms is treated as a constant, and the Jacobian of a softmax is averaged along the path from equal
attention to that of the model (`backward_rules/path_softmax.py`). Relevance is conserved except for what biases,
positions and equal attention absorb.

The published method has the Jacobian of the softmax itself, `softmax="gradient"` (profile `lxt`): it vanishes where
attention is almost 0 or 1, so that queries and keys get nothing there, although they decided what is attended to.
"""

from clearhead.backward_rules.attn_lrp import AttnLRPRules, SoftmaxForm
from clearhead.methods._modified_backward import LRP_PATENT_NOTE, ModifiedGradientMethod
from clearhead.methods.base import compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "attn-lrp",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=1, backward=1, note="with propagation rules"),
    citation="Achtibat et al. (2024), AttnLRP: attention-aware layer-wise relevance propagation for transformers, ICML",
    signed=True,
    target="any",
    measures="how much each unit contributed to the target, propagated backwards operation by operation",
    misleads="scores of units that only direct attention, such as the words of a question, can cancel out",
    linear_in_target=True,
    note=LRP_PATENT_NOTE,
)
class AttnLRP(ModifiedGradientMethod):
    """Input × gradient under the rules of AttnLRP.

    Attributes:
        softmax: The Jacobian of softmaxes: "path" averages it between equal attention and the attention of the model;
            "gradient" is that of the model's attention, as published.
    """

    softmax: SoftmaxForm = compat_option("path")

    @property
    def rule_set(self) -> AttnLRPRules:
        """The modified gradients of `backward_rules/attn_lrp.py`."""
        return AttnLRPRules(self.softmax)
