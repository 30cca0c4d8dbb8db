"""Regions of a picture, chosen after the fact: which share of each patch lies in which of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError
from clearhead.units import Box, Units, plural

#: A number of rows and columns; boxes (left, top, right, bottom) in fractions of the picture or its pixels, by name or
#: numbered; or a map that says of every pixel, or patch, in which region it lies (negative: in none).
Where = tuple[int, int] | Mapping[str, Box] | Sequence[Box] | Int[np.ndarray, "height width"]
#: Pixels of a patch where the picture is not known.
FINE = 16
ELSEWHERE = "elsewhere"


def in_regions(
    units: Units, where: Where, size: tuple[int, int] | None
) -> tuple[Units, Float[np.ndarray, "patch region"]]:
    """The regions as units, and which share of each patch lies in each; special units stay by themselves.

    Where regions overlap, what lies in both counts for both. What lies in none of them is a region of its own.
    """
    if units.grid is None or units.boxes is None:
        raise InputError(
            f"only patches of a picture can be merged into regions, and these units are {plural(units.kind)}"
        )
    high, wide = size or (units.grid[0] * FINE, units.grid[1] * FINE)
    masks = _masks(where, high, wide, units.grid)
    rest = ~np.any(list(masks.values()), axis=0)
    if rest.any():
        masks[ELSEWHERE] = rest
    special = np.flatnonzero(units.special)
    shares = np.zeros((len(units), len(special) + len(masks)))
    shares[special, np.arange(len(special))] = 1
    for place in units.drop_special():
        box = units.boxes[place]
        assert box is not None
        rows, columns = _span(box[1], box[3], high), _span(box[0], box[2], wide)
        shares[place, len(special) :] = [mask[rows, columns].mean() for mask in masks.values()]
    merged = replace(
        units,
        kind="region",
        names=(*(units.names[i] for i in special), *masks),
        special=(True,) * len(special) + (False,) * len(masks),
        grid=None,
        boxes=(*(None for _ in special), *(_around(mask) for mask in masks.values())),
    )
    return merged, shares


def _masks(where: Any, high: int, wide: int, grid: tuple[int, int]) -> dict[str, Bool[np.ndarray, "height width"]]:
    if isinstance(where, np.ndarray) and where.ndim == 2 and where.dtype.kind in "iub":
        return _of_map(where.astype(int), high, wide, grid)
    if isinstance(where, tuple) and len(where) == 2 and all(isinstance(side, int) and side > 0 for side in where):
        rows, columns = where
        cells = [(row, column) for row in range(rows) for column in range(columns)]
        named = {f"{r},{c}": (c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r, c in cells}
    elif isinstance(where, Mapping):
        named = {str(name): box for name, box in where.items()}
    elif isinstance(where, Sequence) and not isinstance(where, str):
        named = {f"region {place}": box for place, box in enumerate(where)}
    else:
        named = {}
    if not named or any(np.shape(box) != (4,) for box in named.values()):
        raise InputError(
            "regions must be (rows, columns), boxes (left, top, right, bottom) by name or as a list, or a map of whole "
            f"numbers, one for each pixel or patch; not {where!r:.60}"
        )
    pixels = max(max(box) for box in named.values()) > 1
    masks = {name: np.zeros((high, wide), dtype=bool) for name in named}
    for name, (left, top, right, bottom) in named.items():
        across, down = (wide, high) if pixels else (1, 1)
        inside = 0 <= left < right <= across and 0 <= top < bottom <= down
        if not inside:
            raise InputError(
                f"the box of {name!r} is {(left, top, right, bottom)}: it must be (left, top, right, bottom) within "
                f"the picture, in fractions, or in its {wide} × {high} pixels"
            )
        masks[name][_span(top / down, bottom / down, high), _span(left / across, right / across, wide)] = True
    return masks


def _of_map(
    where: Int[np.ndarray, "row column"], high: int, wide: int, grid: tuple[int, int]
) -> dict[str, Bool[np.ndarray, "height width"]]:
    if where.shape not in ((high, wide), grid):
        said = " × ".join(map(str, where.shape))
        raise InputError(f"a map of regions must have the picture's {high} × {wide} pixels or its {grid}, not {said}")
    if where.shape == grid:  # the pixels of each patch
        down, right = (np.arange(length) * parts // length for length, parts in zip((high, wide), grid, strict=True))
        where = where[down][:, right]
    masks = {f"region {number}": where == number for number in np.unique(where) if number >= 0}
    if not masks:
        raise InputError("a map of regions says of no pixel that it lies in one: regions are numbered from 0")
    return masks


def _span(start: float, stop: float, length: int) -> slice:
    """At least one pixel."""
    first = min(round(start * length), length - 1)
    return slice(first, max(round(stop * length), first + 1))


def _around(mask: Bool[np.ndarray, "height width"]) -> Box:
    """The smallest box that holds a region."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    high, wide = mask.shape
    return columns[0] / wide, rows[0] / high, (columns[-1] + 1) / wide, (rows[-1] + 1) / high
