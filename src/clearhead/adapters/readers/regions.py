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
BEYOND = 0.05
_WANTED = "regions= must be (features, boxes), or (features, boxes, (height, width)) where boxes are in pixels"


@dataclass(frozen=True)
class Regions:
    """Regions and their boxes (left, top, right, bottom) as fractions of the picture."""

    features: Float[Tensor, "region feature"]
    boxes: Float[Tensor, "region 4"] | None
    picture: UInt8[np.ndarray, "height width 3"] | None = None


def read_regions(given: Any, picture: Any = None) -> Regions:
    """Regions as a caller gives them. Boxes up to 1 are fractions; larger ones are pixels, of a size to be known.

    >>> read_regions(([[0.5, 2.0]], [[8, 16, 24, 32]], (32, 64))).boxes
    tensor([[0.1250, 0.5000, 0.3750, 1.0000]])
    """
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        said = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise InputError(f"{_WANTED}, not {said}")
    features = _numbers(given[0], "features")
    shown = None if picture is None else np.asarray(picture)
    if given[1] is None:
        return Regions(features, None, shown)
    boxes = _numbers(given[1], "boxes")
    if boxes.shape != (len(features), 4):
        raise InputError(
            f"boxes must be one (left, top, right, bottom) for each of the {len(features)} regions, "
            f"not {' × '.join(map(str, boxes.shape))}"
        )
    size = given[2] if len(given) == 3 else None if shown is None else shown.shape[:2]
    return Regions(features, _as_fractions(boxes, size), shown)


def _numbers(given: Any, what: str) -> Float[Tensor, "region number"]:
    try:
        found = torch.as_tensor(np.asarray(given) if not isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(f"{what} of regions must be numbers, region × number ({problem})") from None
    if found.dim() != 2 or not found.numel():
        raise InputError(f"{what} of regions must be region × number, not of shape {tuple(found.shape)}")
    found = found.detach() if found.is_floating_point() else found.float()
    if not found.isfinite().all():
        raise InputError(f"{what} of regions hold numbers that are not finite")
    return found


def _as_fractions(boxes: Float[Tensor, "region 4"], size: Any) -> Float[Tensor, "region 4"]:
    if boxes.max() > 1 + BEYOND:
        if size is None:
            raise InputError(
                f"boxes reach up to {float(boxes.max()):g}, so they are in pixels: give the size of the picture, "
                "regions=(features, boxes, (height, width)), or the picture itself with image="
            )
        try:
            high, wide = (float(side) for side in size)
        except (TypeError, ValueError):
            raise InputError(f"the size of the picture must be (height, width), not {size!r}") from None
        boxes = boxes / boxes.new_tensor([wide, high, wide, high])
    left, top, right, bottom = boxes.T
    if (left > right).any() or (top > bottom).any():
        raise InputError("boxes must be (left, top, right, bottom), but some end before they begin")
    if boxes.min() < -BEYOND or boxes.max() > 1 + BEYOND:
        raise InputError("boxes reach beyond the picture: is its size (height, width), and are they its own?")
    return boxes


def units_of_regions(count: int, boxes: Float[Tensor, "region 4"] | None = None, hidden: Sequence[bool] = ()) -> Units:
    """The regions as units, numbered as they were given; boxes only where all of them can be drawn."""
    return Units(
        stream="regions",
        kind="region",
        names=tuple(f"region {place}" for place in range(count)),
        special=tuple(hidden) or (False,) * count,
        boxes=None if boxes is None else drawn(boxes),
    )


def drawn(boxes: Float[Tensor, "region 4"]) -> tuple[Box | None, ...] | None:
    """Boxes as fractions of the picture; None where these numbers are no such boxes."""
    if boxes.shape[1] != 4 or boxes.min() < -BEYOND or boxes.max() > 1 + BEYOND or (boxes[:, :2] > boxes[:, 2:]).any():
        return None
    left, top, right, bottom = boxes.clamp(0, 1).T.tolist()
    return tuple(zip(left, top, right, bottom, strict=True))
