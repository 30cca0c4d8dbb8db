"""Ground-truth evidence in coordinates of the input (characters, boxes, masks), and its mapping to units."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data.base import Example
from clearhead.errors import InputError
from clearhead.units import Box, Units

FULL_VIEW: Box = (0.0, 0.0, 1.0, 1.0)
#: Smaller coverages are rounding errors of differences of areas (at most 1e-15 on the zoo's tasks).
MIN_COVERAGE = 1e-9


@dataclass(frozen=True)
class CharSpan:
    """The characters from `start` up to `stop` of a text; `segment` is the index of the text in a pair.

    Attributes:
        start: Index of the first character.
        stop: Index after the last one.
        segment: Index of the text, 0 for single texts.

    Raises:
        InputError: If start is not below stop.
    """

    start: int
    stop: int
    segment: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(f"characters {self.start} to {self.stop} are not a span: start must be below stop")


@dataclass(frozen=True)
class ImageBox:
    """A box in an image, in fractions of its width and height: left, top, right, bottom.

    Attributes:
        box: The four fractions, from 0 to 1.

    Raises:
        InputError: If the box is empty or not inside the image.
    """

    box: Box

    def __post_init__(self) -> None:
        left_edge, top_edge, right_edge, bottom_edge = self.box
        if not (0 <= left_edge < right_edge <= 1 and 0 <= top_edge < bottom_edge <= 1):
            raise InputError(f"the box {self.box} is not inside the image: use fractions (left, top, right, bottom)")

    @classmethod
    def from_pixels(cls, box: Sequence[float], width: float, height: float) -> "ImageBox | None":
        """Create a box from pixels, clipped to the image.

        Args:
            box: Left, top, right and bottom edge in pixels; right and bottom are exclusive.
            width: Width of the image in pixels.
            height: Height of the image in pixels.

        Returns:
            The box in fractions of the image; None if nothing of it lies inside.

        Example:
            >>> ImageBox.from_pixels((8, 0, 40, 16), width=32, height=32)
            ImageBox(box=(0.25, 0.0, 1.0, 0.5))
        """
        x_min, x_max = (min(max(float(x) / width, 0.0), 1.0) for x in (box[0], box[2]))
        y_min, y_max = (min(max(float(y) / height, 0.0), 1.0) for y in (box[1], box[3]))
        if not (x_min < x_max and y_min < y_max):
            return None
        return cls((x_min, y_min, x_max, y_max))


@dataclass(frozen=True, eq=False)
class EvidenceMask:
    """A pixel mask of an image.

    Attributes:
        pixels: True inside the object.
        ignored_pixels: Undecided pixels (an unclear border), counted neither inside nor outside.
        label: Class of the object, if the image shows objects of several classes.
        is_crowd: True if the mask covers a group of objects.
    """

    pixels: Bool[np.ndarray, "height width"]
    ignored_pixels: Bool[np.ndarray, "height width"] | None = None
    label: int | None = None
    is_crowd: bool = False

    def __post_init__(self) -> None:
        for mask in (self.pixels, self.ignored_pixels):
            if mask is not None and (mask.dtype != bool or mask.shape != self.pixels.shape or mask.ndim != 2):
                raise InputError(f"a mask must be a boolean array of height × width, not {mask.dtype} {mask.shape}")


@dataclass(frozen=True)
class UnitIndex:
    """One unit of a stream by its index: a detector's regions may overlap, so a box does not identify one.

    Attributes:
        index: Index of the unit in its stream.
        stream: Name of the stream.
    """

    index: int
    stream: str


EvidenceItem = CharSpan | ImageBox | EvidenceMask | UnitIndex


def find_evidence_units(
    example: Example,
    units: Units,
    alternative: int | None = None,
    coverage_threshold: float = 0.5,
    view_box: Box = FULL_VIEW,
) -> Bool[np.ndarray, "unit"]:
    """Return which units are evidence; special units never are.

    A token is evidence if one of its characters (white space aside) is; a patch or region if more than
    `coverage_threshold` of its area is.

    Args:
        example: Example with evidence.
        units: Units of one stream of its explanation.
        alternative: Index of one of the alternative evidence sets; None for their union.
        coverage_threshold: Covered fraction of a box above which it is evidence.
        view_box: Part of the image that the model sees, if its processor crops.

    Returns:
        A mask over the units.

    Raises:
        InputError: If the example is not annotated, or the units belong to another input.

    Example:
        >>> from clearhead.units import Units
        >>> units = Units("text", "word", ("so", "good"), (False, False), ("so good",), (0, 0), ((0, 2), (3, 7)))
        >>> find_evidence_units(Example("1", "so good", 1, ((CharSpan(3, 7),),)), units).tolist()
        [False, True]
    """
    coverage = compute_evidence_coverage(example, _collect_evidence(example, alternative), units, view_box)
    return (coverage > coverage_threshold) & ~np.asarray(units.special, dtype=bool)


def compute_evidence_coverage(
    example: Example, items: Sequence[EvidenceItem], units: Units, view_box: Box = FULL_VIEW
) -> Float[np.ndarray, "unit"]:
    """Compute which fraction of each unit is evidence.

    Args:
        example: The example, for the error.
        items: The evidence.
        units: The units of one stream; items of other streams are ignored.
        view_box: The part of the image that the model sees, in fractions of the image.

    Returns:
        For units with boxes the fraction of their area; for tokens 1 if they share a character with an item, else 0.

    Raises:
        InputError: If the units have no positions in a text.
    """
    coverage = np.zeros(len(units))
    if units.boxes is not None:
        image_items = [item for item in items if isinstance(item, ImageBox | EvidenceMask)]
        units_with_box = [unit for unit, box in enumerate(units.boxes) if box]
        image_boxes = [_view_to_image_box(box, view_box) for box in units.boxes if box]
        coverage[units_with_box] = compute_box_coverage(image_items, image_boxes)
    elif units.offsets is not None:
        coverage[_find_overlapping_units([item for item in items if isinstance(item, CharSpan)], units)] = 1
    else:
        raise InputError(
            f"the units of {example.id!r} have no positions in a text (they were given as model inputs): pass the text "
            "itself"
        )
    coverage[[item.index for item in items if isinstance(item, UnitIndex) and item.stream == units.stream]] = 1
    return coverage


def _collect_evidence(example: Example, alternative: int | None) -> list[EvidenceItem]:
    """Return the items of the evidence set with index `alternative`, or of all sets if it is None."""
    if example.evidence is None:
        raise InputError(f"the example {example.id!r} has no marked evidence: choose a data set or split that has it")
    if alternative is None:
        return [item for items in example.evidence for item in items]
    if not 0 <= alternative < len(example.evidence):
        count = len(example.evidence)
        raise InputError(
            f"alternative={alternative} does not exist: {example.id!r} has {count} sets of evidence, counted from 0"
        )
    return list(example.evidence[alternative])


def _find_overlapping_units(spans: Sequence[CharSpan], units: Units) -> Bool[np.ndarray, "unit"]:
    """Return which units share a non-space character with one of the spans."""
    assert units.offsets is not None
    is_evidence = [np.zeros(len(text) + 1, dtype=int) for text in units.texts]
    for span in spans:
        if span.segment >= len(units.texts) or span.stop > len(units.texts[span.segment]):
            raise InputError(
                f"{span} lies outside the units' texts: the units and the example belong to different inputs"
            )
        is_evidence[span.segment][span.start : span.stop] = 1
    num_preceding = []  # cumulative number of evidence characters before each position, white space excluded
    for text, mask in zip(units.texts, is_evidence, strict=True):
        mask[[position for position, character in enumerate(text) if character.isspace()]] = 0
        num_preceding.append(np.concatenate([[0], np.cumsum(mask)]))
    segments = units.segments or (0,) * len(units)
    overlaps = np.zeros(len(units), dtype=bool)
    for unit, (segment, (start, stop)) in enumerate(zip(segments, units.offsets, strict=True)):
        # SentencePiece's word-start marker takes the offsets of the first letter if no space precedes it
        is_bare_marker = set(units.names[unit]) == {"▁"} and "▁" not in units.texts[segment][start:stop]
        overlaps[unit] = not is_bare_marker and num_preceding[segment][stop] > num_preceding[segment][start]
    return overlaps


def _view_to_image_box(box: Box, view: Box) -> Box:
    """Convert a box in fractions of the view to fractions of the whole image."""
    width = view[2] - view[0]
    height = view[3] - view[1]
    return (view[0] + box[0] * width, view[1] + box[1] * height, view[0] + box[2] * width, view[1] + box[3] * height)


def compute_box_coverage(items: "Sequence[EvidenceItem]", boxes: Sequence[Box]) -> Float[np.ndarray, "box"]:
    """Compute the exact fraction of each box that the items cover together; ignored pixels count on neither side.

    Args:
        items: Boxes and masks of evidence, which may overlap.
        boxes: The boxes of units.

    Returns:
        Fractions from 0 to 1.

    Example:
        >>> items = [ImageBox((0.0, 0.0, 0.5, 1.0)), ImageBox((0.25, 0.0, 0.75, 1.0))]
        >>> compute_box_coverage(items, [(0.5, 0.0, 1.0, 1.0)]).tolist()
        [0.5]
    """
    box_array = np.asarray(boxes, dtype=float).reshape(-1, 4)
    if not items or not len(box_array):
        return np.zeros(len(box_array))
    x, y = (_collect_edges(items, axis) for axis in (0, 1))
    cell_centres = ((x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2)
    covered = np.zeros((len(y) - 1, len(x) - 1), dtype=bool)
    ignored = np.zeros_like(covered)
    for item in items:
        covered |= _rasterise(item, *cell_centres)
        if isinstance(item, EvidenceMask) and item.ignored_pixels is not None:
            ignored |= _rasterise(EvidenceMask(item.ignored_pixels), *cell_centres)
    covered_area = _compute_covered_areas(covered, x, y, box_array)
    box_area = (box_array[:, 2] - box_array[:, 0]) * (box_array[:, 3] - box_array[:, 1])
    valid_area = box_area - _compute_covered_areas(ignored & ~covered, x, y, box_array)
    coverage = np.divide(covered_area, valid_area, out=np.zeros(len(box_array)), where=valid_area > 1e-12)
    return np.where(coverage > MIN_COVERAGE, coverage, 0.0)


def _collect_edges(items: Sequence[EvidenceItem], axis: int) -> Float[np.ndarray, "edge"]:
    """Return all edges along an axis (0 horizontal, 1 vertical); between adjacent edges coverage is constant."""
    edges = [np.asarray([0.0, 1.0])]
    for item in items:
        if isinstance(item, EvidenceMask):
            size = item.pixels.shape[1 - axis]
            edges.append(np.arange(size + 1) / size)
        elif isinstance(item, ImageBox):
            edges.append(np.asarray([item.box[axis], item.box[axis + 2]]))
    return np.unique(np.concatenate(edges))


def _rasterise(
    item: EvidenceItem, x: Float[np.ndarray, "column"], y: Float[np.ndarray, "row"]
) -> Bool[np.ndarray, "row column"]:
    """Sample a mask or box at the grid points x × y, which are fractions of the image."""
    if isinstance(item, EvidenceMask):
        height, width = item.pixels.shape
        return item.pixels[np.ix_((y * height).astype(int), (x * width).astype(int))]
    assert isinstance(item, ImageBox)
    x_min, y_min, x_max, y_max = item.box
    return np.outer((y > y_min) & (y < y_max), (x > x_min) & (x < x_max))


def _compute_covered_areas(
    cells: Bool[np.ndarray, "row column"],
    x: Float[np.ndarray, "edge"],
    y: Float[np.ndarray, "edge"],
    boxes: Float[np.ndarray, "box 4"],
) -> Float[np.ndarray, "box"]:
    """Compute the marked area inside each box from a summed-area table over the edges."""
    sums = np.zeros((len(y), len(x)))
    sums[1:, 1:] = (cells * np.diff(y)[:, None] * np.diff(x)).cumsum(0).cumsum(1)

    def interpolate(across: Float[np.ndarray, "box"], down: Float[np.ndarray, "box"]) -> Float[np.ndarray, "box"]:
        i, s = _locate_between_edges(across, x)
        j, t = _locate_between_edges(down, y)
        upper = sums[j, i] * (1 - s) + sums[j, i + 1] * s
        lower = sums[j + 1, i] * (1 - s) + sums[j + 1, i + 1] * s
        return upper * (1 - t) + lower * t

    x_min, y_min, x_max, y_max = boxes.T
    return interpolate(x_max, y_max) - interpolate(x_min, y_max) - interpolate(x_max, y_min) + interpolate(x_min, y_min)


def _locate_between_edges(
    positions: Float[np.ndarray, "box"], edges: Float[np.ndarray, "edge"]
) -> tuple[np.ndarray, Float[np.ndarray, "box"]]:
    """Return the index of the edge before each position, and the fraction of the distance to the next edge."""
    index = np.clip(np.searchsorted(edges, positions, side="right") - 1, 0, len(edges) - 2)
    return index, (positions - edges[index]) / (edges[index + 1] - edges[index])
