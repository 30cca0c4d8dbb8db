"""Image regions: which share of each patch lies in which region."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError
from clearhead.units import Box, Units, pluralize_unit

#: A number of rows and columns; boxes (left, top, right, bottom) in fractions of the image or in pixels, by name or
#: numbered; or an integer map with the region of every pixel or patch (negative: none).
RegionSpec = tuple[int, int] | Mapping[str, Box] | Sequence[Box] | Int[np.ndarray, "height width"]
#: Assumed patch size where the image is not known.
PIXELS_PER_PATCH = 16
OUTSIDE_REGION_NAME = "elsewhere"


def merge_into_regions(
    units: Units, regions: RegionSpec, image_size: tuple[int, int] | None
) -> tuple[Units, Float[np.ndarray, "patch region"]]:
    """Build units for regions, and compute which share of each patch lies in each region.

    Special units stay separate. Pixels in several regions count for all of them. Pixels outside all regions form a
    region of their own.

    Args:
        units: The patches.
        regions: A grid, boxes or an integer map.
        image_size: Height and width in pixels, if known.

    Returns:
        The units (special units, then regions), and the shares.

    Raises:
        InputError: If the units are not patches, or the regions are malformed.
    """
    if units.grid is None or units.boxes is None:
        raise InputError(
            f"only patches of an image can be merged into regions, and these units are {pluralize_unit(units.kind)}"
        )
    height, width = image_size or (units.grid[0] * PIXELS_PER_PATCH, units.grid[1] * PIXELS_PER_PATCH)
    masks = _build_region_masks(regions, height, width, units.grid)
    outside = ~np.any(list(masks.values()), axis=0)
    if outside.any():
        masks[OUTSIDE_REGION_NAME] = outside
    special = np.flatnonzero(units.special)
    shares = np.zeros((len(units), len(special) + len(masks)))
    shares[special, np.arange(len(special))] = 1
    for i in units.content_indices():
        box = units.boxes[i]
        assert box is not None
        rows = _to_pixel_slice(box[1], box[3], height)
        columns = _to_pixel_slice(box[0], box[2], width)
        shares[i, len(special) :] = [mask[rows, columns].mean() for mask in masks.values()]
    merged = replace(
        units,
        kind="region",
        names=(*(units.names[i] for i in special), *masks),
        special=(True,) * len(special) + (False,) * len(masks),
        grid=None,
        boxes=(*(None for _ in special), *(_compute_bounding_box(mask) for mask in masks.values())),
    )
    return merged, shares


def _build_region_masks(
    regions: Any, height: int, width: int, grid: tuple[int, int]
) -> dict[str, Bool[np.ndarray, "height width"]]:
    """One boolean mask per region, in pixels."""
    if isinstance(regions, np.ndarray) and regions.ndim == 2 and regions.dtype.kind in "iub":
        return _masks_from_label_map(regions.astype(int), height, width, grid)
    boxes = _list_region_boxes(regions)
    if not boxes or any(np.shape(box) != (4,) for box in boxes.values()):
        raise InputError(
            "regions must be (rows, columns), boxes (left, top, right, bottom) by name or as a list, or an array of "
            f"integers, one for each pixel or patch; not {regions!r:.60}"
        )
    max_x = max_y = 1
    if max(max(box) for box in boxes.values()) > 1:  # boxes in pixels
        max_x = width
        max_y = height
    masks = {name: np.zeros((height, width), dtype=bool) for name in boxes}
    for name, (left, top, right, bottom) in boxes.items():
        if not (0 <= left < right <= max_x and 0 <= top < bottom <= max_y):
            raise InputError(
                f"the box of {name!r} is {(left, top, right, bottom)}: it must be (left, top, right, bottom) within "
                f"the image, in fractions, or in its {width} × {height} pixels"
            )
        rows = _to_pixel_slice(top / max_y, bottom / max_y, height)
        columns = _to_pixel_slice(left / max_x, right / max_x, width)
        masks[name][rows, columns] = True
    return masks


def _list_region_boxes(regions: Any) -> dict[str, Any]:
    """Boxes by name; empty if `regions` is neither a grid nor boxes."""
    if isinstance(regions, tuple) and len(regions) == 2 and all(isinstance(side, int) and side > 0 for side in regions):
        rows, columns = regions
        cells = [(row, column) for row in range(rows) for column in range(columns)]
        return {f"{r},{c}": (c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r, c in cells}
    if isinstance(regions, Mapping):
        return {str(name): box for name, box in regions.items()}
    if isinstance(regions, Sequence) and not isinstance(regions, str):
        return {f"region {i}": box for i, box in enumerate(regions)}
    return {}


def _masks_from_label_map(
    labels: Int[np.ndarray, "row column"], height: int, width: int, grid: tuple[int, int]
) -> dict[str, Bool[np.ndarray, "height width"]]:
    """Return the pixels of each region of a map by pixel or by patch; negative numbers are no region."""
    if labels.shape not in ((height, width), grid):
        shape = " × ".join(map(str, labels.shape))
        raise InputError(
            f"a map of regions must have the size of the image, {height} × {width} pixels, or of its patches, {grid}; "
            f"not {shape}"
        )
    if labels.shape == grid:  # repeat each patch over its pixels
        rows = np.arange(height) * grid[0] // height
        columns = np.arange(width) * grid[1] // width
        labels = labels[rows][:, columns]
    masks = {f"region {number}": labels == number for number in np.unique(labels) if number >= 0}
    if not masks:
        raise InputError("this map of regions assigns no pixel to a region: regions are numbered from 0")
    return masks


def _to_pixel_slice(start: float, stop: float, length: int) -> slice:
    """Convert fractions to a slice of at least one pixel."""
    first = min(round(start * length), length - 1)
    return slice(first, max(round(stop * length), first + 1))


def _compute_bounding_box(mask: Bool[np.ndarray, "height width"]) -> Box:
    """Return the smallest box around a region, in fractions of the image."""
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    height, width = mask.shape
    return columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height
