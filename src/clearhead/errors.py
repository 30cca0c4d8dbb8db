"""What clearhead says when it cannot do what was asked: what was given, what is accepted, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class ClearheadError(Exception):
    """Base of every error that clearhead raises on purpose. The command line prints it as one line."""


class InputError(ClearheadError, ValueError):
    """The input, target or option given cannot be used as it is."""


class Refusal(ClearheadError):
    """A model, or a method on a model, that clearhead will not explain because the answer would be wrong."""


class ClearheadWarning(UserWarning):
    """Base of what clearhead says beside a result. The command line prints it as one line."""


class CostWarning(ClearheadWarning):
    """What was asked for may take long; it is said before it begins."""


def unknown(what: str, given: object, accepted: Iterable[object]) -> InputError:
    """An error that names the nearest accepted word.

    >>> str(unknown("method", "grad-sm", ["grad-sam", "generic"]))
    "unknown method 'grad-sm': did you mean 'grad-sam'? Accepted: grad-sam, generic"
    """
    words = [str(word) for word in accepted]
    near = get_close_matches(str(given), words, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else "."
    listed = ", ".join(words[:40]) + (f", … ({len(words)} in all)" if len(words) > 40 else "")
    return InputError(f"unknown {what} {given!r}{hint} Accepted: {listed}")
