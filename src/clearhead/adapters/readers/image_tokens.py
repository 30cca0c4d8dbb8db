"""How a picture stands in a text: the tokens that hold its place, and the part of the picture that each stands for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.adapters.readers.image import as_seen, in_patches, pair
from clearhead.errors import InputError, Refusal
from clearhead.units import Units, patches

#: How many patches, each way, one token stands for, where a projector merges them; elsewhere one.
_MERGED: dict[str, Any] = {
    "gemma3": lambda config: _side(config.vision_config) // int(config.mm_tokens_per_image**0.5),
    "internvl": lambda config: round(1 / config.downsample_ratio),
    **dict.fromkeys(("mistral3", "lighton_ocr"), lambda config: config.spatial_merge_size),
    "idefics3": lambda config: config.scale_factor,
    "smolvlm": lambda config: config.scale_factor,
    "aya_vision": lambda config: config.downsample_factor,
    "cohere2_vision": lambda config: config.downsample_factor,
}


def _side(vision: Any) -> int:
    return vision.image_size // vision.patch_size


class Layout(ABC):
    """How one picture of each sample is given to a model, and where its placeholders lie in the picture."""

    #: The model's inputs that belong to the picture.
    inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)
    #: Why the place of each token in the picture is not known; None where it is.
    nowhere: ClassVar[str | None] = None
    #: Whether the model takes a picture that is zero everywhere for padding, and leaves it out.
    zero_is_padding: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config, self.vision = config, config.vision_config

    @property
    def channels(self) -> int:
        return int(getattr(self.vision, "num_channels", getattr(self.vision, "in_channels", 3)))

    def split(self, given: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        """The inputs of each sample, one picture each."""
        sizes = {name: len(part) for name, part in given.items()}
        if set(sizes.values()) != {count}:
            raise InputError(
                f"there must be one picture for each of {count} texts, but the model inputs have {sizes} (tiles of a "
                "picture are several: turn crop_to_patches or do_image_splitting of the image processor off)"
            )
        return [{name: part[i] for name, part in given.items()} for i in range(count)]

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The pictures of several samples, as the model takes them."""
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    @abstractmethod
    def units(self, given: Mapping[str, Tensor], count: int) -> Units:
        """The units that `count` placeholders stand for, made sure of."""

    @abstractmethod
    def seen(self, given: Mapping[str, Tensor], processor: Any) -> UInt8[np.ndarray, "height width 3"] | None:
        """The picture as the model saw it."""

    @abstractmethod
    def cells(self, pixels: Tensor, units: Units, batch: int) -> Float[Tensor, "batch unit feature"]:
        """The pixels of each unit."""

    @abstractmethod
    def example(self) -> tuple[dict[str, Tensor], int]:
        """The inputs of any small picture, and how many placeholders it has."""


