"""Taking patches or superpixels away from a picture.

What is seen in their place is the picture's `mean`, `black`, or the picture in a `blur`: the same as those that a
baseline has under these names. A picture without superpixels to speak of, such as noise, is cut along a grid.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.adapters.readers.image import pair
from clearhead.errors import InputError, Refusal, unknown
from clearhead.perturbation.hierarchy import Hierarchy, of_places
from clearhead.perturbation.image_fill import black, blurred
from clearhead.perturbation.players import Players, packed, rows_of
from clearhead.units import Units

OF_PICTURES = ("mean", "blur", "black")
#: About how many superpixels a picture is cut into.
SEGMENTS = 50


class InPicture(Players):
    """Patches or superpixels: whose each pixel is, and which patch it lies in."""

    def __init__(self, subject: Any, sample: Sample, units: Units, unit: str, replacement: str) -> None:
        self.subject, self.sample, self.units = subject, sample, units
        if unit not in ("patch", "superpixel"):
            raise unknown("unit", unit, ("patch", "superpixel"))
        if replacement not in OF_PICTURES:
            raise unknown("replacement in a picture", replacement, OF_PICTURES)
        self.unit, self.replacement, self.key = unit, replacement, (replacement, unit)
        self.pixels = sample.inputs["pixel_values"]
        self.patch_of = self._patches()
        self.labels = self._superpixels() if unit == "superpixel" else self._of_patches()
        self.count = int(self.labels.max()) + 1
        self.absent = self._absent()

    @property
    def size(self) -> tuple[int, int]:
        return pair(self.subject.patch_size)

    def _patches(self) -> Int[Tensor, "height width"]:
        """The unit that each pixel lies in; −1 beyond the last whole patch, where the model does not look."""
        assert self.units.grid is not None and self.units.boxes is not None
        (rows, columns), (high, wide) = self.units.grid, self.size
        first = next(i for i, box in enumerate(self.units.boxes) if box is not None)
        cells = first + torch.arange(rows * columns).reshape(rows, columns)
        found = torch.full(self.pixels.shape[1:], -1)
        found[: rows * high, : columns * wide] = cells.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return found

    def _of_patches(self) -> Int[Tensor, "height width"]:
        return torch.where(self.patch_of < 0, -1, self.patch_of - self.patch_of[self.patch_of >= 0].min())

    def _superpixels(self) -> Int[Tensor, "height width"]:
        """SLIC on the pixels that the model sees, whatever their scale."""
        try:
            from skimage.segmentation import slic
        except ImportError:
            raise Refusal(
                "superpixels are cut by scikit-image, which is not installed: pip install 'clearhead[vision]', or take "
                "patches away (unit='patch')"
            ) from None
        shown = self.pixels.detach().cpu().double().numpy()
        low, high = shown.min(), shown.max()
        shown = (shown - low) / max(high - low, 1e-12)
        made = slic(shown, SEGMENTS, start_label=0, channel_axis=0, convert2lab=len(shown) == 3)
        inside = self.patch_of >= 0
        found, labels = torch.unique(torch.as_tensor(made).long()[inside], return_inverse=True)
        if len(found) < SEGMENTS / 2:  # pieces of noise are too small to stay, and SLIC gives them to their neighbours
            self.unit = "grid"
            return self._grid()
        return torch.full(inside.shape, -1).masked_scatter(inside, labels)

    def _grid(self) -> Int[Tensor, "height width"]:
        """About as many rectangles, nearly square, over what the model sees."""
        high, wide = (int((self.patch_of >= 0).any(axis).sum()) for axis in (1, 0))
        rows = min(max(round((SEGMENTS * high / wide) ** 0.5), 1), high)
        columns = min(max(round(SEGMENTS / rows), 1), wide)
        down, across = torch.arange(high) * rows // high, torch.arange(wide) * columns // wide
        found = torch.full(self.patch_of.shape, -1)
        found[:high, :wide] = down[:, None] * columns + across
        return found

    def _absent(self) -> Float[Tensor, "channel height width"]:
        """What is seen where a player is absent."""
        pixels = self.pixels
        if self.replacement == "mean":
            return pixels.double().mean((1, 2), keepdim=True).to(pixels).expand_as(pixels)
        if self.replacement == "blur":
            return blurred(pixels.double()).to(pixels)
        return black(self.subject.processor, pixels)

    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        return packed(keep)

    def lengths(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        return [len(self.units)] * len(keep)

    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        kept = (self.labels < 0) | keep[self.labels.clamp(min=0)]
        pixels = torch.where(kept.to(self.pixels.device), self.pixels, self.absent)
        return replace(self.sample, inputs={**self.sample.inputs, "pixel_values": pixels})

    def spread(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        inside = self.labels >= 0
        labels = self.labels[inside]
        shares = (scores / torch.bincount(labels, minlength=self.count))[labels]
        found = torch.zeros(len(self.units), dtype=scores.dtype)
        return found.index_add_(0, self.patch_of[inside], shares)

    def beside(self, leaves: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        return torch.zeros(len(self.units), dtype=leaves.dtype)  # every leaf is a player

    def _places(self) -> Float[np.ndarray, "player 2"]:
        """The middle of each player."""
        inside = self.labels >= 0
        labels = self.labels[inside]
        sizes = torch.bincount(labels, minlength=self.count)
        places = inside.nonzero().double()
        sums = torch.zeros(self.count, 2, dtype=torch.float64).index_add_(0, labels, places)
        return (sums / sizes[:, None]).numpy()

    def hierarchy(self) -> Hierarchy:
        return of_places(self._places())

    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        if self.unit != "patch":
            raise InputError(f"window={size} is a square of patches; superpixels have no rows: leave out window=")
        assert self.units.grid is not None
        rows, columns = self.units.grid
        high, wide = min(size, rows), min(size, columns)
        cells = np.arange(rows * columns).reshape(rows, columns)
        starts = [(r, c) for r in range(rows - high + 1) for c in range(columns - wide + 1)]
        return rows_of([cells[r : r + high, c : c + wide].flatten().tolist() for r, c in starts], self.count)
