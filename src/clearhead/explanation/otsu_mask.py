"""Binary masks of heat maps by Otsu's threshold."""

import numpy as np
from jaxtyping import Bool, Float, UInt8

from clearhead.images import upsample_heat_map


def compute_otsu_mask(
    heat_map: Float[np.ndarray, "row column"], height: int, width: int
) -> Bool[np.ndarray, "{height} {width}"]:
    """Upsample a heat map bilinearly, quantise it to 0 … 255 and cut it at Otsu's threshold.

    A constant heat map gives an empty mask.

    Args:
        heat_map: One value per patch; NaN counts as zero.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Returns:
        True for the pixels above the threshold.

    Example:
        >>> compute_otsu_mask(np.array([[0.0, 1.0], [0.0, 0.0]]), 2, 4).astype(int)
        array([[0, 0, 1, 1],
               [0, 0, 0, 0]])
    """
    values = np.nan_to_num(upsample_heat_map(heat_map, height, width))
    low = values.min()
    high = values.max()
    if low == high:
        return np.zeros((height, width), dtype=bool)
    levels = _quantise_levels(values, low, high)
    return levels > threshold_otsu(levels)


def compute_otsu_cutoff(heat_map: Float[np.ndarray, "row column"], height: int, width: int) -> float | None:
    """Return the lowest score that is inside `compute_otsu_mask`, or None for a constant heat map.

    Args:
        heat_map: One value per patch; NaN counts as zero.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Returns:
        The cutoff on the scale of the heat map.

    Example:
        >>> compute_otsu_cutoff(np.array([[0.0, 1.0], [0.0, 0.0]]), 2, 4)
        0.25098039215686274
    """
    values = np.nan_to_num(upsample_heat_map(heat_map, height, width)).astype(float)
    low = values.min()
    high = values.max()
    if low == high:
        return None
    return float(low + (threshold_otsu(_quantise_levels(values, low, high)) + 1) / 255 * (high - low))


def _quantise_levels(values: Float[np.ndarray, "*shape"], low: float, high: float) -> UInt8[np.ndarray, "*shape"]:
    """Map low … high to the integers 0 … 255, rounded down."""
    return ((values - low) / (high - low) * 255).astype(np.uint8)


def threshold_otsu(levels: UInt8[np.ndarray, "..."]) -> int:
    """Return the threshold with the largest between-class variance of a greyscale image (Otsu, 1979).

    Args:
        levels: Grey levels of any shape.

    Returns:
        The threshold; levels above it are foreground.

    Example:
        >>> threshold_otsu(np.array([10, 12, 200, 210], dtype=np.uint8))
        12
    """
    counts = np.bincount(levels.ravel(), minlength=256).astype(float)
    below = counts.cumsum()
    total = counts.sum()
    mass = (counts * np.arange(256)).cumsum()
    between_class_variance = np.divide(
        (mass[-1] * below - total * mass) ** 2,
        below * (total - below),
        out=np.zeros(256),
        where=(below > 0) & (below < total),
    )
    return int(between_class_variance.argmax())
