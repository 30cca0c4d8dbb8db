"""How units are removed from one stream of an input: words, regions of a picture, pixels.

Texts: `delete` (what is left moves together), `mask` and `pad` (that token instead), `attention` (hidden from
attention, its place kept), `pad+attention` (both). Regions: `delete`, `attention`, `mean` (of all regions' features).
Pictures: `black`, `grey` (127 of 255), `mean` (of the picture), `centre` (zero after normalisation), `blur`, and
`inpaint` (each pixel the weighted mean of its neighbours, so that the hole has no edge and no colour of its own).
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.adapters.base import Sample, Subject
from clearhead.errors import InputError, unknown
from clearhead.perturbation.multi_stream import InPicture
from clearhead.units import Axis, Units

OF_TEXTS = ("delete", "mask", "pad", "attention", "pad+attention")
OF_REGIONS = ("delete", "attention", "mean")
OF_PICTURES = ("black", "grey", "mean", "centre", "blur", "inpaint")


class Removal(ABC):
    """One stream of one input, and what stands where its units were."""

    @abstractmethod
    def without(self, removed: Bool[np.ndarray, "item"]) -> Sample:
        """The input without these units (of a picture: without these pixels, row by row)."""

    def bare(self, removed: Bool[np.ndarray, "item"]) -> bool:
        """Whether nothing is left by which this input could be told from others of its size."""
        return False


def removal(subject: Subject, sample: Sample, units: Units, fill: str) -> Removal:
    """How units of this stream are removed."""
    if units.grid is not None:
        return FromPicture(subject, sample, units, fill)
    if units.kind == "region" and any(name in sample.inputs for name in FromRegions.ALONG):
        return FromRegions(sample, units, fill)
    return FromText(subject, sample, units, fill)


class FromText(Removal):
    """Tokens of a text, of the source of an encoder–decoder, or of a prompt."""

    def __init__(self, subject: Any, sample: Sample, units: Units, fill: str) -> None:
        self.sample, self.units = sample, units
        self.ids = "decoder_input_ids" if units.stream == "prefix" else "input_ids"
        if self.ids not in sample.inputs or len(sample.inputs[self.ids]) < len(units):
            raise InputError(
                f"the units of {units.stream!r} are no tokens of {subject.model_class}: none can be removed"
            )
        if fill not in OF_TEXTS:
            raise unknown("fill of a text", fill, OF_TEXTS)
        kinds = [part for part in fill.split("+") if part in ("mask", "pad")]
        self.token = None if not kinds else _token(subject, kinds[0])
        self.hides, self.deletes = "attention" in fill, fill == "delete"
        if self.deletes and (sample.masks or (type(sample) is not Sample and units.stream != "source")):
            raise InputError("fill='delete' would move the words that the target is about: choose 'mask' or 'pad'")

    @property
    def _beside(self) -> list[str]:
        """The inputs that lie along these tokens."""
        names = (
            (self.ids,)
            if self.ids != "input_ids"
            else ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        )
        length = len(self.sample.inputs[self.ids])
        return [name for name in names if name in self.sample.inputs and len(self.sample.inputs[name]) == length]

    def without(self, removed: Bool[np.ndarray, "unit"]) -> Sample:
        inputs = dict(self.sample.inputs)
        ids = inputs[self.ids]
        gone = torch.zeros(len(ids), dtype=torch.bool)
        gone[: len(removed)] = torch.as_tensor(removed)
        if self.deletes:
            return self._shorter(gone)
        if self.token is not None:
            inputs[self.ids] = ids.masked_fill(gone, self.token)
        if self.hides:
            name = "decoder_attention_mask" if self.ids != "input_ids" else "attention_mask"
            inputs[name] = inputs.get(name, torch.ones_like(ids)).masked_fill(gone, 0)
        return replace(self.sample, inputs=inputs)

    def bare(self, removed: Bool[np.ndarray, "unit"]) -> bool:
        alone = set(self._beside) == set(self.sample.inputs) and (self.deletes or self.token is not None)
        return bool(alone and np.all(removed | np.asarray(self.units.special)))

    def _shorter(self, gone: Bool[Tensor, "unit"]) -> Sample:
        left = (~gone).nonzero().flatten()
        inputs = dict(self.sample.inputs)
        for name in self._beside:
            part = inputs[name]
            inputs[name] = part[: len(left)] if name == "position_ids" else part[left]
        return replace(self.sample, inputs=inputs, axes=_shortened(self.sample, self.units, left))


def _shortened(sample: Sample, units: Units, left: Int[Tensor, "unit"]) -> dict[str, Axis]:
    """The axes of a sample of whose stream these units are left; what shares a sequence with it moves up."""
    some = _some(units, left.tolist())
    return {
        name: Axis.of(*(some if part.stream == units.stream else part for part in axis.parts))
        if any(part.stream == units.stream for part in axis.parts)
        else axis
        for name, axis in sample.axes.items()
    }


def _token(subject: Any, kind: str) -> int:
    words = getattr(subject, "words", None) or getattr(subject, "reader", None)
    words = getattr(words, "words", words)
    known = None if words is None or not hasattr(words, "token_id") else words.token_id(kind)
    if known is None:
        tokenizer = getattr(subject.processor, "tokenizer", subject.processor)
        known = getattr(tokenizer, f"{kind}_token_id", None)
    if known is None and kind == "pad":
        known = getattr(subject.model.config, "pad_token_id", None)
    if known is None:
        raise InputError(f"fill={kind!r}, but {subject.model_class} has no such token: choose another of {OF_TEXTS}")
    return int(known)


def _some(units: Units, left: list[int]) -> Units:
    def those(part: Any) -> Any:
        return None if part is None else tuple(part[i] for i in left)

    return replace(
        units,
        names=those(units.names),
        special=those(units.special),
        segments=those(units.segments),
        offsets=those(units.offsets),
        boxes=those(units.boxes),
    )


class FromRegions(Removal):
    """Regions of a picture that came as features and boxes."""

    #: What lies along the regions, features first: LXMERT's and VisualBERT's.
    ALONG = ("visual_feats", "visual_embeds", "visual_pos", "visual_attention_mask", "visual_token_type_ids")

    def __init__(self, sample: Sample, units: Units, fill: str) -> None:
        if fill not in OF_REGIONS:
            raise unknown("fill of regions", fill, OF_REGIONS)
        self.sample, self.units, self.fill = sample, units, fill
        self.along = [name for name in self.ALONG if name in sample.inputs]

    def without(self, removed: Bool[np.ndarray, "unit"]) -> Sample:
        inputs, gone = dict(self.sample.inputs), torch.as_tensor(removed)
        if self.fill == "attention":
            ones = inputs.get("visual_attention_mask", torch.ones(len(gone)))
            return replace(self.sample, inputs={**inputs, "visual_attention_mask": ones.masked_fill(gone, 0)})
        if self.fill == "mean":
            features = inputs[self.along[0]]
            mean = features.double().mean(0).to(features)
            inputs[self.along[0]] = torch.where(gone[:, None], mean, features)
            return replace(self.sample, inputs=inputs)
        left = (~gone).nonzero().flatten()
        if not len(left):  # a model cannot look at nothing: one region that attention does not see
            hidden = {name: inputs[name][:1] for name in self.along}
            hidden["visual_attention_mask"] = torch.zeros_like(inputs.get("visual_attention_mask", torch.ones(1))[:1])
            left = left.new_zeros(1)
            inputs |= hidden
        else:
            inputs |= {name: inputs[name][left] for name in self.along}
        return replace(self.sample, inputs=inputs, axes=_shortened(self.sample, self.units, left))


class FromPicture(Removal):
    """Pixels, each by itself."""

    def __init__(self, subject: Any, sample: Sample, units: Units, fill: str) -> None:
        if fill not in OF_PICTURES:
            raise unknown("fill of a picture", fill, OF_PICTURES)
        self.sample, self.fill = sample, fill
        self.pixels = sample.inputs["pixel_values"]
        # of a model with several streams, what reads its pictures
        subject = subject.readers.get(units.stream, (subject, ""))[0]
        like = fill if fill in ("black", "blur") else "mean"
        players = InPicture(subject, sample, units, "patch", "black" if fill == "grey" else like)
        self.patch_of = players.patch_of.numpy()
        self.absent = players.absent
        if fill == "grey":
            self.absent = self.absent + 127 / 255 / _std(subject, self.pixels)
        elif fill == "centre":
            self.absent = torch.zeros_like(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        return (self.pixels.shape[1], self.pixels.shape[2])

    def without(self, removed: Bool[np.ndarray, "pixel"]) -> Sample:
        gone = removed.reshape(self.size)
        if self.fill == "inpaint":
            pixels = torch.as_tensor(inpainted(self.pixels.double().numpy(), gone)).to(self.pixels)
        else:
            pixels = torch.where(torch.as_tensor(gone), self.absent, self.pixels)
        return replace(self.sample, inputs={**self.sample.inputs, "pixel_values": pixels})

    def bare(self, removed: Bool[np.ndarray, "pixel"]) -> bool:
        return self.fill in ("black", "grey", "centre") and bool(removed.all())


def _std(subject: Any, pixels: Float[Tensor, "channel height width"]) -> Float[Tensor, "channel 1 1"]:
    std = getattr(subject.processor, "image_std", None) if getattr(subject.processor, "do_normalize", True) else None
    return torch.ones(len(pixels), 1, 1) if std is None else torch.tensor(std)[:, None, None].to(pixels)


#: How much a pixel's neighbours count: those beside it twice as much as those across a corner.
_NEIGHBOURS = {(down, right): (2.0 if 0 in (down, right) else 1.0) for down in (-1, 0, 1) for right in (-1, 0, 1)}
del _NEIGHBOURS[0, 0]


def inpainted(
    pixels: Float[np.ndarray, "channel height width"], gone: Bool[np.ndarray, "height width"]
) -> Float[np.ndarray, "channel height width"]:
    """Each missing pixel the weighted mean of its neighbours, missing ones included: one linear system for all.

    Where all are missing there is nothing to go by: the picture's mean.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve

    if not gone.any():
        return pixels
    if gone.all():
        return np.broadcast_to(pixels.mean((1, 2), keepdims=True), pixels.shape).copy()
    high, wide = gone.shape
    number = np.full(gone.shape, -1)
    number[gone] = np.arange(gone.sum())
    rows, columns = np.nonzero(gone)
    unknown_count = len(rows)
    total = np.zeros(unknown_count)
    known = np.zeros((unknown_count, len(pixels)))
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for (down, right), weight in _NEIGHBOURS.items():
        r, c = rows + down, columns + right
        inside = (r >= 0) & (r < high) & (c >= 0) & (c < wide)
        own, r, c = np.flatnonzero(inside), r[inside], c[inside]
        total[own] += weight
        missing = number[r, c] >= 0
        entries.append((own[missing], number[r, c][missing], np.full(missing.sum(), -weight)))
        known[own[~missing]] += weight * pixels[:, r[~missing], c[~missing]].T
    entries.append((np.arange(unknown_count), np.arange(unknown_count), total))
    i, j, v = (np.concatenate(part) for part in zip(*entries, strict=True))
    system = coo_array((v, (i, j)), shape=(unknown_count, unknown_count)).tocsc()
    filled = pixels.copy()
    filled[:, rows, columns] = spsolve(system, known).reshape(unknown_count, len(pixels)).T
    return filled
