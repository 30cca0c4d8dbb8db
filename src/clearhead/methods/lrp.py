"""Layer-wise relevance propagation from the target to the input.

    r_i = Σ_k R_ik          R: the relevance of a token's embedding, or of the pixels of a patch

`rules` is the rule set (`backward_rules/lrp.py`): "ours" conserves relevance, so that the scores of a text sum to one,
the relevance of the target; with "orig", as in published comparisons, relevance doubles at each linear layer. With
`positions` the position embeddings take their part of the relevance, which then belongs to no unit, as in the authors'
code for ViT; without it all relevance goes to the token. The relevance of a class token belongs to no pixel. Targets
whose relevance starts with a sum of zero (a contrast, a probability, log-odds) are refused by rules that conserve sums:
all scores would be zero.
"""

from typing import Literal

from clearhead.backward_rules.lrp import LRPRules
from clearhead.capture.tape import Tape
from clearhead.methods._modified_backward import LRP_PATENT_NOTE, ModifiedBackwardMethod
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "lrp",
    pass_type=PassType.MODIFIED_BACKWARD,
    family="relevance",
    requires=("input_gradient",),
    cost=Cost(forward=1, backward=1, note="with propagation rules, in float64"),
    citation="Bach et al. (2015), On pixel-wise explanations for non-linear classifier decisions by layer-wise "
    "relevance propagation, PLoS ONE; on transformers as in Chefer, Gur & Wolf (2021), CVPR",
    signed=True,
    target="any",
    measures="how much each unit contributed to the target, by rules that conserve the sum",
    misleads="keys and queries receive no relevance, and the initial relevance must be positive",
    axioms=("conserves relevance",),
    note=LRP_PATENT_NOTE,
    rounding_amplification=1e4,
)
class LRP(ModifiedBackwardMethod):
    """Relevance propagated to the inputs.

    Attributes:
        rules: The rule set: "ours" conserves relevance, "orig" is that of published comparisons.
        positions: Whether position embeddings take a part of the relevance.
        mask: Whether a mask is added to attention even if no token is masked, as in the authors' code for BERT.
    """

    rules: Literal["ours", "orig"] = "ours"
    positions: bool = False
    mask: bool = compat_option(False)

    @property
    def rule_set(self) -> LRPRules:
        """The rules of the options; `positions` and `mask` select the constants that take relevance."""
        return LRPRules(self.rules, self.positions, self.mask)

    @property
    def linear_in_target(self) -> bool:
        """True for the rules of "orig"."""
        return self.rules == "orig"  # "ours" scales the branches of a sum by the relevance of each

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r_i = Σ_k R_ik over the features of each unit's input vector."""
        assert tape.input_gradient is not None
        return MethodScores(tape.input_gradient[self.unit_context.stream].sum(-1)[:, None])
