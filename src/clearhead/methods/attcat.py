"""AttCAT: CAT weighted, in each layer, by the attention that the token gets.

    a^l_i = E_h of the attention that token i receives,     AttCAT_i = Σ_l a^l_i · CAT^l_i

`weights="received"` averages the attention over all queries (sentence classification); `weights="row"` takes the
read-out row alone (the authors' variant for a masked word). Where an answer has a start and an end, the scores of the
two are added; with `absolute` their absolute values are, as authors do for SQuAD 2, and layers have no shares.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call, Tape
from clearhead.methods.base import Fold, Scores, of_authors, register
from clearhead.methods.cat import features_x_gradient


@register(
    "attcat",
    family="relevance",
    asks=("attention", "block_input", "block_input_gradient"),
    cost="one forward and one backward",
    citation="Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation tokens, NeurIPS",
    signed=True,
    target="any",
    linear_in_target=True,
    has=("layers", "heads"),
    parts="contributions",
)
class AttCAT(Fold):
    sweeps: ClassVar[int] = 1
    weights: Literal["received", "row"] = "received"
    absolute: bool = of_authors(False)

    @property
    def linear_in_target(self) -> bool:
        return not self.absolute

    @property
    def reads_the_readout(self) -> bool:
        return self.weights == "row"

    def begin(self) -> None:
        every = self.frame.valid[:, None].to(self.frame.readout.dtype)
        self.looking = every / every.sum(-1, keepdim=True) if self.weights == "received" else self.frame.readout

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("attention", self.looking)

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        return total * features_x_gradient(call)[:, None, None]

    def finish(self, tape: Tape) -> Scores:
        found = super().finish(tape)
        return replace(found, scores=found.scores.abs(), per_layer=None, per_head=None) if self.absolute else found
