"""Layer-wise relevance propagation from the target to the input.

    r_i = Σ_k R_ik          R: the relevance of a token's embedding, or of the pixels of a patch

`rules` is the family of rules (`backward_rules/lrp.py`): "ours", which conserves relevance, so that the scores of a
text add up to one, what the target starts with; or "orig", as in published comparisons, where it doubles at each linear
map. With `positions` the positions that are added to embeddings take their share, which then belongs to no unit, as in
the authors' code for ViT; without, a token's share is its own. What a class token is given is no pixel's. What starts
with a sum of zero (a contrast, a probability, log-odds) is refused by rules that keep sums: nothing of it would arrive.
"""

from typing import Literal

from clearhead.backward_rules.lrp import Relevance
from clearhead.capture.tape import Tape
from clearhead.methods._modified_backward import PATENTS, UnderRules
from clearhead.methods.base import Scores, of_authors, register


@register(
    "lrp",
    kind="rules",
    family="relevance",
    asks=("input_gradient",),
    cost="one forward and one backward, under rules, in float64",
    citation="Bach et al. (2015), On pixel-wise explanations for non-linear classifier decisions by layer-wise "
    "relevance propagation, PLoS ONE; on transformers as in Chefer, Gur & Wolf (2021), CVPR",
    signed=True,
    target="any",
    axioms=("conserves relevance",),
    note=PATENTS,
    amplifies=1e4,
)
class LRP(UnderRules):
    rules: Literal["ours", "orig"] = "ours"
    positions: bool = False
    mask: bool = of_authors(False)

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, self.positions, self.mask)

    @property
    def linear_in_target(self) -> bool:
        return self.rules == "orig"  # "ours" scales the branches of a sum by how much relevance each gets

    def finish(self, tape: Tape) -> Scores:
        assert tape.input_gradient is not None
        return Scores(tape.input_gradient[self.frame.stream].sum(-1)[:, None])