class OnePicture(Layout):
    """Pixels as a picture; its patches, or squares of merged ones, row by row."""

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    @property
    def cell(self) -> tuple[int, int]:
        """The pixels that one placeholder stands for."""
        high, wide = pair(self.vision.patch_size)
        merged = _MERGED.get(self.config.model_type, lambda config: 1)(self.config)
        return high * merged, wide * merged

    @property
    def any_size(self) -> bool:
        return self.vision.model_type == "pixtral"

    def picture(self, given: Mapping[str, Tensor]) -> Float[Tensor, "channel height width"]:
        pixels = given["pixel_values"]
        if pixels.dim() != 3 or len(pixels) != self.channels or not pixels.is_floating_point():
            shape = f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(f"pixel_values must be batch × {self.channels} × height × width, not batch × {shape}")
        if not self.any_size:
            expected, found = pair(self.vision.image_size), tuple(pixels.shape[1:])
            if expected != found:
                raise InputError(f"the model takes pictures of {expected} pixels, not {found}")
            return pixels
        if "image_sizes" not in given:
            raise InputError("model inputs need image_sizes: pictures may be of any size, and be padded")
        high, wide = (int(size) for size in given["image_sizes"])
        return pixels[:, :high, :wide]

    def units(self, given: Mapping[str, Tensor], count: int) -> Units:
        picture, (high, wide) = self.picture(given), self.cell
        grid = (picture.shape[1] // high, picture.shape[2] // wide)
        # A tower's class token may stand before the patches, where the model does not select patches alone.
        before = ["[CLS]"] if count == prod(grid) + 1 and self.keeps_class_token else []
        if count != prod(grid) + len(before):
            raise InputError(
                f"the picture has {grid[0]} × {grid[1]} patches, but the text has {count} placeholders for them: one "
                "whole picture must stand in it (not in tiles, and without newlines)"
            )
        return patches(grid, before)

    @property
    def keeps_class_token(self) -> bool:
        return getattr(self.config, "vision_feature_select_strategy", "") == "full"

    def seen(self, given: Mapping[str, Tensor], processor: Any) -> UInt8[np.ndarray, "height width 3"] | None:
        return as_seen(self.picture(given), processor)

    def cells(self, pixels: Tensor, units: Units, batch: int) -> Float[Tensor, "batch unit feature"]:
        return in_patches(pixels, units, self.cell)

    def example(self) -> tuple[dict[str, Tensor], int]:
        size = pair([2 * side for side in self.cell] if self.any_size else self.vision.image_size)
        shape = (1, self.channels, *size)
        given = {"pixel_values": torch.linspace(-3, 3, prod(shape)).sin().reshape(shape)}
        if self.any_size:
            given["image_sizes"] = torch.tensor([size])
        return given, prod(side // cell for side, cell in zip(size, self.cell, strict=True)) + self._before()

    def _before(self) -> int:
        return int(self.keeps_class_token and "clip" in self.vision.model_type)


class OneTile(OnePicture):
    """Pixels as pictures or tiles of one, of which there must be one."""

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")
    zero_is_padding = True

    def picture(self, given: Mapping[str, Tensor]) -> Float[Tensor, "channel height width"]:
        tiles = given["pixel_values"]
        if tiles.dim() != 4 or len(tiles) != 1:
            raise InputError(
                f"pixel_values must be batch × 1 × {self.channels} × height × width, not batch × {tuple(tiles.shape)}: "
                "one picture that is not cut into tiles (processor.image_processor.do_image_splitting = False)"
            )
        if not tiles.any():
            raise InputError("the picture is zero everywhere, which the model takes for padding")
        return super().picture({"pixel_values": tiles[0]})

    def cells(self, pixels: Tensor, units: Units, batch: int) -> Float[Tensor, "batch unit feature"]:
        return super().cells(pixels[:, 0], units, batch)

    def example(self) -> tuple[dict[str, Tensor], int]:
        given, count = super().example()
        return {"pixel_values": given["pixel_values"][:, None]}, count


class Rows(Layout):
    """Each patch as a row of pixels, squares of merged patches together (Qwen-VL)."""

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw")

    @property
    def merged(self) -> int:
        return int(self.vision.spatial_merge_size)

    @property
    def width(self) -> int:
        return self.channels * self.vision.temporal_patch_size * prod(pair(self.vision.patch_size))

    def split(self, given: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        if "image_grid_thw" not in given:
            raise InputError("model inputs need image_grid_thw: how many patches the picture has each way")
        grids, pixels = given["image_grid_thw"], given["pixel_values"]
        if grids.shape != (count, 3):
            raise InputError(
                f"image_grid_thw must have one picture for each of {count} texts, not {tuple(grids.shape)}"
            )
        rows = grids.prod(1).tolist()
        if pixels.shape != (sum(rows), self.width) or not pixels.is_floating_point():
            expected, found = (sum(rows), self.width), f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(f"pixel_values must be patch × number, {expected}, not {found}")
        parts = zip(pixels.split(rows), grids, strict=True)
        return [{"pixel_values": part, "image_grid_thw": grid} for part, grid in parts]

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        pixels, grids = ([part[name] for part in parts] for name in self.inputs)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}

    def units(self, given: Mapping[str, Tensor], count: int) -> Units:
        times, high, wide = given["image_grid_thw"].tolist()
        if times != 1:
            raise InputError(f"the picture has {times} points in time: films are not explained yet")
        grid = (high // self.merged, wide // self.merged)
        if count != prod(grid):
            raise InputError(
                f"the picture has {grid[0]} × {grid[1]} merged patches, but the text has {count} placeholders for them"
            )
        return patches(grid)

    def seen(self, given: Mapping[str, Tensor], processor: Any) -> UInt8[np.ndarray, "height width 3"] | None:
        _, high, wide = given["image_grid_thw"].tolist()
        m, times, (p, q) = self.merged, self.vision.temporal_patch_size, pair(self.vision.patch_size)
        rows = given["pixel_values"].reshape(high // m, wide // m, m, m, self.channels, times, p, q)[..., 0, :, :]
        picture = rows.permute(4, 0, 2, 5, 1, 3, 6).reshape(self.channels, high * p, wide * q)
        return as_seen(picture, processor)

    def cells(self, pixels: Tensor, units: Units, batch: int) -> Float[Tensor, "batch unit feature"]:
        return pixels.reshape(batch, len(units), -1)

    def example(self) -> tuple[dict[str, Tensor], int]:
        side = 2 * self.merged
        pixels = torch.linspace(-3, 3, side * side * self.width).sin().reshape(side * side, self.width)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}, 4


class Unplaced(Layout):
    """Placeholders that stand for no single part of the picture: they have numbers, and no map."""

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")
    zero_is_padding = True
    nowhere = "its tokens are learned queries that each look at the whole picture, so none has a place in it"

    def units(self, given: Mapping[str, Tensor], count: int) -> Units:
        if given["pixel_values"].dim() != 4:
            shape = tuple(given["pixel_values"].shape)
            raise InputError(f"pixel_values must be batch × picture × channel × height × width, not batch × {shape}")
        names = tuple(f"query {i}" for i in range(count))
        return Units(stream="image", kind="query", names=names, special=(False,) * count)

    def seen(self, given: Mapping[str, Tensor], processor: Any) -> UInt8[np.ndarray, "height width 3"] | None:
        return None

    def cells(self, pixels: Tensor, units: Units, batch: int) -> Float[Tensor, "batch unit feature"]:
        raise Refusal(f"the pixels of a token are not known: {self.nowhere}")

    def example(self) -> tuple[dict[str, Tensor], int]:
        shape = (1, 1, self.channels, *pair(self.vision.image_size))
        pixels = torch.linspace(-3, 3, prod(shape)).sin().reshape(shape)
        return {"pixel_values": pixels}, int(self.config.perceiver_config.resampler_n_latents)
