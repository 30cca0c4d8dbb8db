"""Areas under perturbation curves (metric over removed fraction), by the convention of each author.

Published areas differ by the treatment of the curve's ends alone: one curve gives 55.40 and 56.06
(`tests/bench/test_curves.py`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from clearhead.errors import InputError, unknown_value_error

#: How a fraction becomes a number of removed units: round the removed or the kept number down, round to the nearest
#: integer (halves to even, like numpy), or round up.
ROUNDING_RULES = ("removed", "kept", "nearest", "up")


def compute_removed_counts(fractions: Sequence[float], count: int, rounding: str = "removed") -> list[int]:
    """Return how many of `count` units are removed at each fraction, in the floating-point arithmetic of the authors.

    >>> compute_removed_counts([0.1, 0.9], 224 * 224)
    [5017, 45158]
    >>> [36 - removed for removed in compute_removed_counts([0.8, 0.85, 0.9, 0.95], 36, "kept")]
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
        raise unknown_value_error("rounding", rounding, ROUNDING_RULES)
    return [rules[rounding](fraction) for fraction in fractions]


def compute_curve_area(fractions: Sequence[float], values: Sequence[float], convention: str = "clearhead") -> float:
    """Compute the area under a curve whose first point is the unperturbed input, at fraction 0.

    Conventions:
        te: trapezoids up to 0.9 (Transformer-Explainability, according to its maintainer).
        bi: trapezoids with a zero appended at 1, whatever the model predicts there (Beyond Intuition).
        idl: plain mean of all points (InterpretDL).
        clearhead: trapezoids over all measured points, divided by the fraction they span: the mean height of the curve.

    >>> compute_curve_area([0, 0.5, 1], [1.0, 0.5, 0.0]), compute_curve_area([0, 0.5], [1.0, 0.5])
    (0.5, 0.75)
    """
    if convention not in AREA_CONVENTIONS:
        raise unknown_value_error("convention", convention, AREA_CONVENTIONS)
    if len(fractions) != len(values) or len(values) < 2 or fractions[0] != 0:
        raise InputError(f"a curve needs as many fractions as values, the first at 0; it has {fractions} and {values}")
    x = np.asarray(fractions, dtype=float)
    y = np.asarray(values, dtype=float)
    if convention == "idl":
        return float(y.mean())
    if convention == "clearhead":
        return float(np.trapezoid(y, x) / (x[-1] - x[0]))
    if convention == "te":
        is_included = x <= 0.9 + 1e-9
        return float(np.trapezoid(y[is_included], x[is_included]))
    is_included = x < 1
    return float(np.trapezoid(np.append(y[is_included], 0.0), np.append(x[is_included], 1.0)))


AREA_CONVENTIONS = ("te", "bi", "idl", "clearhead")
