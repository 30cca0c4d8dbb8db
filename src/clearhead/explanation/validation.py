"""Validation of explanations read from files or JSON: yields descriptions of problems, instead of raising an error."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import InputError
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Explanation

#: The shape of each array: None for any size, "unit" for one entry per unit.
_ARRAY_SHAPES: dict[str, tuple[int | str | None, ...]] = {
    "scores": ("unit",),
    "matrix": (None, "unit"),
    "per_layer": (None, "unit"),
    "per_head": (None, None, "unit"),
    "factors": (None, "unit"),
    "component_scores": (None, "unit"),
    "intervals": ("unit", 2),
    "covariance": ("unit", "unit"),
    "image": (None, None, 3),
}


def iter_explanation_problems(explanation: "Explanation") -> Iterator[str]:
    """Yield every problem of an explanation that was read from a file or JSON.

    Args:
        explanation: An explanation whose fields may have any type.

    Yields:
        A description of each problem. Nothing is yielded for a valid explanation.
    """
    yield from _iter_unit_problems(explanation.units)
    if explanation.steps is not None and (
        explanation.matrix is None or len(explanation.matrix) != len(explanation.steps)
    ):
        yield f"a matrix that does not fit its {len(explanation.steps)} steps"
    for name, shape in _ARRAY_SHAPES.items():
        array = getattr(explanation, name)
        if array is None and name != "scores":
            continue
        if not _has_shape(array, shape, len(explanation.units)):
            yield f"{name} of the shape {np.shape(array)} for {len(explanation.units)} units"
        dtype_kinds = "u" if name == "image" else "fiu"
        if array.dtype.kind not in dtype_kinds:
            yield f"{name} of {array.dtype}"
    for name in ("target", "prediction", "certificate", "provenance"):
        if not isinstance(getattr(explanation, name), Mapping):
            yield f"its {name} is {getattr(explanation, name)!r:.40}"
    step_targets = explanation.target.get("steps", [])
    fits = isinstance(step_targets, list) and len(step_targets) in (0, len(explanation.steps or ()))
    if not fits or not all(isinstance(target, Mapping) for target in step_targets):
        yield f"its target has the steps {step_targets!r:.40}"
        step_targets = []
    for target in (explanation.target, *step_targets):
        if target.get("box") is not None and not _is_tuple_of((int, float), lists_to_tuples(target["box"]), 4):
            yield f"{target['box']!r:.40} is not a box"
    top_labels = explanation.prediction.get("top", [])
    if not isinstance(top_labels, list) or not all(isinstance(row, Mapping) and "label" in row for row in top_labels):
        yield f"its prediction lists {top_labels!r:.40}"
        top_labels = []
    numbers = [explanation.base_value, explanation.target.get("value"), explanation.prediction.get("value")]
    numbers += [explanation.certificate.get(name) for name in ("capture_error", "truncated_tokens")]
    numbers += [row.get(name) for row in top_labels for name in ("probability", "logit")]
    numbers += [target.get(name) for target in step_targets for name in ("value", "probability")]
    for number in numbers:
        if number is not None and not isinstance(number, int | float):
            yield f"{number!r:.40} is not a number"
    warnings = explanation.certificate.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(warning, str) for warning in warnings):
        yield f"its certificate has the warnings {warnings!r:.40}"
    if not isinstance(explanation.method, str):
        yield f"its method is {explanation.method!r:.40}"


def check_format(metadata: Mapping[str, Any], schema: str, version: int) -> None:
    """Check the name and version of the format of an explanation that was read from a file or JSON.

    Args:
        metadata: The JSON form.
        schema: The name of the format that the caller reads.
        version: The only version of it that the caller reads.

    Raises:
        InputError: If it is another format, or another version of it.
    """
    found_schema, found_version = metadata.get("schema"), metadata.get("version")
    if isinstance(found_schema, str) and found_schema.startswith("clearhead/") and found_schema != schema:
        raise InputError(
            f"this is not an explanation saved by clearhead: its format is {found_schema}; this version of clearhead "
            "reads clearhead/explanation and clearhead/multi-stream-explanation"
        )
    if found_schema != schema or not isinstance(found_version, int):
        raise InputError("this is not an explanation saved by clearhead")
    if found_version > version:
        raise InputError(
            f"this explanation was written by a newer version of clearhead (file format {found_version}; this version "
            f"reads format {version}): update clearhead, or explain the input again"
        )
    if found_version < version:
        raise InputError(
            f"this explanation was written by an older version of clearhead (file format {found_version}; this version "
            f"reads format {version}): explain the input again"
        )


def _has_shape(array: Any, shape: tuple[int | str | None, ...], num_units: int) -> bool:
    """Whether an array has a shape, in which None is any size and "unit" the number of units."""
    sizes = np.shape(array)
    expected = [num_units if side == "unit" else side for side in shape]
    return len(sizes) == len(expected) and all(side in (None, size) for side, size in zip(expected, sizes, strict=True))


def _iter_unit_problems(units: Units) -> Iterator[str]:
    """Yield every field of the units whose type, length or range is wrong."""
    if not isinstance(units.names, tuple) or not all(isinstance(name, str) for name in units.names):
        yield "the names of its units are not a list of texts"
    for name in ("special", "segments", "offsets", "boxes"):
        values = getattr(units, name)
        if values is None and name != "special":
            continue
        if not isinstance(values, tuple) or len(values) != len(units):
            yield f"units.{name} do not fit the {len(units)} units"
    if not isinstance(units.texts, tuple) or not all(isinstance(text, str) for text in units.texts):
        yield "units.texts is not a list of texts"
    if not all(segment in range(max(len(units.texts), 1)) for segment in units.segments or ()):
        yield "units.segments refers to texts that do not exist"
    if not all(_is_tuple_of(int, span, 2) for span in units.offsets or ()):
        yield "units.offsets are not pairs of integers"
    if not all(box is None or _is_tuple_of((int, float), box, 4) for box in units.boxes or ()):
        yield "units.boxes do not have four numbers each"
    grid = units.grid
    if grid is not None and (not _is_tuple_of(int, grid, 2) or math.prod(grid) != len(units.content_indices())):
        yield f"units.grid={units.grid} does not fit its patches"


def _is_tuple_of(types: Any, value: Any, length: int) -> bool:
    """Whether a value is a tuple of this length with items of these types."""
    return isinstance(value, tuple) and len(value) == length and all(isinstance(item, types) for item in value)


def lists_to_tuples(value: Any) -> Any:
    """Convert nested lists, as JSON has them, to tuples.

    Args:
        value: Any value.

    Returns:
        A nested tuple for a list or tuple, and any other value unchanged.
    """
    if isinstance(value, list | tuple):
        return tuple(lists_to_tuples(item) for item in value)
    return value
