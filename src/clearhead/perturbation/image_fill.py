"""Fill values for masked parts of an image: black, or a blurred copy."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import InputError


def make_black_image(
    processor: Any, like: Float[Tensor, "*batch channel height width"]
) -> Float[Tensor, "*batch channel height width"]:
    """Create a black image as the image processor would return it, i.e. normalised.

    Args:
        processor: The image processor, or a processor of several inputs that has one.
        like: An image whose shape, dtype and device are used.

    Returns:
        The black image.

    Raises:
        InputError: If the normalisation is unknown because there is no image processor.
    """
    processor = getattr(processor, "image_processor", processor)
    normalised = getattr(processor, "do_normalize", None)
    if normalised is None:
        raise InputError(
            "the pixel values of black are not known without the image processor: load it together with the model, or "
            "choose 'mean' or 'blur'"
        )
    if not normalised:
        return torch.zeros_like(like)
    mean, std = (torch.as_tensor(getattr(processor, f"image_{name}")).to(like) for name in ("mean", "std"))
    return (-mean / std)[:, None, None].expand_as(like)


def blur_image(image: Tensor) -> Tensor:
    """Blur images with a Gaussian whose σ is an eighth of the image size along each axis.

    Args:
        image: One or several images, height and width last.

    Returns:
        The blurred images.
    """
    for axis in (-2, -1):
        size = image.shape[axis]
        sigma = size / 8
        positions = torch.arange(size, device=image.device, dtype=image.dtype)
        weights = F.softmax(-((positions[:, None] - positions[None]) ** 2) / (2 * sigma**2), dim=1)
        image = torch.movedim(torch.movedim(image, axis, -1) @ weights.T, -1, axis)
    return image
