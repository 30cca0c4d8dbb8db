"""AttnLRP: input × gradient, with a backward pass modified so that relevance is conserved.

    r_i = Σ_k x_ik · g_ik          x_i: a token's word embedding, or the pixels of a patch

g is the gradient with three changes (`backward_rules/attn_lrp.py`): activation functions have the factor f(z)/z,
products of two activations, such as attention and gated units, give half of the gradient to each factor, and the
denominator of norms is treated as a constant. Relevance is conserved except for what biases, positions and the constant
part of the softmax absorb.
"""

from clearhead.backward_rules.attn_lrp import AttnLRPRules
from clearhead.capture.tape import Tape
from clearhead.methods._modified_backward import LRP_PATENT_NOTE, ModifiedBackwardMethod
from clearhead.methods.base import MethodScores, register_method
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
    linear_in_target=True,
    note=LRP_PATENT_NOTE,
)
class AttnLRP(ModifiedBackwardMethod):
    """Input × gradient under the rules of AttnLRP."""

    @property
    def rule_set(self) -> AttnLRPRules:
        """The modified gradients of `backward_rules/attn_lrp.py`; they have no options."""
        return AttnLRPRules()

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r_i = Σ_k x_ik · g_ik with the modified gradient g."""
        assert tape.inputs is not None and tape.input_gradient is not None
        stream = self.unit_context.stream
        return MethodScores((tape.inputs[stream] * tape.input_gradient[stream]).sum(-1)[:, None])
