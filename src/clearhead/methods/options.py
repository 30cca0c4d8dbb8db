"""Options of methods, made sure of when a method is named: bad ones give one clear message."""

from collections.abc import Callable
from math import inf
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from clearhead.errors import InputError, unknown

Layers = tuple[int | None, int | None]


def _layers(given: Any) -> Layers:
    ends = given
    if isinstance(given, range):
        ends = (given.start, given.stop) if given.step == 1 else ()
    try:
        first, stop = ends
        return None if first is None else index(first), None if stop is None else index(stop)
    except (TypeError, ValueError):
        said = f"layers={given!r} is not a half-open range: say (first, stop), e.g. (-4, None) or (0, 6)"
        raise InputError(said) from None


def _heads(given: Any) -> tuple[int, ...]:
    try:
        return tuple(index(head) for head in given)
    except TypeError:
        said = f"heads={given!r} is not a list of heads: say which ones, counted from 0, e.g. [0, 3]"
        raise InputError(said) from None


def _rows(given: Any) -> str:
    if given != "all":
        raise InputError(f"rows={given!r} is not known: leave it out for the read-out, or say rows='all'")
    return "all"


def own_option(key: str, given: Any, hint: Any) -> Any:
    """An option of one method, held to its type: any text is true to Python, "False" among them."""
    if hint is bool and not isinstance(given, bool):
        raise InputError(f"{key}={given!r} is neither True nor False")
    if get_origin(hint) is Literal and given not in get_args(hint):
        raise unknown(key, given, get_args(hint))
    given = tuple(given) if isinstance(given, list) else given
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not any(_is_one(given, kind) for kind in kinds):
        wanted = " or ".join(said for kind, said in SAID.items() if kind in kinds)
        raise InputError(f"{key}={given!r} is not possible: give {wanted or hint}")
    return given


#: Types of options, in words.
SAID: dict[Any, str] = {
    int: "a whole number",
    float: "a number that is not negative",
    str: "a text",
    tuple[str, ...]: "several texts",
    NoneType: "None",
}


def _is_one(given: Any, kind: Any) -> bool:
    """Whether an option is of this type. Numbers are sizes, counts and widths: none of them is below zero or NaN."""
    if kind is float:
        return isinstance(given, Real) and not isinstance(given, bool) and 0 <= float(given) < inf
    if kind is int:
        return isinstance(given, int) and not isinstance(given, bool)
    if kind == tuple[str, ...]:
        return isinstance(given, tuple) and all(isinstance(one, str) for one in given)
    return not isinstance(kind, type) or isinstance(given, kind)  # other types are their methods' own to check


#: The options that methods share, and how each is made sure of.
SHARED: dict[str, Callable[[Any], Any]] = {"layers": _layers, "heads": _heads, "rows": _rows}
