"""GradCAM on attention: heads weighted by the mean of their gradient, averaged, then clamped.

    w_h = mean of ∂y/∂A_h over the whole map,     r = w · (E_h[w_h A_h])⁺

The last layer by default; over several layers their mean. The clamp comes after the mean over heads (Generic
Attention and its kin clamp before it).
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold, register
from clearhead.recording.tape import Call


@register(
    "attention-gradcam",
    family="attention",
    asks=("attention", "attention_gradient"),
    cost="one forward and one backward",
    citation="Selvaraju et al. (2017), Grad-CAM, ICCV; on attention as in Chefer, Gur & Wolf (2021), CVPR",
    signed=False,
    target="any",
    layers=(-1, None),
    has=("layers", "heads", "rows"),
    parts="contributions",
    head_shares=False,  # the clamp comes after the mean over heads
)
class AttentionGradCAM(Fold):
    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        assert call.attention is not None and call.attention_gradient is not None
        # Padded rows carry no gradient, but padded columns do: attention that is held at zero can still be wished for.
        valid = self.frame.valid.to(call.attention.dtype)
        cells = valid.sum(-1) ** 2
        weight = (call.attention_gradient @ valid[:, None, :, None]).sum((2, 3)) / cells[:, None]
        cam = (weight[:, :, None, None] * call.attention).mean(1).clamp_(min=0)
        return (self.frame.readout @ cam)[:, None] / len(self.frame.layers)
