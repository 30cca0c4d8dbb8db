"""Image placeholders in the text of vision-language models: the image patches that each placeholder represents."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.adapters.readers.image import denormalize_image, patchify, to_pair
from clearhead.errors import InputError, UnsupportedError
from clearhead.units import Units, build_patch_units

#: How many patches, each way, one token stands for, where a projector merges them; elsewhere one.
_MERGE_FACTORS: dict[str, Any] = {
    "gemma3": lambda config: _count_patches_per_side(config.vision_config) // int(config.mm_tokens_per_image**0.5),
    "internvl": lambda config: round(1 / config.downsample_ratio),
    **dict.fromkeys(("mistral3", "lighton_ocr"), lambda config: config.spatial_merge_size),
    "idefics3": lambda config: config.scale_factor,
    "smolvlm": lambda config: config.scale_factor,
    "aya_vision": lambda config: config.downsample_factor,
    "cohere2_vision": lambda config: config.downsample_factor,
}


def _count_patches_per_side(vision: Any) -> int:
    return vision.image_size // vision.patch_size


class ImageTokenLayout(ABC):
    """How one picture of each sample is given to a model, and where its placeholders lie in the picture."""

    #: The model's inputs that belong to the picture.
    input_names: ClassVar[tuple[str, ...]] = ("pixel_values",)
    #: Why the place of each token in the picture is not known; None where it is.
    missing_geometry_reason: ClassVar[str | None] = None
    #: Whether the model takes a picture that is zero everywhere for padding, and leaves it out.
    zero_is_padding: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config, self.vision_config = config, config.vision_config

    @property
    def num_channels(self) -> int:
        return int(getattr(self.vision_config, "num_channels", getattr(self.vision_config, "in_channels", 3)))

    def split_samples(self, inputs: Mapping[str, Tensor], num_samples: int) -> list[dict[str, Tensor]]:
        """The inputs of each sample, one picture each."""
        sizes = {name: len(part) for name, part in inputs.items()}
        if set(sizes.values()) != {num_samples}:
            raise InputError(
                f"there must be one image for each of {num_samples} texts, but the batch sizes are {sizes} (an image "
                "split into tiles counts as several: turn off crop_to_patches or do_image_splitting in the image "
                "processor)"
            )
        return [{name: part[i] for name, part in inputs.items()} for i in range(num_samples)]

    def batch_inputs(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The pictures of several samples, as the model takes them."""
        return {name: torch.stack([part[name] for part in samples]) for name in samples[0]}

    @abstractmethod
    def make_units(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Units:
        """The units that `count` placeholders stand for, made sure of."""

    @abstractmethod
    def make_display_image(
        self, inputs: Mapping[str, Tensor], processor: Any
    ) -> UInt8[np.ndarray, "height width 3"] | None:
        """The picture as the model saw it."""

    @abstractmethod
    def group_pixels_by_unit(
        self, pixels: Tensor, units: Units, batch_size: int
    ) -> Float[Tensor, "batch unit feature"]:
        """The pixels of each unit."""

    @abstractmethod
    def make_example_inputs(self) -> tuple[dict[str, Tensor], int]:
        """The inputs of any small picture, and how many placeholders it has."""


class SingleImageLayout(ImageTokenLayout):
    """Pixels as a picture; its patches, or squares of merged ones, row by row."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    @property
    def pixels_per_token(self) -> tuple[int, int]:
        """The pixels that one placeholder stands for."""
        high, wide = to_pair(self.vision_config.patch_size)
        merged = _MERGE_FACTORS.get(self.config.model_type, lambda config: 1)(self.config)
        return high * merged, wide * merged

    @property
    def accepts_any_size(self) -> bool:
        return self.vision_config.model_type == "pixtral"

    def validate_image(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "channel height width"]:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 3 or len(pixels) != self.num_channels or not pixels.is_floating_point():
            shape = f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(f"pixel_values must be batch × {self.num_channels} × height × width, not batch × {shape}")
        if not self.accepts_any_size:
            expected, found = to_pair(self.vision_config.image_size), tuple(pixels.shape[1:])
            if expected != found:
                raise InputError(f"the model takes images of {expected} pixels, not {found}")
            return pixels
        if "image_sizes" not in inputs:
            raise InputError(
                "model inputs must contain image_sizes, because images can have any size and may be padded"
            )
        high, wide = (int(size) for size in inputs["image_sizes"])
        return pixels[:, :high, :wide]

    def make_units(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Units:
        picture, (high, wide) = self.validate_image(inputs), self.pixels_per_token
        grid = (picture.shape[1] // high, picture.shape[2] // wide)
        # A tower's class token may stand before the patches, where the model does not select patches alone.
        before = ["[CLS]"] if num_tokens == prod(grid) + 1 and self.keeps_class_token else []
        if num_tokens != prod(grid) + len(before):
            raise InputError(
                f"the image has {grid[0]} × {grid[1]} patches, but the text has {num_tokens} placeholders for them: "
                "the text must contain the placeholders of one whole image, without tiles or image-newline tokens"
            )
        return build_patch_units(grid, before)

    @property
    def keeps_class_token(self) -> bool:
        return getattr(self.config, "vision_feature_select_strategy", "") == "full"

    def make_display_image(
        self, inputs: Mapping[str, Tensor], processor: Any
    ) -> UInt8[np.ndarray, "height width 3"] | None:
        return denormalize_image(self.validate_image(inputs), processor)

    def group_pixels_by_unit(
        self, pixels: Tensor, units: Units, batch_size: int
    ) -> Float[Tensor, "batch unit feature"]:
        return patchify(pixels, units, self.pixels_per_token)

    def make_example_inputs(self) -> tuple[dict[str, Tensor], int]:
        size = to_pair(
            [2 * side for side in self.pixels_per_token] if self.accepts_any_size else self.vision_config.image_size
        )
        shape = (1, self.num_channels, *size)
        given = {"pixel_values": torch.linspace(-3, 3, prod(shape)).sin().reshape(shape)}
        if self.accepts_any_size:
            given["image_sizes"] = torch.tensor([size])
        return given, prod(
            side // cell for side, cell in zip(size, self.pixels_per_token, strict=True)
        ) + self._count_class_tokens()

    def _count_class_tokens(self) -> int:
        return int(self.keeps_class_token and "clip" in self.vision_config.model_type)


class SingleTileLayout(SingleImageLayout):
    """Pixels as pictures or tiles of one, of which there must be one."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")
    zero_is_padding = True

    def validate_image(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "channel height width"]:
        tiles = inputs["pixel_values"]
        if tiles.dim() != 4 or len(tiles) != 1:
            raise InputError(
                f"pixel_values must be batch × 1 × {self.num_channels} × height × width, not batch × "
                f"{tuple(tiles.shape)}: pass one image that is not split into tiles "
                "(processor.image_processor.do_image_splitting = False)"
            )
        if not tiles.any():
            raise InputError("the image is zero everywhere, which the model treats as padding")
        return super().validate_image({"pixel_values": tiles[0]})

    def group_pixels_by_unit(
        self, pixels: Tensor, units: Units, batch_size: int
    ) -> Float[Tensor, "batch unit feature"]:
        return super().group_pixels_by_unit(pixels[:, 0], units, batch_size)

    def make_example_inputs(self) -> tuple[dict[str, Tensor], int]:
        given, count = super().make_example_inputs()
        return {"pixel_values": given["pixel_values"][:, None]}, count


