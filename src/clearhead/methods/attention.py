"""Raw attention: what the read-out row looks at, as is.

    r = w · E_h A_l          w: the read-out

The last layer by default; over several layers their mean.
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, push, register
from clearhead.recording.tape import Call


@register(
    "attention",
    family="attention",
    asks=("attention",),
    cost="one forward",
    citation="Bahdanau, Cho & Bengio (2015), Neural machine translation by jointly learning to align and translate",
    signed=False,
    target="none",
    layers=(-1, None),
    has=("layers", "heads", "rows"),
    parts="contributions",
    axioms=("rows sum to one",),
)
class Attention(Fold):
    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.attention is not None
        return push(self.frame.readout, call.attention) / len(self.frame.layers)
