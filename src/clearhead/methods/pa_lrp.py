"""PA-LRP: AttnLRP whose inputs are pairs of a token and its positions, so that positions get their share of relevance.

    r_i = Σ_k x_ik · g_ik + Σ_l Σ_k P^l_ik · g^l_ik

x_i is a token's word embedding, or the pixels of a patch; P_i are its position embeddings: one that is added to the
input, or the cosines and sines that rotate queries and keys in each layer l. g is the gradient under the rules of
AttnLRP (`attn-lrp`). An added position embedding gets its share of the sum. A rotation is a product, which gives half
of its relevance to the cosines and sines and half to the queries and keys. Without biases, the scores and what
softmaxes keep add up to the target, also in models with positions.

`e.components` has both terms, "token" and "position". Models without positions of these kinds (biases of relative
positions), and those with several inputs, are refused. `softmax="gradient"` is the published Jacobian, as in
`attn-lrp`. The authors' code for Llama adds up absolute values of the relevance of positions instead.
"""

from clearhead.backward_rules.attn_lrp import SoftmaxForm
from clearhead.backward_rules.pa_lrp import PALRPRules
from clearhead.capture.tape import Tape
from clearhead.methods._modified_backward import LRP_PATENT_NOTE, ModifiedGradientMethod
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "pa-lrp",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("inputs", "input_gradient", "position_x_gradient"),
    cost=Cost(forward=1, backward=1, note="with propagation rules"),
    citation="Bakish et al. (2025), Revisiting LRP: positional attribution as the missing ingredient for transformer "
    "explainability, NeurIPS",
    signed=True,
    target="any",
    measures="how much of the target each unit contributed, by what it is and by where it is",
    misleads="a unit may get its score for its position alone: look at e.components",
    linear_in_target=True,
    note=LRP_PATENT_NOTE,
)
class PALRP(ModifiedGradientMethod):
    """Input × gradient plus position × gradient under the rules of AttnLRP.

    Attributes:
        softmax: The Jacobian of softmaxes: "path" averages it between equal attention and the attention of the model;
            "gradient" is that of the model's attention, as published.
    """

    softmax: SoftmaxForm = compat_option("path")

    @property
    def rule_set(self) -> PALRPRules:
        """The modified gradients of `backward_rules/pa_lrp.py`."""
        return PALRPRules(self.softmax)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Add the relevance of the positions of each unit to that of its input vector."""
        assert tape.position_x_gradient is not None
        token_scores = super().compute_scores(tape).scores
        position_scores = tape.position_x_gradient[:, None].to(token_scores)
        return MethodScores(
            token_scores + position_scores,
            components={"token": token_scores[:, 0], "position": position_scores[:, 0]},
        )
