"""GradCAM on attention: heads weighted by the mean of their gradient, averaged, then clamped.

    w_h = mean of ∂y/∂A_h over the whole map,     r = w · (E_h[w_h A_h])⁺

The last layer by default; over several layers their mean. The clamp comes after the mean over heads (Generic
Attention and its kin clamp before it). Where streams look at each other, each map is weighted by itself.

With `region="row"` a head's weight is the mean gradient of what is read alone, at units that are not special:
r = (E_h[w_h w·A_h])⁺ with w_h = mean of w·∂y/∂A_h, as authors do for ViT and CLIP. With `scaled` each map is brought
to 0…1 before a row of it is read, as authors do for BERT and VisualBERT: scores then depend on rows that do not speak
for the target, and are NaN where nothing of the map is left by the clamp. With `by_query` each row has one weight for
all heads, and a unit's score is the mean of its row: the wrong axis, as in authors' code for averaged patches.
"""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Call, Tape
from clearhead.errors import InputError
from clearhead.methods.attention import looks_of
from clearhead.methods.base import AcrossFold, Fold, Frame, Scores, across, of_authors, register


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
    region: Literal["map", "row"] = of_authors("map")
    scaled: bool = of_authors(False)
    by_query: bool = of_authors(False)

    sweeps: ClassVar[int] = 2
    reads_hidden: ClassVar[bool] = True

    @property
    def needs_whole(self) -> bool:
        return self.by_query or self.scaled or self.region == "row"

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Tensor:
        """First what w_h is the mean of, then the rows that are read."""
        if known is None:
            return wishes(call, self.frame)
        return self.frame.readout[:, :, queries] @ activation(call, known, self.frame, self.frame)

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch 1 row unit"]:
        return total[:, None] / len(self.frame.layers)

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"] | None:
        if not self.needs_whole:
            return super().visit(call)
        if self.by_query:
            assert call.attention is not None and call.attention_gradient is not None
            weight = looks_of(call.attention_gradient, self.frame).mean(1)
            rows = (weight * looks_of(call.attention, self.frame).mean(1)).clamp(min=0)[:, None]
        else:
            rows = activated_rows(call, self.frame, self.frame, self.region, self.scaled)
        return rows[:, None] / len(self.frame.layers)


@across("attention-gradcam")
class AttentionGradCAMAcross(AcrossFold):
    sweeps: ClassVar[int] = 2
    reads_hidden: ClassVar[bool] = True
    region: Literal["map", "row"] = of_authors("map")
    scaled: bool = of_authors(False)
    by_query: bool = of_authors(False)

    def begin(self) -> None:
        if self.by_query:
            raise InputError("by_query=True is for models of one stream, and here streams look at each other")
        self.rows = {stream: torch.zeros_like(frame.readout) for stream, frame in self.frames.items()}

    @property
    def needs_whole(self) -> bool:
        return self.scaled or self.region == "row"

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Tensor:
        """First what w_h is the mean of, then the rows that are read."""
        looks, seen = self.frames[call.query_stream], self.frames[call.key_stream]
        if known is None:
            return wishes(call, seen)
        return looks.readout[:, :, queries] @ activation(call, known, looks, seen)

    def joined(self, call: Call, total: Tensor) -> None:
        looks, seen = call.query_stream, call.key_stream
        self.rows[seen] = self.rows[seen] + total / len(self.layers[looks, seen])

    def visit(self, call: Call) -> None:
        if not self.needs_whole:
            super().visit(call)
            return
        looks, seen = self.frames[call.query_stream], self.frames[call.key_stream]
        self.joined(call, activated_rows(call, looks, seen, self.region, self.scaled))

    def finish(self, tape: Tape) -> dict[str, Scores]:
        return {stream: Scores(rows) for stream, rows in self.rows.items()}


def activated_rows(
    call: Call, looks: Frame, seen: Frame, region: Literal["map", "row"], scaled: bool
) -> Float[Tensor, "batch row key"]:
    if region == "map":
        return looks.readout @ activation_map(call, looks, seen, scaled)
    assert call.attention is not None and call.attention_gradient is not None
    read, inside = looks.readout[:, None], seen.words.to(call.attention.dtype)
    weight = (read @ call.attention_gradient) @ inside[:, None, :, None] / inside.sum(-1)[:, None, None, None]
    return (weight * (read @ call.attention)).mean(1).clamp_(min=0)


def activation_map(call: Call, looks: Frame, seen: Frame, scaled: bool = False) -> Float[Tensor, "batch query key"]:
    """(E_h[w_h A_h])⁺, with w_h the mean gradient over the cells that are not padding."""
    cam = activation(call, wishes(call, seen), looks, seen)
    if not scaled:
        return cam
    outside = ~(looks.valid[:, :, None] & seen.valid[:, None])
    least, most = (cam.masked_fill(outside, end).flatten(1) for end in (torch.inf, -torch.inf))
    low, high = least.amin(1)[:, None, None], most.amax(1)[:, None, None]
    return ((cam - low) / (high - low)).masked_fill(outside, 0)


def wishes(call: Call, seen: Frame) -> Float[Tensor, "batch head"]:
    """The gradient of each head, summed over cells that are not padding."""
    assert call.attention_gradient is not None
    # Padded rows carry no gradient, but padded columns do: attention that is held at zero can still be wished for.
    valid = seen.valid.to(call.attention_gradient.dtype)
    return (call.attention_gradient @ valid[:, None, :, None]).sum((2, 3))


def activation(
    call: Call, wished: Float[Tensor, "batch head"], looks: Frame, seen: Frame
) -> Float[Tensor, "batch query key"]:
    assert call.attention is not None
    cells = looks.valid.sum(-1) * seen.valid.sum(-1)
    weight = wished / cells[:, None]
    return (weight[:, :, None, None] * call.attention).mean(1).clamp_(min=0)
