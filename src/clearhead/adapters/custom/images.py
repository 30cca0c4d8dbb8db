"""`ImageReader` and its adapter: image models that are not from transformers and cut images into patches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, Readout
from clearhead.adapters.custom.base import QUERY_STREAM, CustomModelAdapter, InputReader
from clearhead.adapters.image import compute_patch_grid
from clearhead.adapters.readers.image import denormalize_image, open_image, patchify, to_pair
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.units import build_patch_units


@dataclass
class ImageReader(InputReader):
    """Describes how your own model takes images: preprocessing, patch size and special tokens.

    Attributes:
        read: Function from a PIL image to the model's input tensor (channel × height × width). None if such tensors
            are given to `explain`.
        patch_size: Height and width of a patch in pixels.
        prefix_tokens: Names of the tokens before the patches, such as ["[CLS]"].
        image_size: Height and width of the model's images in pixels.
        channels: Number of channels.
        mean: Mean of each channel that `read` subtracts, to display the image.
        std: Standard deviation of each channel by which `read` divides, to display the image.
        inputs: Function from images (batch × channel × height × width) to the model's arguments by name. None if they
            are its only argument.
    """

    read: Callable[[Any], Tensor] | None = None
    patch_size: int | tuple[int, int] = 16
    prefix_tokens: Sequence[str] = ()
    image_size: int | tuple[int, int] = 224
    channels: int = 3
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    inputs: Callable[[Tensor], Mapping[str, Any]] | None = None

    @property
    def image_mean(self) -> Sequence[float] | None:
        """As transformers' image processors call it, as they do the next."""
        return self.mean

    @property
    def image_std(self) -> Sequence[float] | None:
        return self.std


class CustomImageAdapter(CustomModelAdapter):
    """A model of one's own that cuts a picture into patches."""

    stream = "image"
    input_names: ClassVar[tuple[str, ...]] = ("image",)
    grad_input_name = "pixel_values"
    processor: ImageReader

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {self.stream: (self, "pixel_values")}

    @property
    def patch_size(self) -> tuple[int, int]:
        return to_pair(self.processor.patch_size)

    def choose_default_readout(self) -> Readout | None:
        return QUERY_STREAM if self.has_pooling_query else "first" if self.processor.prefix_tokens else "patches"

    def make_example_input(self) -> Any:
        shape = (self.processor.channels, *to_pair(self.processor.image_size))
        return torch.linspace(-3, 3, int(np.prod(shape))).sin().reshape(shape)

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if options.unit_names is not None:
            raise InputError(
                "tokens= names the tokens of a text, but image patches are named by their positions: leave out tokens="
            )
        reader, pixels = self.processor, raw
        if not isinstance(raw, Tensor):
            if reader.read is None:
                raise InputError("the reader has no read=, so pass images as tensors, channel × height × width")
            pixels = reader.read(open_image(raw))
        if not isinstance(pixels, Tensor):
            raise InputError(f"the reader's read= must return a tensor, not {type(pixels).__name__}")
        (high, wide), grid = self.patch_size, compute_patch_grid(pixels, reader.channels, self.patch_size)
        units = build_patch_units(grid, list(reader.prefix_tokens))
        picture = denormalize_image(pixels[:, : grid[0] * high, : grid[1] * wide], reader)
        return [Sample({"pixel_values": pixels}, self.build_axes(units), image=picture)]

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        pixels = torch.stack([sample.inputs["pixel_values"] for sample in samples])
        return self.build_forward_kwargs(pixels.to(self.device, self.dtype))

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        pictures = [name for name, part in batch.items() if isinstance(part, Tensor) and part.dim() == 4]
        if len(pictures) != 1:
            raise InputError("inputs= must pass on the images unchanged, as one of the model's arguments")
        return tuple(pictures)

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (pixels,) = vectors.values()
        return self.add_query_vectors(patchify(pixels, self.get_units(samples[0]), self.patch_size))


ImageReader.adapter_class = CustomImageAdapter
