"""GradCAM on attention: heads weighted by the mean of their gradient, averaged, then clamped.

    w_h = mean of ∂y/∂A_h over the whole map,     r = w · (E_h[w_h A_h])⁺

The last layer by default; over several layers their mean. The clamp comes after the mean over heads (Generic
Attention and its kin clamp before it). Where streams look at each other, each map is weighted by itself.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold, Fold, Frame, Scores, across, register
from clearhead.recording.tape import Call, Tape


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
        cam = activation_map(call, self.frame, self.frame)
        return (self.frame.readout @ cam)[:, None] / len(self.frame.layers)


@across("attention-gradcam")
class AttentionGradCAMAcross(AcrossFold):
    def begin(self) -> None:
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    def visit(self, call: Call) -> None:
        looks, seen = self.frames[call.query_stream], self.frames[call.key_stream]
        count = len(self.layers[looks.stream, seen.stream])
        self.rows[seen.stream] = self.rows[seen.stream] + looks.readout @ activation_map(call, looks, seen) / count

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}


def activation_map(call: Call, looks: Frame, seen: Frame) -> Float[Tensor, "batch query key"]:
    """(E_h[w_h A_h])⁺, with w_h the mean gradient over the cells that are not padding."""
    assert call.attention is not None and call.attention_gradient is not None
    # Padded rows carry no gradient, but padded columns do: attention that is held at zero can still be wished for.
    valid = seen.valid.to(call.attention.dtype)
    cells = looks.valid.sum(-1) * valid.sum(-1)
    weight = (call.attention_gradient @ valid[:, None, :, None]).sum((2, 3)) / cells[:, None]
    return (weight[:, :, None, None] * call.attention).mean(1).clamp_(min=0)
