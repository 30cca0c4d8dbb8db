"""Where the evidence lies, in the coordinates of units: characters of a text, boxes and masks of a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data.base import Example
from clearhead.errors import InputError
from clearhead.units import Box, Units

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Characters:
    """The characters from `start` up to `stop` of a text; `segment` counts the texts of a pair from 0."""

    start: int
    stop: int
    segment: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(f"characters {self.start} to {self.stop} are no part of a text: start must be below stop")


@dataclass(frozen=True)
class Region:
    """A box of a picture, in fractions of its width and height: left, top, right, bottom."""

    box: Box

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise InputError(f"the box {self.box} is no part of a picture: give fractions left, top, right, bottom")

    @classmethod
    def of_pixels(cls, box: Sequence[float], width: float, height: float) -> "Region | None":
        """A box in pixels (the right and lower edge outside), cut at the picture's edges; None if nothing is left.

        >>> Region.of_pixels((8, 0, 40, 16), width=32, height=32)
        Region(box=(0.25, 0.0, 1.0, 0.5))
        """
        left, right = (min(max(float(x) / width, 0.0), 1.0) for x in (box[0], box[2]))
        top, bottom = (min(max(float(y) / height, 0.0), 1.0) for y in (box[1], box[3]))
        return cls((left, top, right, bottom)) if left < right and top < bottom else None


@dataclass(frozen=True, eq=False)
class Mask:
    """Pixels of a picture. Those `ignored` (an unclear border) are counted neither in nor out.

    Where a picture shows objects of several classes, each mask has its `label`; a `crowd` of them is one mask.
    """

    inside: Bool[np.ndarray, "height width"]
    ignored: Bool[np.ndarray, "height width"] | None = None
    label: int | None = None
    crowd: bool = False

    def __post_init__(self) -> None:
        for part in (self.inside, self.ignored):
            if part is not None and (part.dtype != bool or part.shape != self.inside.shape or part.ndim != 2):
                raise InputError(f"a mask must be height × width truth values, not {part.dtype} {part.shape}")


@dataclass(frozen=True)
class Place:
    """One unit of a stream by its place, counted from 0: a detector's regions may overlap, their numbers do not."""

    place: int
    stream: str


Piece = Characters | Region | Mask | Place


def evidence_units(
    example: Example,
    units: Units,
    alternative: int | None = None,
    more_than: float = 0.5,
    view: Box = WHOLE,
) -> Bool[np.ndarray, "unit"]:
    """Which units are evidence: all sets together, or one `alternative` of them.

    A unit of text is evidence if one of its characters (white space aside) is; a patch or region if the share of its
    box that is evidence is `more_than` a half. `view` is the part of the picture that the model saw, where its
    processor crops. Special units never are.

    >>> from clearhead.units import Units
    >>> units = Units("text", "word", ("so", "good"), (False, False), ("so good",), (0, 0), ((0, 2), (3, 7)))
    >>> evidence_units(Example("1", "so good", 1, ((Characters(3, 7),),)), units).tolist()
    [False, True]
    """
    shown = shown_in(example, _pieces(example, alternative), units, view)
    return (shown > more_than) & ~np.asarray(units.special, dtype=bool)


def shown_in(example: Example, pieces: Sequence[Piece], units: Units, view: Box = WHOLE) -> Float[np.ndarray, "unit"]:
    """How much of each unit the pieces are: a share of a box's area; 1 for text that has some of their characters."""
    shown = np.zeros(len(units))
    if units.boxes is not None:
        seen = [piece for piece in pieces if isinstance(piece, Region | Mask)]
        boxed = [place for place, box in enumerate(units.boxes) if box]
        shown[boxed] = shares(seen, [_in_picture(box, view) for box in units.boxes if box])
    elif units.offsets is not None:
        shown[_overlapping([piece for piece in pieces if isinstance(piece, Characters)], units)] = 1
    else:
        raise InputError(
            f"the units of {example.id!r} have no places in a text (they came as model inputs): give the text itself"
        )
    shown[[piece.place for piece in pieces if isinstance(piece, Place) and piece.stream == units.stream]] = 1
    return shown


def _pieces(example: Example, alternative: int | None) -> list[Piece]:
    if example.evidence is None:
        raise InputError(f"the example {example.id!r} has no evidence marked: choose a data set or split that has")
    if alternative is None:
        return [piece for one in example.evidence for piece in one]
    if not 0 <= alternative < len(example.evidence):
        count = len(example.evidence)
        raise InputError(f"alternative={alternative}: {example.id!r} has {count} sets of evidence, counted from 0")
    return list(example.evidence[alternative])


