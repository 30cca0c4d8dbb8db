"""Grad-SAM: attention where raising it would raise the target.

    H_lh = A_lh ⊙ (∂y/∂A_lh)⁺,     r_i = 1/(L·M·N) Σ_l Σ_h Σ_j H_lh[i, j]

The sum runs over the keys of token i's own row, as the formula has it: how token i attends to others. With
`received=True` it runs over the queries of its column: how others attend to token i. N counts special tokens.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call
from clearhead.methods.base import Fold, register


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
    sweeps: ClassVar[int] = 1
    received: bool = False

    def wanted_sum(self, call: Call) -> Reduce:
        # A is never negative, so A ⊙ G⁺ = (A ⊙ G)⁺, which other methods share.
        every = torch.ones_like(self.frame.readout[:, :1])
        return Reduce("positive", every if self.received else None)

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch head row unit"]:
        lengths = self.frame.lengths.to(total.dtype)[:, None, None, None]
        if self.received:  # pushed rows are divided by the number of heads
            return total / (len(self.frame.layers) * lengths)
        return total[:, :, None] / (len(self.frame.layers) * total.shape[1] * lengths)
