"""Masking of image patches or superpixels.

Masked pixels are replaced by the image's `mean`, by `black` or by a `blur` of the image, as in the baselines of these
names. An image on which SLIC finds few superpixels, such as noise, is divided along a grid.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.adapters.readers.image import to_pair
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.perturbation.hierarchy import Hierarchy, build_spatial_hierarchy
from clearhead.perturbation.image_fill import blur_image, make_black_image
from clearhead.perturbation.players import MaskablePlayers, make_membership_mask, pack_bits
from clearhead.sample import Sample
from clearhead.units import Units

IMAGE_REPLACEMENTS = ("mean", "blur", "black")
#: Approximate number of superpixels of an image.
TARGET_NUM_SUPERPIXELS = 50


class ImagePlayers(MaskablePlayers):
    """The patches or superpixels of an image as players.

    Attributes:
        pixels: The pixel values of the sample.
        patch_of_pixel: The unit that each pixel lies in; −1 outside the patches.
        player_of_pixel: The player that each pixel belongs to; −1 outside the patches.
        replacement_pixels: The pixel values that replace masked ones.

    Args:
        adapter: Adapter of the model.
        sample: The input.
        units: The patches.
        unit: What a player is: "patch" or "superpixel".
        replacement: What replaces masked pixels: "mean", "blur" or "black".

    Raises:
        InputError: If the unit or the replacement is unknown.
    """

    def __init__(self, adapter: Any, sample: Sample, units: Units, unit: str, replacement: str) -> None:
        self.adapter = adapter
        self.sample = sample
        self.units = units
        if unit not in ("patch", "superpixel"):
            raise unknown_value_error("unit", unit, ("patch", "superpixel"))
        if replacement not in IMAGE_REPLACEMENTS:
            raise unknown_value_error("replacement in an image", replacement, IMAGE_REPLACEMENTS)
        self.unit = unit
        self.replacement = replacement
        self.cache_key = (replacement, unit)
        self.pixels = sample.inputs["pixel_values"]
        self.patch_of_pixel = self._assign_pixels_to_patches()
        if unit == "superpixel":
            self.player_of_pixel = self._segment_superpixels()
        else:
            self.player_of_pixel = self._number_patches_from_zero()
        self.num_players = int(self.player_of_pixel.max()) + 1
        self.replacement_pixels = self._make_replacement_pixels()

    def _assign_pixels_to_patches(self) -> Int[Tensor, "height width"]:
        """Return the unit of each pixel; −1 beyond the last complete patch, which the model does not process.

        The cells of a feature map (`patch_size` is None) cover the whole image.
        """
        assert self.units.grid is not None and self.units.boxes is not None
        num_pixels = self.pixels.shape[1:]
        if self.adapter.patch_size is None:
            row, column = (
                torch.arange(size) * count // size for size, count in zip(num_pixels, self.units.grid, strict=True)
            )
        else:
            row, column = (
                torch.arange(size) // patch
                for size, patch in zip(num_pixels, to_pair(self.adapter.patch_size), strict=True)
            )
        rows, columns = self.units.grid
        first = next(i for i, box in enumerate(self.units.boxes) if box is not None)
        is_processed = (row < rows)[:, None] & (column < columns)
        return torch.where(is_processed, first + row[:, None] * columns + column, -1)

    def _number_patches_from_zero(self) -> Int[Tensor, "height width"]:
        """Number the patches as players, from 0; −1 for pixels outside them."""
        is_processed = self.patch_of_pixel >= 0
        return torch.where(~is_processed, -1, self.patch_of_pixel - self.patch_of_pixel[is_processed].min())

    def _segment_superpixels(self) -> Int[Tensor, "height width"]:
        """Segment the model's input pixels by SLIC, after rescaling them to 0 … 1."""
        try:
            from skimage.segmentation import slic
        except ImportError:
            raise UnsupportedError(
                "superpixels need scikit-image, which is not installed: pip install 'clearhead[vision]', or mask "
                "patches (unit='patch')"
            ) from None
        pixels = self.pixels.detach().cpu().double().numpy()
        low = pixels.min()
        high = pixels.max()
        pixels = (pixels - low) / max(high - low, 1e-12)
        segments = slic(pixels, TARGET_NUM_SUPERPIXELS, start_label=0, channel_axis=0, convert2lab=len(pixels) == 3)
        is_processed = self.patch_of_pixel >= 0
        unique_labels, labels = torch.unique(torch.as_tensor(segments).long()[is_processed], return_inverse=True)
        # SLIC merges segments that are too small, as in noise, so that few remain
        if len(unique_labels) < TARGET_NUM_SUPERPIXELS / 2:
            self.unit = "grid"
            return self._segment_grid()
        return torch.full(is_processed.shape, -1).masked_scatter(is_processed, labels)

    def _segment_grid(self) -> Int[Tensor, "height width"]:
        """Divide the processed pixels into about as many nearly square rectangles."""
        height, width = (int((self.patch_of_pixel >= 0).any(axis).sum()) for axis in (1, 0))
        rows = min(max(round((TARGET_NUM_SUPERPIXELS * height / width) ** 0.5), 1), height)
        columns = min(max(round(TARGET_NUM_SUPERPIXELS / rows), 1), width)
        row_of_pixel = torch.arange(height) * rows // height
        column_of_pixel = torch.arange(width) * columns // width
        player_of_pixel = torch.full(self.patch_of_pixel.shape, -1)
        player_of_pixel[:height, :width] = row_of_pixel[:, None] * columns + column_of_pixel
        return player_of_pixel

    def _make_replacement_pixels(self) -> Float[Tensor, "channel height width"]:
        """Create the image that replaces masked pixels."""
        pixels = self.pixels
        if self.replacement == "mean":
            return pixels.double().mean((1, 2), keepdim=True).to(pixels).expand_as(pixels)
        if self.replacement == "blur":
            return blur_image(pixels.double()).to(pixels)
        return make_black_image(self.adapter.processor, pixels)

    def compute_mask_keys(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """Return the coalitions themselves as keys: each masks other pixels."""
        return pack_bits(keep)

    def count_units(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """Return the same number for each coalition: masking removes no patch."""
        return [len(self.units)] * len(keep)

    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample with the pixels of all other players replaced."""
        kept = (self.player_of_pixel < 0) | keep[self.player_of_pixel.clamp(min=0)]
        pixels = torch.where(kept.to(self.pixels.device), self.pixels, self.replacement_pixels)
        return replace(self.sample, inputs={**self.sample.inputs, "pixel_values": pixels})

    def spread_to_units(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """Divide the score of each player among patches in proportion to the pixels that they share."""
        has_player = self.player_of_pixel >= 0
        players = self.player_of_pixel[has_player]
        pixel_scores = (scores / torch.bincount(players, minlength=self.num_players))[players]
        unit_scores = torch.zeros(len(self.units), dtype=scores.dtype)
        return unit_scores.index_add_(0, self.patch_of_pixel[has_player], pixel_scores)

    def add_up_units(self, unit_scores: Float[Tensor, "unit"]) -> Float[Tensor, "player"]:
        """Divide the score of each patch among players in proportion to the pixels that they share."""
        has_player = self.player_of_pixel >= 0
        patches = self.patch_of_pixel[has_player]
        pixel_scores = (unit_scores / torch.bincount(patches, minlength=len(self.units)).clamp(min=1))[patches]
        scores = unit_scores.new_zeros(self.num_players)
        return scores.index_add_(0, self.player_of_pixel[has_player], pixel_scores)

    def spread_fixed_leaves(self, leaf_scores: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """Return zeros: every leaf is a player."""
        return torch.zeros(len(self.units), dtype=leaf_scores.dtype)  # every leaf is a player

    def _compute_centroids(self) -> Float[np.ndarray, "player 2"]:
        """Return the centre of each player in pixels."""
        has_player = self.player_of_pixel >= 0
        players = self.player_of_pixel[has_player]
        sizes = torch.bincount(players, minlength=self.num_players)
        positions = has_player.nonzero().double()
        sums = torch.zeros(self.num_players, 2, dtype=torch.float64).index_add_(0, players, positions)
        return (sums / sizes[:, None]).numpy()

    def build_hierarchy(self) -> Hierarchy:
        """Halve the image along its longer side, by the centres of the players."""
        return build_spatial_hierarchy(self._compute_centroids())

    def make_windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Return all squares of `size` × `size` patches."""
        if self.unit != "patch":
            raise InputError(f"window={size} is a square of patches; superpixels have no rows: leave out window=")
        assert self.units.grid is not None
        rows, columns = self.units.grid
        height = min(size, rows)
        width = min(size, columns)
        patches = np.arange(rows * columns).reshape(rows, columns)
        starts = [(r, c) for r in range(rows - height + 1) for c in range(columns - width + 1)]
        windows = [patches[r : r + height, c : c + width].flatten().tolist() for r, c in starts]
        return make_membership_mask(windows, self.num_players)
