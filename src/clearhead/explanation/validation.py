"""Is what came from outside, out of a file or as JSON, an explanation that can be shown?"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Explanation

#: The shape of each array: None for any number of rows, "unit" for one entry per unit.
_SHAPES: dict[str, tuple[int | str | None, ...]] = {
    "scores": ("unit",),
    "matrix": (None, "unit"),
    "per_layer": (None, "unit"),
    "per_head": (None, None, "unit"),
    "factors": (None, "unit"),
    "picture": (None, None, 3),
}


def problems(made: "Explanation") -> Iterator[str]:
    """What is wrong with an explanation that came from outside."""
    yield from _problems_of_units(made.units)
    if made.steps is not None and (made.matrix is None or len(made.matrix) != len(made.steps)):
        yield f"a matrix that does not fit its {len(made.steps)} steps"
    for name, shape in _SHAPES.items():
        part, kinds = getattr(made, name), "u" if name == "picture" else "fiu"
        if part is None and name != "scores":
            continue
        wanted = [len(made.units) if side == "unit" else side for side in shape]
        there = np.shape(part)
        if len(there) != len(wanted) or any(side not in (None, size) for side, size in zip(wanted, there, strict=True)):
            yield f"{name} of the shape {there} for {len(made.units)} units"
        if part.dtype.kind not in kinds:
            yield f"{name} of {part.dtype}"
    for name in ("target", "prediction", "certificate", "provenance"):
        if not isinstance(getattr(made, name), Mapping):
            yield f"its {name} is {getattr(made, name)!r:.40}"
    described = made.target.get("steps", [])
    fit = isinstance(described, list) and len(described) in (0, len(made.steps or ()))
    if not fit or not all(isinstance(step, Mapping) for step in described):
        yield f"its target has the steps {described!r:.40}"
        described = []
    for step in (made.target, *described):
        if step.get("box") is not None and not _are((int, float), frozen(step["box"]), 4):
            yield f"{step['box']!r:.40} stands where a box should"
    rows = made.prediction.get("top", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "label" in row for row in rows):
        yield f"its prediction lists {rows!r:.40}"
        rows = []
    figures = [made.base_value, made.target.get("value"), made.prediction.get("value")]
    figures += [made.certificate.get(name) for name in ("capture_error", "truncated_tokens")]
    figures += [row.get(name) for row in rows for name in ("probability", "logit")]
    figures += [step.get(name) for step in described for name in ("value", "probability")]
    for figure in figures:
        if figure is not None and not isinstance(figure, int | float):
            yield f"{figure!r:.40} stands where a number should"
    if not isinstance(made.method, str):
        yield f"its method is {made.method!r:.40}"


def _problems_of_units(units: Units) -> Iterator[str]:
    if not isinstance(units.names, tuple) or not all(isinstance(name, str) for name in units.names):
        yield "the names of its units are no list of texts"
    for name in ("special", "segments", "offsets", "boxes"):
        part = getattr(units, name)
        if part is None and name != "special":
            continue
        if not isinstance(part, tuple) or len(part) != len(units):
            yield f"units.{name} do not fit the {len(units)} units"
    if not isinstance(units.texts, tuple) or not all(isinstance(text, str) for text in units.texts):
        yield "units.texts are no list of texts"
    if not all(segment in range(max(len(units.texts), 1)) for segment in units.segments or ()):
        yield "units.segments name texts that are not there"
    if not all(_are(int, span, 2) for span in units.offsets or ()):
        yield "units.offsets are no pairs of numbers"
    if not all(box is None or _are((int, float), box, 4) for box in units.boxes or ()):
        yield "units.boxes are no fours of numbers"
    grid = units.grid
    if grid is not None and (not _are(int, grid, 2) or math.prod(grid) != len(units.drop_special())):
        yield f"units.grid={units.grid} does not fit its patches"


def _are(kind: Any, parts: Any, count: int) -> bool:
    return isinstance(parts, tuple) and len(parts) == count and all(isinstance(part, kind) for part in parts)


def frozen(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value
