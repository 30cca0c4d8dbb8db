"""GradCAM on attention: heads weighted by the mean of their gradient, averaged, then clamped.

    w_h = mean of ∂y/∂A_h over the whole map,     r = w · (E_h[w_h A_h])⁺

The last layer by default; over several layers their mean. The clamp comes after the mean over heads (Generic
Attention and its kin clamp before it). Where streams look at each other, each map is weighted by itself.

With `scaled` each map is brought to 0…1 before a row of it is read, as authors do for BERT and VisualBERT: scores then
depend on rows that do not speak for the target, and are NaN where nothing of the map is left by the clamp.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import AcrossFold, Fold, Frame, Scores, across, of_authors, register
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
    scaled: bool = of_authors(False)

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        cam = activation_map(call, self.frame, self.frame, self.scaled)
        return (self.frame.readout @ cam)[:, None] / len(self.frame.layers)


@across("attention-gradcam")
class AttentionGradCAMAcross(AcrossFold):
    scaled: bool = of_authors(False)

    def begin(self) -> None:
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    def visit(self, call: Call) -> None:
        looks, seen = self.frames[call.query_stream], self.frames[call.key_stream]
        count = len(self.layers[looks.stream, seen.stream])
        cam = activation_map(call, looks, seen, self.scaled)
        self.rows[seen.stream] = self.rows[seen.stream] + looks.readout @ cam / count

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}


def activation_map(call: Call, looks: Frame, seen: Frame, scaled: bool = False) -> Float[Tensor, "batch query key"]:
    """(E_h[w_h A_h])⁺, with w_h the mean gradient over the cells that are not padding."""
    assert call.attention is not None and call.attention_gradient is not None
    # Padded rows carry no gradient, but padded columns do: attention that is held at zero can still be wished for.
    valid = seen.valid.to(call.attention.dtype)
    cells = looks.valid.sum(-1) * valid.sum(-1)
    weight = (call.attention_gradient @ valid[:, None, :, None]).sum((2, 3)) / cells[:, None]
    cam = (weight[:, :, None, None] * call.attention).mean(1).clamp_(min=0)
    if not scaled:
        return cam
    outside = ~(looks.valid[:, :, None] & seen.valid[:, None])
    least, most = (cam.masked_fill(outside, end).flatten(1) for end in (torch.inf, -torch.inf))
    low, high = least.amin(1)[:, None, None], most.amax(1)[:, None, None]
    return ((cam - low) / (high - low)).masked_fill(outside, 0)
