"""Models of one's own that cut pictures into patches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Readout, Sample
from clearhead.adapters.custom.base import QUERY, OwnSubject, Reader
from clearhead.adapters.image import grid_of
from clearhead.adapters.readers.image import as_seen, in_patches, open_picture, pair
from clearhead.errors import InputError
from clearhead.units import patches


@dataclass
class Pictures(Reader):
    """Pictures that are cut into patches.

    read: a PIL picture → what the model takes, channel × height × width; without it such tensors are given
    patch: how high and wide a patch is, in pixels
    before: the names of the tokens that stand before the patches, such as ["[CLS]"]
    size: how high and wide a picture is that the model takes, in pixels
    mean, std: how `read` scales the channels, to show the picture as it was
    inputs: pictures (batch × channel × height × width) → the model's arguments by name
    """

    read: Callable[[Any], Tensor] | None = None
    patch: int | tuple[int, int] = 16
    before: Sequence[str] = ()
    size: int | tuple[int, int] = 224
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


class OwnPictures(OwnSubject):
    """A model of one's own that cuts a picture into patches."""

    stream = "image"
    takes: ClassVar[tuple[str, ...]] = ("image",)
    leaf = "pixel_values"
    processor: Pictures

    @property
    def patch_size(self) -> tuple[int, int]:
        return pair(self.processor.patch)

    def default_readout(self) -> Readout | None:
        return QUERY if self.pools else "first" if self.processor.before else "patches"

    def example(self) -> Any:
        shape = (self.processor.channels, *pair(self.processor.size))
        return torch.linspace(-3, 3, int(np.prod(shape))).sin().reshape(shape)

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if how.tokens is not None:
            raise InputError("tokens= names tokens of text; a picture's patches have their places as names")
        reader, pixels = self.processor, raw
        if not isinstance(raw, Tensor):
            if reader.read is None:
                raise InputError("the reader has no read=, so give pictures as tensors, channel × height × width")
            pixels = reader.read(open_picture(raw))
        if not isinstance(pixels, Tensor):
            raise InputError(f"the reader's read= must return a tensor, not {type(pixels).__name__}")
        (high, wide), grid = self.patch_size, grid_of(pixels, reader.channels, self.patch_size)
        units = patches(grid, list(reader.before))
        picture = as_seen(pixels[:, : grid[0] * high, : grid[1] * wide], reader)
        return [Sample({"pixel_values": pixels}, self.axes(units), picture=picture)]

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        pixels = torch.stack([sample.inputs["pixel_values"] for sample in samples])
        return self.arguments(pixels.to(self.device, self.dtype))

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        pictures = [name for name, part in batch.items() if isinstance(part, Tensor) and part.dim() == 4]
        if len(pictures) != 1:
            raise InputError("inputs= must hand the pictures over as they are, and as one of the model's arguments")
        return tuple(pictures)

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (pixels,) = vectors.values()
        return self.arranged_with_query(in_patches(pixels, self.units_of(samples[0]), self.patch_size))


Pictures.subject = OwnPictures
