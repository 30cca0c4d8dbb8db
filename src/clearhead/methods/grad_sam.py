"""Grad-SAM: attention where raising it would raise the target.

    H_lh = A_lh ⊙ (∂y/∂A_lh)⁺,     r_i = 1/(L·M·N) Σ_l Σ_h Σ_j H_lh[i, j]

The sum runs over the keys of token i's own row, as the formula has it: how token i attends to others. With
`received=True` it runs over the queries of its column: how others attend to token i. N counts special tokens.
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, register
from clearhead.recording.tape import Call


@register(
    "grad-sam",
    family="relevance",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="Barkan et al. (2021), Grad-SAM: explaining transformers via gradient self-attention maps, CIKM",
    signed=False,
    target="any",
    has=("layers", "heads"),
    parts="contributions",
)
class GradSAM(Fold):
    received: bool = False

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        # A is never negative, so A ⊙ G⁺ = (A ⊙ G)⁺, which other methods share.
        total = call.positive.sum(2 if self.received else 3)[:, :, None]
        cells = len(self.frame.layers) * total.shape[1] * self.frame.lengths.to(total.dtype)
        return total / cells[:, None, None, None]
