"""Exceptions and warnings of clearhead. A message names the given value, the accepted values and the remedy."""

from collections.abc import Iterable
from difflib import get_close_matches


class ClearheadError(Exception):
    """Base class of all errors that clearhead raises deliberately. The command line prints them as one line."""


class InputError(ClearheadError, ValueError):
    """An input, target or option is invalid."""


class UnsupportedError(ClearheadError):
    """A model, or a method on a model, is not supported: its explanation would be wrong or cannot be computed."""


class ClearheadWarning(UserWarning):
    """Base class of all warnings of clearhead. The command line prints them as one line."""


class CostWarning(ClearheadWarning):
    """A computation may take long; issued before it begins."""


def unknown_value_error(name: str, value: object, accepted: Iterable[object]) -> InputError:
    """Build the error for an unknown value, with the closest accepted value as a suggestion.

    Args:
        name: Name of the option, e.g. "method".
        value: The value given.
        accepted: The accepted values; at most 40 of them are listed.

    Returns:
        The error, to be raised by the caller.

    Example:
        >>> str(unknown_value_error("method", "grad-sm", ["grad-sam", "generic"]))
        "unknown method 'grad-sm': did you mean 'grad-sam'? Accepted: grad-sam, generic"
    """
    options = [str(option) for option in accepted]
    suggestions = get_close_matches(str(value), options, n=1, cutoff=0.5)
    hint = f": did you mean {suggestions[0]!r}?" if suggestions else "."
    listing = ", ".join(options[:40])
    if len(options) > 40:
        listing += f", … ({len(options)} in all)"
    return InputError(f"unknown {name} {value!r}{hint} Accepted: {listing}")
