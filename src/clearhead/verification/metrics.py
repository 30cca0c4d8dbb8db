"""Distances between explanations, from which the checks compute their measurements."""

import numpy as np

from clearhead.explanation.multi_stream import AnyExplanation


def get_target_value(explanation: AnyExplanation) -> float:
    """Return the value of the explained output on the target's scale, such as a logit."""
    return float(explanation.target["value"])


def compute_max_abs_score(explanation: AnyExplanation) -> float:
    """Return the largest absolute score of all streams."""
    return max(float(np.abs(stream.scores).max(initial=0.0)) for stream in explanation.by_stream.values())


def compute_relative_gap(explanation: AnyExplanation, reference: AnyExplanation) -> float:
    """Compute the largest difference of scores relative to the largest score of the reference.

    Args:
        explanation: The explanation to compare.
        reference: The expected explanation.

    Returns:
        The relative gap; infinite if arrays are missing, differ in shape or are not finite.
    """
    gap = 0.0
    for stream, expected_stream in reference.by_stream.items():
        for name in ("scores", "matrix"):
            actual = getattr(explanation[stream], name)
            expected = getattr(expected_stream, name)
            if expected is None and actual is None:
                continue
            if actual is None or expected is None or actual.shape != expected.shape:
                return float("inf")
            if not np.isfinite([actual, expected]).all():
                return float("inf")
            gap = max(gap, float(np.abs(actual - expected).max(initial=0.0)))
    return gap / max(compute_max_abs_score(reference), 1e-30)
