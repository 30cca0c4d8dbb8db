"""What a picture, or a part of it, is replaced by: black, or itself without detail."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import InputError


def black(
    processor: Any, like: Float[Tensor, "*batch channel height width"]
) -> Float[Tensor, "*batch channel height width"]:
    """Black as the processor of pictures (that of a model of several streams has one) would hand it over."""
    processor = getattr(processor, "image_processor", processor)
    normalised = getattr(processor, "do_normalize", None)
    if normalised is None:
        raise InputError(
            "which numbers are black is not known without the image processor: load it together with the model, or "
            "choose 'mean' or 'blur'"
        )
    if not normalised:
        return torch.zeros_like(like)
    mean, std = (torch.as_tensor(getattr(processor, f"image_{name}")).to(like) for name in ("mean", "std"))
    return (-mean / std)[:, None, None].expand_as(like)


def blurred(x: Tensor) -> Tensor:
    """Pictures without detail: a Gaussian an eighth of their width wide."""
    for axis in (-2, -1):
        size = x.shape[axis]
        sigma = size / 8
        places = torch.arange(size, device=x.device, dtype=x.dtype)
        weights = F.softmax(-((places[:, None] - places[None]) ** 2) / (2 * sigma**2), dim=1)
        x = torch.movedim(torch.movedim(x, axis, -1) @ weights.T, -1, axis)
    return x
