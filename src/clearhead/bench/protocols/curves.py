"""Curves over the share of the input that was removed, and the area under them, as each author takes it.

Published areas differ by their ends alone: one curve gives 55.40 and 56.06 (`tests/bench/test_curves.py`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from clearhead.errors import InputError, unknown

#: How a share becomes a number of units: of those removed or of those kept the whole part, the nearest number (a half
#: to the even one, as numpy rounds), or at least one.
ROUNDINGS = ("removed", "kept", "nearest", "up")


def removed_counts(fractions: Sequence[float], count: int, rounding: str = "removed") -> list[int]:
    """How many of `count` units are removed at each fraction, in the floating-point arithmetic of the authors' code.

    >>> removed_counts([0.1, 0.9], 224 * 224)
    [5017, 45158]
    >>> [36 - gone for gone in removed_counts([0.8, 0.85, 0.9, 0.95], 36, "kept")]
    [7, 5, 3, 1]
    """
    if any(not 0 <= fraction <= 1 for fraction in fractions):
        raise InputError(f"fractions must lie between 0 and 1, but are {tuple(fractions)}")
    rules: dict[str, Callable[[float], int]] = {
        "removed": lambda f: int(count * f),
        "kept": lambda f: count - int((1 - f) * count),
        "nearest": lambda f: int(np.round(f * count)),
        "up": lambda f: min(count, math.ceil(f * count - 1e-9)),
    }
    if rounding not in rules:
        raise unknown("rounding", rounding, ROUNDINGS)
    return [rules[rounding](fraction) for fraction in fractions]


def area(fractions: Sequence[float], values: Sequence[float], convention: str = "clearhead") -> float:
    """The area under a curve whose first point is the clean input, at 0.

    te: trapezoids up to 0.9 (Transformer-Explainability, as its maintainer says); bi: a zero is put at 1, whatever the
    model says there (Beyond Intuition); idl: the plain mean of all points (InterpretDL); clearhead: trapezoids over
    all points that were measured, divided by the share that they span: the mean height of the curve

    >>> area([0, 0.5, 1], [1.0, 0.5, 0.0]), area([0, 0.5], [1.0, 0.5])
    (0.5, 0.75)
    """
    if convention not in CONVENTIONS:
        raise unknown("convention", convention, CONVENTIONS)
    if len(fractions) != len(values) or len(values) < 2 or fractions[0] != 0:
        raise InputError(f"a curve needs as many fractions as values, the first at 0; it has {fractions} and {values}")
    x, y = np.asarray(fractions, dtype=float), np.asarray(values, dtype=float)
    if convention == "idl":
        return float(y.mean())
    if convention == "clearhead":
        return float(np.trapezoid(y, x) / (x[-1] - x[0]))
    inside = x <= 0.9 + 1e-9 if convention == "te" else x < 1
    x, y = x[inside], y[inside]
    if convention == "bi":
        x, y = np.append(x, 1.0), np.append(y, 0.0)
    return float(np.trapezoid(y, x))


CONVENTIONS = ("te", "bi", "idl", "clearhead")
