"""Images of explanations: heat maps are resized to them, and they are rendered when they are first read."""

from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image


def upsample_heat_map(
    heat_map: Float[np.ndarray, "row column"], height: int, width: int
) -> Float[np.ndarray, "{height} {width}"]:
    """Upsample a heat map to the size of an image, bilinearly.

    Patch centres keep their position in the image (corners are not aligned).

    Args:
        heat_map: One value per patch. NaN means no value: it is excluded from the weighted mean of its neighbours, and
            a pixel is NaN where more than half of its weight has no value.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Returns:
        One value per pixel.
    """
    valid = np.isfinite(heat_map)
    values = _resize_bilinear(np.where(valid, heat_map, 0.0), height, width)
    if valid.all():
        return values
    weight = _resize_bilinear(valid.astype(np.float32), height, width)
    return np.where(weight >= 0.5, values / np.maximum(weight, 1e-6), np.nan)


def _resize_bilinear(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an array in float32: interpolate linearly if it grows, average over pixels if it shrinks."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


class RenderedOnAccess:
    """Descriptor of an image that is rendered when it is first read: most explanations are never drawn.

    The attribute is set to an array, to None, or to a function without arguments that renders the array.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the default of the dataclass field
        value = instance.__dict__[self.name]
        if callable(value):
            value = instance.__dict__[self.name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value