def _overlapping(pieces: Sequence[Characters], units: Units) -> Bool[np.ndarray, "unit"]:
    assert units.offsets is not None
    marks = [np.zeros(len(text) + 1, dtype=int) for text in units.texts]
    for piece in pieces:
        if piece.segment >= len(units.texts) or piece.stop > len(units.texts[piece.segment]):
            raise InputError(f"{piece} lies outside the units' texts: the units are of another input than the example")
        marks[piece.segment][piece.start : piece.stop] = 1
    before = []  # how many characters of evidence stand before each place; white space is none
    for text, mark in zip(units.texts, marks, strict=True):
        mark[[place for place, sign in enumerate(text) if sign.isspace()]] = 0
        before.append(np.concatenate([[0], np.cumsum(mark)]))
    segments = units.segments or (0,) * len(units)
    marked = np.zeros(len(units), dtype=bool)
    for place, (segment, (start, stop)) in enumerate(zip(segments, units.offsets, strict=True)):
        # SentencePiece's mark of a word's beginning borrows the first letter's offsets where no blank stands before.
        blank = set(units.names[place]) == {"▁"} and "▁" not in units.texts[segment][start:stop]
        marked[place] = not blank and before[segment][stop] > before[segment][start]
    return marked


def _in_picture(box: Box, view: Box) -> Box:
    wide, high = view[2] - view[0], view[3] - view[1]
    return (view[0] + box[0] * wide, view[1] + box[1] * high, view[0] + box[2] * wide, view[1] + box[3] * high)


def shares(pieces: "Sequence[Piece]", boxes: Sequence[Box]) -> Float[np.ndarray, "box"]:
    """How much of each box the pieces cover together: exact areas, ignored pixels left out of both sides.

    >>> shares([Region((0.0, 0.0, 0.5, 1.0)), Region((0.25, 0.0, 0.75, 1.0))], [(0.5, 0.0, 1.0, 1.0)]).tolist()
    [0.5]
    """
    places = np.asarray(boxes, dtype=float).reshape(-1, 4)
    if not pieces or not len(places):
        return np.zeros(len(places))
    x, y = (_edges(pieces, axis) for axis in (0, 1))
    middle = ((x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2)
    inside = np.zeros((len(y) - 1, len(x) - 1), dtype=bool)
    ignored = np.zeros_like(inside)
    for piece in pieces:
        inside |= _cells(piece, *middle)
        if isinstance(piece, Mask) and piece.ignored is not None:
            ignored |= _cells(Mask(piece.ignored), *middle)
    counted = _areas(inside, x, y, places)
    whole = (places[:, 2] - places[:, 0]) * (places[:, 3] - places[:, 1]) - _areas(ignored & ~inside, x, y, places)
    return np.divide(counted, whole, out=np.zeros(len(places)), where=whole > 1e-12)


def _edges(pieces: Sequence[Piece], axis: int) -> Float[np.ndarray, "edge"]:
    """Between two neighbouring edges nothing changes along this axis (0 across, 1 down)."""
    edges = [np.asarray([0.0, 1.0])]
    for piece in pieces:
        if isinstance(piece, Mask):
            size = piece.inside.shape[1 - axis]
            edges.append(np.arange(size + 1) / size)
        elif isinstance(piece, Region):
            edges.append(np.asarray([piece.box[axis], piece.box[axis + 2]]))
    return np.unique(np.concatenate(edges))


def _cells(piece: Piece, x: Float[np.ndarray, "column"], y: Float[np.ndarray, "row"]) -> Bool[np.ndarray, "row column"]:
    if isinstance(piece, Mask):
        high, wide = piece.inside.shape
        return piece.inside[np.ix_((y * high).astype(int), (x * wide).astype(int))]
    assert isinstance(piece, Region)
    left, top, right, bottom = piece.box
    return np.outer((y > top) & (y < bottom), (x > left) & (x < right))


def _areas(
    cells: Bool[np.ndarray, "row column"],
    x: Float[np.ndarray, "edge"],
    y: Float[np.ndarray, "edge"],
    boxes: Float[np.ndarray, "box 4"],
) -> Float[np.ndarray, "box"]:
    """The marked area inside each box, from the area above and left of each crossing of edges."""
    sums = np.zeros((len(y), len(x)))
    sums[1:, 1:] = (cells * np.diff(y)[:, None] * np.diff(x)).cumsum(0).cumsum(1)

    def at(across: Float[np.ndarray, "box"], down: Float[np.ndarray, "box"]) -> Float[np.ndarray, "box"]:
        i, s = _between(across, x)
        j, t = _between(down, y)
        upper = sums[j, i] * (1 - s) + sums[j, i + 1] * s
        lower = sums[j + 1, i] * (1 - s) + sums[j + 1, i + 1] * s
        return upper * (1 - t) + lower * t

    left, top, right, bottom = boxes.T
    return at(right, bottom) - at(left, bottom) - at(right, top) + at(left, top)


def _between(
    places: Float[np.ndarray, "box"], edges: Float[np.ndarray, "edge"]
) -> tuple[np.ndarray, Float[np.ndarray, "box"]]:
    """The edge before each place, and how far it is on the way to the next."""
    index = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, len(edges) - 2)
    return index, (places - edges[index]) / (edges[index + 1] - edges[index])
