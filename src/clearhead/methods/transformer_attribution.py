"""Transformer Attribution: relevance of attention times its gradient, gathered layer by layer.

    Ā_l = E_h[(∂y/∂A_l ⊙ P_l)⁺],     R = (I + Ā_{L-1}) ⋯ (I + Ā_s),     r = w · (R − I)

P_l is the relevance of A_l by the authors' rules of relevance propagation (`rules/relevance.py`). The read-out row
alone is pushed, from the last layer to the first, and what each layer adds is kept: r ← r + r Ā_l. With `normalise`
each row of I + Ā_l is divided by its sum, as in the authors' code for BERT, and r = w · R: what is left of w is in the
scores, and in the share of the first layer.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Scores, of_authors, push, register
from clearhead.methods.under_rules import PATENTS, UnderRules
from clearhead.recording.tape import Call, Tape
from clearhead.rules.relevance import Relevance


@register(
    "transformer-attribution",
    kind="rules",
    family="relevance",
    asks=("attention_gradient",),
    cost="two forward and two backward, one of them under rules",
    citation="Chefer, Gur & Wolf (2021), Transformer interpretability beyond attention visualization, CVPR",
    signed=False,
    target="any",
    has=("layers", "heads", "rows"),
    parts="contributions",
    note=PATENTS,
    amplifies=1e4,
)
class TransformerAttribution(UnderRules):
    normalise: bool = False
    rules: Literal["ours", "orig"] = "ours"
    mask: bool = of_authors(False)

    beside = True

    @property
    def family(self) -> Relevance:
        return Relevance(self.rules, mask=self.mask)

    def begin(self) -> None:
        self.rows = self.own = self.frame.readout

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.relevance is not None and call.attention_gradient is not None
        relevance = (call.attention_gradient * call.relevance).clamp_(min=0)
        if self.normalise:
            self._divide(1 + relevance.mean(1).sum(-1))
        added = push(self.rows, relevance)
        self.rows = self.rows + added.sum(1)
        return added

    def _divide(self, sums: Float[Tensor, "batch unit"]) -> None:
        """All that was gathered so far goes through the rows of this layer, too."""
        self.rows, self.own = self.rows / sums[:, None], self.own / sums[:, None]
        self.parts = [part / sums[:, None, None] for part in self.parts]

    def finish(self, tape: Tape) -> Scores:
        if self.normalise:
            self.parts[-1] = self.parts[-1] + self.own[:, None] / self.parts[-1].shape[1]
        return super().finish(tape)
