"""Validation of method options, done once when a `Method` is created."""

from collections.abc import Callable
from math import inf
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from clearhead.errors import InputError, unknown_value_error

LayerRange = tuple[int | None, int | None]


def _parse_layers(value: Any) -> LayerRange:
    """Convert (first, stop), or a range of step one, to a half-open range of layers."""
    bounds = value
    if isinstance(value, range):
        bounds = (value.start, value.stop) if value.step == 1 else ()
    try:
        first, stop = bounds
        return _parse_index(first), _parse_index(stop)
    except (TypeError, ValueError):
        message = f"layers={value!r} is not a half-open range: use (first, stop), e.g. (-4, None) or (0, 6)"
        raise InputError(message) from None


def _parse_index(value: Any) -> int | None:
    """Convert an integer of any type, such as NumPy's, to int; None stays None."""
    if value is None:
        return None
    return index(value)


def _parse_heads(value: Any) -> tuple[int, ...]:
    """Convert head indices to a tuple of integers."""
    try:
        return tuple(index(head) for head in value)
    except TypeError:
        message = f"heads={value!r} is not a list of heads: use head indices, counted from 0, e.g. [0, 3]"
        raise InputError(message) from None


def _parse_rows(value: Any) -> str:
    """Check that the value is "all", the only one besides the default."""
    if value != "all":
        raise InputError(f"rows={value!r} is not valid: leave it out for the read-out position only, or use rows='all'")
    return "all"


def validate_option(name: str, value: Any, type_hint: Any) -> Any:
    """Check an option of a method against its type annotation and return it.

    Types are checked strictly, since any non-empty string is true in Python, "False" included.

    Args:
        name: The name of the option, for the message.
        value: The value; a list becomes a tuple.
        type_hint: The annotation of the option's field.

    Raises:
        InputError: The value is not of this type.
    """
    if type_hint is bool and not isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not valid: use True or False")
    if get_origin(type_hint) is Literal and value not in get_args(type_hint):
        raise unknown_value_error(name, value, get_args(type_hint))
    if isinstance(value, list):
        value = tuple(value)
    accepted_types = (type_hint,)
    if isinstance(type_hint, UnionType):
        accepted_types = get_args(type_hint)
    if not any(_matches_type(value, accepted_type) for accepted_type in accepted_types):
        descriptions = [text for known_type, text in TYPE_DESCRIPTIONS.items() if known_type in accepted_types]
        raise InputError(f"{name}={value!r} is not valid: use {' or '.join(descriptions) or type_hint}")
    return value


#: Descriptions of option types, for messages.
TYPE_DESCRIPTIONS: dict[Any, str] = {
    int: "an integer",
    float: "a number that is not negative",
    str: "a string",
    tuple[str, ...]: "several strings",
    NoneType: "None",
}


def _matches_type(value: Any, expected_type: Any) -> bool:
    """Whether a value is of this type. Floats are sizes and widths, so they must be finite and not negative."""
    if expected_type is float:
        return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < inf
    if expected_type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected_type == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    # the method itself checks types that `isinstance` cannot
    return not isinstance(expected_type, type) or isinstance(value, expected_type)


#: The options that several methods share, with their validation.
SHARED_OPTION_PARSERS: dict[str, Callable[[Any], Any]] = {
    "layers": _parse_layers,
    "heads": _parse_heads,
    "rows": _parse_rows,
}
