"""The tests of TCAV: is a concept more to a class than a random concept would be?

Each concept is held against many random counter-sets. Its scores against them are not independent: all of them share
the concept's own examples. A t-test over them, as usual, takes every second random concept for significant (measured in
tests/concepts/test_tcav.py). So here

    against random concepts   the concept's mean signed sensitivity is one draw; every random set, held against all the
                              others, is one more. t = (m − mean r) / (sd r · √(1 + 1/R)), R − 1 degrees of freedom
    against one half          the scores c_1 … c_R against 0.5, with the variance of correlated runs: two vectors that
                              share one of their two sets correlate by ½. t = (c − 0.5) / (sd c · √(1 + 1/R))

The first is on sensitivities, not on scores: where all inputs of a class have nearly one gradient, any vector scores
near 0 or 1, and no score is then far from the random ones. A concept is significant if both tests say so, after Holm's
correction over concepts and layers.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.concepts.cav import (
    THRESHOLD,
    Examples,
    Gradients,
    concept_vector,
    normal,
    sensitivities,
    tcav_score,
    together,
)
from clearhead.concepts.directions import Direction
from clearhead.errors import InputError
from clearhead.stats import ALPHA, LEVEL, holm

#: Fewer random sets than this leave a test no say.
LEAST = 3


@dataclass(frozen=True)
class Tested:
    """One concept at one layer.

    score, sd: of TCAV over the counter-sets; low, high: exact binomial interval of the score over the class's inputs
    magnitude: the mean of S, signed; strength: the mean of |S|; effect: the magnitude in standard deviations of random
    p_random, p_half: the two tests; p: the larger; corrected: by Holm; p_uncorrected: the usual t-test of scores on 0.5
    refused: why there is no score, if there is none
    """

    concept: str
    layer: int
    score: float
    sd: float
    low: float
    high: float
    magnitude: float
    strength: float
    effect: float
    accuracy: float
    p_random: float
    p_half: float
    p_uncorrected: float
    p: float
    corrected: float
    runs: int
    inputs: int
    refused: str = ""

    @property
    def significant(self) -> bool:
        return not self.refused and self.corrected < ALPHA

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.significant}


def deal(count: int, size: int, runs: int, seed: int = 0) -> list[list[int]]:
    """Random sets without overlap: sets that share examples would differ less than random concepts do."""
    sets = min(runs, count // size) if size else 0
    if sets < LEAST:
        raise InputError(
            f"{count} random inputs make {sets} sets of {size} (as many as the smallest concept has): give at least "
            f"{LEAST * size}, better {20 * size}"
        )
    order = np.random.default_rng(seed).permutation(count)
    return [order[i * size : (i + 1) * size].tolist() for i in range(sets)]


def against_all(
    concept: Examples, sets: Sequence[Examples], classifier: str = "logistic", seed: int = 0, name: str = "concept"
) -> list[Direction]:
    """The vectors of one concept against every random set, however well they do."""
    return [
        concept_vector(concept, one, classifier, threshold=None, seed=seed + i, names=(name, f"random set {i}"))
        for i, one in enumerate(sets)
    ]


def judged(
    vectors: Sequence[Direction],
    own: Gradients,
    chance: Float[np.ndarray, "set"],
    threshold: float | None = THRESHOLD,
    name: str = "concept",
) -> Tested:
    """One concept by its vectors against all random sets; `chance` is what these sets have among themselves."""
    accuracy = float(np.mean([v.tested.accuracy for v in vectors if v.tested is not None]))
    s = torch.stack([sensitivities(own, vector) for vector in vectors])
    scores = np.array([tcav_score(run) for run in s])
    refused = ""
    if threshold is not None and accuracy < threshold:
        refused = (
            f"{name} cannot be told from random inputs here: held-out accuracy {accuracy:.2f}, less than {threshold}"
        )
        scores = np.full_like(scores, math.nan)
    low, high = binomial_interval(float(scores.mean()), s.shape[1])
    magnitude = float(s.mean())
    p_random, p_half = against_random(magnitude, chance), against_half(scores, s.shape[1])
    return Tested(
        concept=name,
        layer=0,
        score=float(scores.mean()),
        sd=float(scores.std(ddof=1)),
        low=low,
        high=high,
        magnitude=magnitude,
        strength=float(s.abs().mean()),
        effect=(magnitude - float(chance.mean())) / max(float(chance.std(ddof=1)), 1e-300),
        accuracy=accuracy,
        p_random=p_random,
        p_half=p_half,
        p_uncorrected=two_sided(float(scores.mean()) - 0.5, spread_of(scores, s.shape[1]) / math.sqrt(len(s)), len(s)),
        p=1.0 if refused else max(p_random, p_half),
        corrected=1.0,
        runs=len(vectors),
        inputs=s.shape[1],
        refused=refused,
    )


def corrected(lines: Sequence[Tested]) -> list[Tested]:
    """Holm's correction over all concepts and layers."""
    return [replace(line, corrected=p) for line, p in zip(lines, holm([line.p for line in lines]), strict=True)]


def random_vectors(
    sets: Sequence[Examples], classifier: str = "logistic", seed: int = 0
) -> Float[Tensor, "set feature"]:
    """Of each random set, the mean of its vectors against all the others."""
    found = torch.zeros(len(sets), sets[0].activations.shape[1], dtype=torch.float64)
    for i, one in enumerate(sets):
        for j in range(i + 1, len(sets)):
            v = normal(one, sets[j], classifier, seed).cpu()
            found[i] += v
            found[j] -= v  # the same vector, seen from the other side
    return found / (len(sets) - 1)


def random_magnitudes(vectors: Float[Tensor, "set feature"], own: Gradients) -> Float[np.ndarray, "set"]:
    """The mean signed sensitivity of each random set."""
    return np.asarray((vectors @ together(own, vectors.shape[1]).mean(0).to(vectors)).numpy())


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
    found = scipy.stats.binomtest(round(score * inputs), inputs).proportion_ci(LEVEL)
    return float(found.low), float(found.high)


def spread_of(scores: Float[np.ndarray, "run"], inputs: int) -> float:
    """Scores come in steps of one input: runs that agree are known to half a step."""
    return max(float(scores.std(ddof=1)), 1 / (2 * inputs))


def two_sided(difference: float, spread: float, count: int) -> float:
    if math.isnan(difference):
        return 1.0
    if spread == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * scipy.stats.t.sf(abs(difference) / spread, count - 1))
