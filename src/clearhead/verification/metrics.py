"""How explanations differ: what a figure of a promise is made of."""

import numpy as np

from clearhead.explanation.multi_stream import AnyExplanation


def value(e: AnyExplanation) -> float:
    return float(e.target["value"])


def size(e: AnyExplanation) -> float:
    """The largest score of all streams."""
    return max(float(np.abs(part.scores).max(initial=0.0)) for part in e.parts.values())


def gap(one: AnyExplanation, other: AnyExplanation) -> float:
    """The largest difference of scores, relative to the largest score; what is no number is infinitely far."""
    worst = 0.0
    for stream, part in other.parts.items():
        for mine, yours in ((one[stream].scores, part.scores), (one[stream].matrix, part.matrix)):
            if yours is None and mine is None:
                continue
            if mine is None or yours is None or mine.shape != yours.shape or not np.isfinite([mine, yours]).all():
                return float("inf")
            worst = max(worst, float(np.abs(mine - yours).max(initial=0.0)))
    return worst / max(size(other), 1e-30)