class QwenGridLayout(ImageTokenLayout):
    """Each patch as a row of pixels, squares of merged patches together (Qwen-VL)."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw")

    @property
    def merge_size(self) -> int:
        return int(self.vision_config.spatial_merge_size)

    @property
    def values_per_patch(self) -> int:
        return self.num_channels * self.vision_config.temporal_patch_size * prod(to_pair(self.vision_config.patch_size))

    def split_samples(self, inputs: Mapping[str, Tensor], num_samples: int) -> list[dict[str, Tensor]]:
        if "image_grid_thw" not in inputs:
            raise InputError(
                "model inputs must contain image_grid_thw, the number of patches of the image along each axis"
            )
        grids, pixels = inputs["image_grid_thw"], inputs["pixel_values"]
        if grids.shape != (num_samples, 3):
            raise InputError(
                f"image_grid_thw must have one image for each of {num_samples} texts, not {tuple(grids.shape)}"
            )
        rows = grids.prod(1).tolist()
        if pixels.shape != (sum(rows), self.values_per_patch) or not pixels.is_floating_point():
            expected, found = (sum(rows), self.values_per_patch), f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(f"pixel_values must be patch × value, {expected}, not {found}")
        parts = zip(pixels.split(rows), grids, strict=True)
        return [{"pixel_values": part, "image_grid_thw": grid} for part, grid in parts]

    def batch_inputs(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        pixels, grids = ([part[name] for part in samples] for name in self.input_names)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}

    def make_units(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Units:
        times, high, wide = inputs["image_grid_thw"].tolist()
        if times != 1:
            raise InputError(f"the image has {times} time steps: videos are not supported yet")
        grid = (high // self.merge_size, wide // self.merge_size)
        if num_tokens != prod(grid):
            raise InputError(
                f"the image has {grid[0]} × {grid[1]} merged patches, but the text has {num_tokens} placeholders for "
                "them"
            )
        return build_patch_units(grid)

    def make_display_image(
        self, inputs: Mapping[str, Tensor], processor: Any
    ) -> UInt8[np.ndarray, "height width 3"] | None:
        _, high, wide = inputs["image_grid_thw"].tolist()
        m, times, (p, q) = (
            self.merge_size,
            self.vision_config.temporal_patch_size,
            to_pair(self.vision_config.patch_size),
        )
        rows = inputs["pixel_values"].reshape(high // m, wide // m, m, m, self.num_channels, times, p, q)[..., 0, :, :]
        picture = rows.permute(4, 0, 2, 5, 1, 3, 6).reshape(self.num_channels, high * p, wide * q)
        return denormalize_image(picture, processor)

    def group_pixels_by_unit(
        self, pixels: Tensor, units: Units, batch_size: int
    ) -> Float[Tensor, "batch unit feature"]:
        return pixels.reshape(batch_size, len(units), -1)

    def make_example_inputs(self) -> tuple[dict[str, Tensor], int]:
        side = 2 * self.merge_size
        pixels = (
            torch.linspace(-3, 3, side * side * self.values_per_patch).sin().reshape(side * side, self.values_per_patch)
        )
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}, 4


class NoGeometryLayout(ImageTokenLayout):
    """Image tokens without a position in the image, such as learned queries: they are numbered, and no map is drawn."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")
    zero_is_padding = True
    missing_geometry_reason = (
        "the image tokens are learned queries, each of which attends to the whole image and has no position in it"
    )

    def make_units(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Units:
        if inputs["pixel_values"].dim() != 4:
            shape = tuple(inputs["pixel_values"].shape)
            raise InputError(f"pixel_values must be batch × image × channel × height × width, not batch × {shape}")
        names = tuple(f"query {i}" for i in range(num_tokens))
        return Units(stream="image", kind="query", names=names, special=(False,) * num_tokens)

    def make_display_image(
        self, inputs: Mapping[str, Tensor], processor: Any
    ) -> UInt8[np.ndarray, "height width 3"] | None:
        """Return None: scores of tokens without a position cannot be drawn on an image."""
        return None

    def group_pixels_by_unit(
        self, pixels: Tensor, units: Units, batch_size: int
    ) -> Float[Tensor, "batch unit feature"]:
        raise UnsupportedError(f"pixels cannot be assigned to image tokens: {self.missing_geometry_reason}")

    def make_example_inputs(self) -> tuple[dict[str, Tensor], int]:
        shape = (1, 1, self.num_channels, *to_pair(self.vision_config.image_size))
        pixels = torch.linspace(-3, 3, prod(shape)).sin().reshape(shape)
        return {"pixel_values": pixels}, int(self.config.perceiver_config.resampler_n_latents)
