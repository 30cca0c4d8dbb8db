"""Resizing of heat maps to the size of an image."""

import numpy as np
from jaxtyping import Float
from PIL import Image


def upsample(heat: Float[np.ndarray, "row column"], height: int, width: int) -> Float[np.ndarray, "{height} {width}"]:
    """Upsample a heat map to the size of an image, bilinearly.

    The centres of patches stay where they lie in the image (corners are not aligned).

    Args:
        heat: One value per patch. NaN means no value: it is left out of the weighted mean of its neighbours, and a
            pixel is NaN where more than half of its weight has no value.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
    """
    known = np.isfinite(heat)
    values = _bilinear(np.where(known, heat, 0.0), height, width)
    if known.all():
        return values
    weight = _bilinear(known.astype(np.float32), height, width)
    return np.where(weight >= 0.5, values / np.maximum(weight, 1e-6), np.nan)


def _bilinear(values: np.ndarray, height: int, width: int) -> np.ndarray:
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
