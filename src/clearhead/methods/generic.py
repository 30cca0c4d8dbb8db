"""Generic Attention (self-attention): relevance gathered layer by layer from attention times its gradient.

    Ā_l = E_h[(∂y/∂A_l ⊙ A_l)⁺],     R ← R + Ā_l R  from R = I,     r = w · (R − I)

The read-out row alone is pushed, from the last layer to the first: r ← r + r Ā_l. What each layer adds is kept, so the
scores are the sum of the layers' and heads' shares, and the identity is never added (subtracting it afterwards would
lose what lies below float32's 1e-7).
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, push, register
from clearhead.recording.tape import Call


@register(
    "generic",
    family="relevance",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="Chefer, Gur & Wolf (2021), Generic attention-model explainability for interpreting bi-modal and "
    "encoder-decoder transformers, ICCV",
    signed=False,
    target="any",
    has=("layers", "heads", "rows"),
    parts="contributions",
)
class Generic(Fold):
    def begin(self) -> None:
        self.rows = self.frame.readout

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        added = push(self.rows, call.positive)
        self.rows = self.rows + added.sum(1)
        return added
