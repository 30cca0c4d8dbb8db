"""The gradient of attention: where looking more would raise the target.

    r = w · E_h[∂y/∂A_l]          w: the read-out

The last layer by default; over several layers their mean. A baseline of AttCAT's authors (“Grads”).
"""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Call
from clearhead.methods.base import Fold, push, register


@register(
    "attention-gradient",
    family="attention",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="Barkan et al. (2021), CIKM; as a baseline in Qiang et al. (2022), AttCAT, NeurIPS",
    signed=True,
    target="any",
    linear_in_target=True,
    layers=(-1, None),
    has=("layers", "heads", "rows"),
    parts="contributions",
)
class AttentionGradient(Fold):
    sweeps: ClassVar[int] = 1
    reads_hidden: ClassVar[bool] = True

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Float[Tensor, "batch head row unit"]:
        assert call.attention_gradient is not None
        # Attention that padding is held at can be wished for, too, but padding has no score.
        kept = self.frame.valid[:, None, None].to(call.attention_gradient.dtype)
        return push(self.frame.readout[:, :, queries], call.attention_gradient) * kept / len(self.frame.layers)
