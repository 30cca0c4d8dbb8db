"""The two tests of TCAV, and the interval of a score; why these and not the usual ones, `concepts/tcav.py` says."""

import math

import numpy as np
from jaxtyping import Float
from scipy import stats

from clearhead.bench.statistics import LEVEL


def against_random(magnitude: float, chance: Float[np.ndarray, "set"]) -> float:
    """One draw against a sample of draws (Crawford and Howell's t), two-sided."""
    spread = float(chance.std(ddof=1)) * math.sqrt(1 + 1 / len(chance))
    return two_sided(magnitude - float(chance.mean()), spread, len(chance))


def against_half(scores: Float[np.ndarray, "run"], inputs: int) -> float:
    """Correlated runs against 0.5, two-sided."""
    return two_sided(
        float(scores.mean()) - 0.5, spread_of(scores, inputs) * math.sqrt(1 + 1 / len(scores)), len(scores)
    )


def binomial_interval(score: float, inputs: int) -> tuple[float, float]:
    """Clopper and Pearson's: where the share would lie with other inputs of the class."""
    if math.isnan(score):
        return math.nan, math.nan
    found = stats.binomtest(round(score * inputs), inputs).proportion_ci(LEVEL)
    return float(found.low), float(found.high)


def spread_of(scores: Float[np.ndarray, "run"], inputs: int) -> float:
    """Scores come in steps of one input: runs that agree are known to half a step."""
    return max(float(scores.std(ddof=1)), 1 / (2 * inputs))


def two_sided(difference: float, spread: float, count: int) -> float:
    if math.isnan(difference):
        return 1.0
    if spread == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stats.t.sf(abs(difference) / spread, count - 1))
