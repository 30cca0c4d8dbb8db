"""From a heat map to a mask: the pixels that it singles out."""

import numpy as np
from jaxtyping import Bool, Float, UInt8

from clearhead.images import upsample


def mask_of(heat: Float[np.ndarray, "row column"], height: int, width: int) -> Bool[np.ndarray, "{height} {width}"]:
    """The heat map scaled up bilinearly and to 0 … 255, and cut at Otsu's threshold; nothing of a flat one.

    >>> mask_of(np.array([[0.0, 1.0], [0.0, 0.0]]), 2, 4).astype(int)
    array([[0, 0, 1, 1],
           [0, 0, 0, 0]])
    """
    values = np.nan_to_num(upsample(heat, height, width))
    low, high = values.min(), values.max()
    if low == high:
        return np.zeros((height, width), dtype=bool)
    levels = _levels(values, low, high)
    return levels > otsu(levels)


def cut_of(heat: Float[np.ndarray, "row column"], height: int, width: int) -> float | None:
    """The score from which on a pixel is in the mask; None of a flat heat map.

    >>> cut_of(np.array([[0.0, 1.0], [0.0, 0.0]]), 2, 4)
    0.25098039215686274
    """
    values = np.nan_to_num(upsample(heat, height, width)).astype(float)
    low, high = values.min(), values.max()
    if low == high:
        return None
    return float(low + (otsu(_levels(values, low, high)) + 1) / 255 * (high - low))


def _levels(values: Float[np.ndarray, "*shape"], low: float, high: float) -> UInt8[np.ndarray, "*shape"]:
    return ((values - low) / (high - low) * 255).astype(np.uint8)


def otsu(levels: UInt8[np.ndarray, "..."]) -> int:
    """The level that parts bright from dark with the largest variance between the two (Otsu, 1979).

    >>> otsu(np.array([10, 12, 200, 210], dtype=np.uint8))
    12
    """
    counts = np.bincount(levels.ravel(), minlength=256).astype(float)
    below, total = counts.cumsum(), counts.sum()
    mass = (counts * np.arange(256)).cumsum()
    spread = np.divide(
        (mass[-1] * below - total * mass) ** 2,
        below * (total - below),
        out=np.zeros(256),
        where=(below > 0) & (below < total),
    )
    return int(spread.argmax())
