"""Regions of a picture, as a detector of objects finds them: their features and where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.errors import InputError
from clearhead.units import Box, Units

#: How far a box may reach beyond the picture, as a fraction of it: detectors round.
BOX_TOLERANCE = 0.05
_REGIONS_FORMAT = "regions= must be (features, boxes) or, for boxes in pixels, (features, boxes, (height, width))"


@dataclass(frozen=True)
class ImageRegions:
    """Regions and their boxes (left, top, right, bottom) as fractions of the picture."""

    features: Float[Tensor, "region feature"]
    boxes: Float[Tensor, "region 4"] | None
    image: UInt8[np.ndarray, "height width 3"] | None = None


def read_regions(regions: Any, image: Any = None) -> ImageRegions:
    """Regions as a caller gives them. Boxes up to 1 are fractions; larger ones are pixels, of a size to be known.

    >>> read_regions(([[0.5, 2.0]], [[8, 16, 24, 32]], (32, 64))).boxes
    tensor([[0.1250, 0.5000, 0.3750, 1.0000]])
    """
    if not isinstance(regions, tuple) or len(regions) not in (2, 3):
        said = f"a tuple of {len(regions)}" if isinstance(regions, tuple) else f"a {type(regions).__name__}"
        raise InputError(f"{_REGIONS_FORMAT}, but it is {said}")
    features = _to_finite_matrix(regions[0], "features")
    shown = None if image is None else np.asarray(image)
    if regions[1] is None:
        return ImageRegions(features, None, shown)
    boxes = _to_finite_matrix(regions[1], "boxes")
    if boxes.shape != (len(features), 4):
        raise InputError(
            f"boxes must contain one row (left, top, right, bottom) for each of the {len(features)} regions, but have "
            f"the shape {' × '.join(map(str, boxes.shape))}"
        )
    size = regions[2] if len(regions) == 3 else None if shown is None else shown.shape[:2]
    return ImageRegions(features, _normalize_boxes(boxes, size), shown)


def _to_finite_matrix(given: Any, what: str) -> Float[Tensor, "region number"]:
    try:
        found = torch.as_tensor(np.asarray(given) if not isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(f"{what} of regions must be numbers, with one row per region ({problem})") from None
    if found.dim() != 2 or not found.numel():
        raise InputError(
            f"{what} of regions must have one row of numbers per region, but have the shape {tuple(found.shape)}"
        )
    found = found.detach() if found.is_floating_point() else found.float()
    if not found.isfinite().all():
        raise InputError(f"{what} of regions contain values that are not finite")
    return found


def _normalize_boxes(boxes: Float[Tensor, "region 4"], size: Any) -> Float[Tensor, "region 4"]:
    if boxes.max() > 1 + BOX_TOLERANCE:
        if size is None:
            raise InputError(
                f"boxes reach up to {float(boxes.max()):g}, so they are in pixels: pass the size of the image, "
                "regions=(features, boxes, (height, width)), or the image itself with image="
            )
        try:
            high, wide = (float(side) for side in size)
        except (TypeError, ValueError):
            raise InputError(f"the size of the image must be (height, width), not {size!r}") from None
        boxes = boxes / boxes.new_tensor([wide, high, wide, high])
    left, top, right, bottom = boxes.T
    if (left > right).any() or (top > bottom).any():
        raise InputError("boxes must be (left, top, right, bottom), but some have right < left or bottom < top")
    if boxes.min() < -BOX_TOLERANCE or boxes.max() > 1 + BOX_TOLERANCE:
        raise InputError(
            "boxes extend beyond the image: check that its size is (height, width), and that the boxes belong to this "
            "image"
        )
    return boxes


def make_region_units(
    num_regions: int, boxes: Float[Tensor, "region 4"] | None = None, masked: Sequence[bool] = ()
) -> Units:
    """The regions as units, numbered as they were given; boxes only where all of them can be drawn."""
    return Units(
        stream="regions",
        kind="region",
        names=tuple(f"region {place}" for place in range(num_regions)),
        special=tuple(masked) or (False,) * num_regions,
        boxes=None if boxes is None else to_drawable_boxes(boxes),
    )


def to_drawable_boxes(boxes: Float[Tensor, "region 4"]) -> tuple[Box | None, ...] | None:
    """Boxes as fractions of the picture; None where these numbers are no such boxes."""
    if (
        boxes.shape[1] != 4
        or boxes.min() < -BOX_TOLERANCE
        or boxes.max() > 1 + BOX_TOLERANCE
        or (boxes[:, :2] > boxes[:, 2:]).any()
    ):
        return None
    left, top, right, bottom = boxes.clamp(0, 1).T.tolist()
    return tuple(zip(left, top, right, bottom, strict=True))
