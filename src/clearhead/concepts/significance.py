"""Significance tests of TCAV: does a concept matter more to a class than a random concept would?

Each concept is compared with many random negative sets. Its scores against them are not independent, because they share
the concept's examples. The usual t-test over them calls every second random concept significant (measured in
tests/concepts/test_tcav.py). This module therefore runs two tests:

    against random concepts   the concept's mean signed sensitivity is one draw; each random set, compared with all the
                              others, is one more. t = (m − mean r) / (sd r · √(1 + 1/R)), R − 1 degrees of freedom
    against one half          the scores c_1 … c_R against 0.5, with the variance of correlated runs: two vectors that
                              share one of their two sets correlate by ½. t = (c − 0.5) / (sd c · √(1 + 1/R))

The first test uses sensitivities, not scores: if all inputs of a class have nearly the same gradient, any vector scores
near 0 or 1, and no score is far from the random ones. A concept is significant if both tests are, after Holm's
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
    MIN_HELD_OUT_ACCURACY,
    ConceptActivations,
    InputGradients,
    compute_sensitivities,
    compute_tcav_score,
    fit_concept_vector,
    fit_unit_normal,
    pool_gradients,
)
from clearhead.concepts.directions import Direction, LayerIndex
from clearhead.errors import InputError
from clearhead.stats import ALPHA, CONFIDENCE_LEVEL, adjust_p_values_holm

#: With fewer random sets, a test has no power.
MIN_RANDOM_SETS = 3


@dataclass(frozen=True)
class ConceptTest:
    """The TCAV score and significance tests of one concept at one layer.

    Attributes:
        concept: Name of the concept.
        layer: Index of the layer, or "embeddings".
        score: Mean TCAV score over the random negative sets.
        sd: Standard deviation of the score over the random negative sets.
        low: Lower end of the exact binomial interval of the score over the class's inputs.
        high: Upper end of that interval.
        magnitude: Mean signed sensitivity S.
        strength: Mean of |S|.
        effect: The magnitude in standard deviations of random concepts.
        accuracy: Mean held-out accuracy of the concept vectors.
        p_random: Test against random concepts.
        p_half: Test of the scores against 0.5.
        p_uncorrected: The usual t-test of the scores against 0.5.
        p: The larger of p_random and p_half.
        corrected: p after Holm's correction.
        runs: Number of random negative sets.
        inputs: Number of inputs of the class.
        rejection_reason: Why there is no score; empty if there is one.
    """

    concept: str
    layer: LayerIndex
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
    rejection_reason: str = ""

    @property
    def is_significant(self) -> bool:
        """Whether the concept has a score and its corrected p is below the significance level."""
        return not self.rejection_reason and self.corrected < ALPHA

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON.

        Returns:
            The fields of the class, and "significant".
        """
        return {**asdict(self), "significant": self.is_significant}


def split_random_sets(num_inputs: int, set_size: int, max_sets: int, seed: int = 0) -> list[list[int]]:
    """Split random inputs into disjoint sets; sets that share examples would differ less than random concepts do.

    Args:
        num_inputs: Number of random inputs.
        set_size: Number of inputs in a set.
        max_sets: Maximum number of sets.
        seed: Seed of the shuffling.

    Returns:
        The input indices of each set.

    Raises:
        InputError: There are too few inputs for three sets.
    """
    num_sets = 0
    if set_size:
        num_sets = min(max_sets, num_inputs // set_size)
    if num_sets < MIN_RANDOM_SETS:
        raise InputError(
            f"{num_inputs} random inputs make {num_sets} sets of {set_size} (the size of the smallest concept): use "
            f"at least {MIN_RANDOM_SETS * set_size}, better {20 * set_size}"
        )
    order = np.random.default_rng(seed).permutation(num_inputs)
    return [order[i * set_size : (i + 1) * set_size].tolist() for i in range(num_sets)]


def fit_against_random_sets(
    concept: ConceptActivations,
    random_sets: Sequence[ConceptActivations],
    classifier: str = "logistic",
    seed: int = 0,
    name: str = "concept",
) -> list[Direction]:
    """Fit the vectors of one concept against every random set, at any accuracy."""
    return [
        fit_concept_vector(
            concept, random_set, classifier, threshold=None, seed=seed + i, names=(name, f"random set {i}")
        )
        for i, random_set in enumerate(random_sets)
    ]


def evaluate_concept(
    vectors: Sequence[Direction],
    gradients: InputGradients,
    chance_magnitudes: Float[np.ndarray, "set"],
    threshold: float | None = MIN_HELD_OUT_ACCURACY,
    name: str = "concept",
) -> ConceptTest:
    """Test one concept by its vectors against all random sets.

    Args:
        vectors: The vectors of the concept, one for each random set.
        gradients: Gradients of the target at the vectors' layer.
        chance_magnitudes: Mean signed sensitivity of each random set compared with the others.
        threshold: Mean held-out accuracy below which the concept gets no score; None scores every concept.
        name: Name of the concept.

    Returns:
        The test, uncorrected and with layer 0; the caller sets the layer.
    """
    accuracy = float(np.mean([v.held_out_metrics.accuracy for v in vectors if v.held_out_metrics is not None]))
    s = torch.stack([compute_sensitivities(gradients, vector) for vector in vectors])
    num_inputs = s.shape[1]
    scores = np.array([compute_tcav_score(run) for run in s])
    rejection_reason = ""
    if threshold is not None and accuracy < threshold:
        rejection_reason = (
            f"{name} cannot be distinguished from random inputs here: held-out accuracy {accuracy:.2f}, less than "
            f"{threshold}"
        )
        scores = np.full_like(scores, math.nan)
    low, high = compute_binomial_interval(float(scores.mean()), num_inputs)
    magnitude = float(s.mean())
    p_random = compute_p_against_random(magnitude, chance_magnitudes)
    p_half = compute_p_against_half(scores, num_inputs)
    return ConceptTest(
        concept=name,
        layer=0,
        score=float(scores.mean()),
        sd=float(scores.std(ddof=1)),
        low=low,
        high=high,
        magnitude=magnitude,
        strength=float(s.abs().mean()),
        effect=(magnitude - float(chance_magnitudes.mean())) / max(float(chance_magnitudes.std(ddof=1)), 1e-300),
        accuracy=accuracy,
        p_random=p_random,
        p_half=p_half,
        p_uncorrected=compute_two_sided_p(
            float(scores.mean()) - 0.5, compute_score_std(scores, num_inputs) / math.sqrt(len(s)), len(s)
        ),
        p=1.0 if rejection_reason else max(p_random, p_half),
        corrected=1.0,
        runs=len(vectors),
        inputs=num_inputs,
        rejection_reason=rejection_reason,
    )


def correct_concept_tests(concept_tests: Sequence[ConceptTest]) -> list[ConceptTest]:
    """Apply Holm's correction over all concepts and layers."""
    corrected_p_values = adjust_p_values_holm([concept_test.p for concept_test in concept_tests])
    return [
        replace(concept_test, corrected=p) for concept_test, p in zip(concept_tests, corrected_p_values, strict=True)
    ]


def fit_random_vectors(
    random_sets: Sequence[ConceptActivations], classifier: str = "logistic", seed: int = 0
) -> Float[Tensor, "set feature"]:
    """Fit, for each random set, the mean of its vectors against all the others."""
    vectors = torch.zeros(len(random_sets), random_sets[0].activations.shape[1], dtype=torch.float64)
    for i, random_set in enumerate(random_sets):
        for j in range(i + 1, len(random_sets)):
            v = fit_unit_normal(random_set, random_sets[j], classifier, seed).cpu()
            vectors[i] += v
            vectors[j] -= v  # swapping the two sets flips the sign
    return vectors / (len(random_sets) - 1)


def compute_random_magnitudes(
    vectors: Float[Tensor, "set feature"], gradients: InputGradients
) -> Float[np.ndarray, "set"]:
    """Compute the mean signed sensitivity of each random set."""
    return np.asarray((vectors @ pool_gradients(gradients, vectors.shape[1]).mean(0).to(vectors)).numpy())


def compute_p_against_random(magnitude: float, chance_magnitudes: Float[np.ndarray, "set"]) -> float:
    """Test one draw against a sample of draws (Crawford and Howell's t), two-sided."""
    spread = float(chance_magnitudes.std(ddof=1)) * math.sqrt(1 + 1 / len(chance_magnitudes))
    return compute_two_sided_p(magnitude - float(chance_magnitudes.mean()), spread, len(chance_magnitudes))


def compute_p_against_half(scores: Float[np.ndarray, "run"], num_inputs: int) -> float:
    """Test correlated runs against 0.5, two-sided."""
    return compute_two_sided_p(
        float(scores.mean()) - 0.5, compute_score_std(scores, num_inputs) * math.sqrt(1 + 1 / len(scores)), len(scores)
    )


def compute_binomial_interval(score: float, num_inputs: int) -> tuple[float, float]:
    """Compute Clopper and Pearson's exact interval of the score over the inputs of the class."""
    if math.isnan(score):
        return math.nan, math.nan
    interval = scipy.stats.binomtest(round(score * num_inputs), num_inputs).proportion_ci(CONFIDENCE_LEVEL)
    return float(interval.low), float(interval.high)


def compute_score_std(scores: Float[np.ndarray, "run"], num_inputs: int) -> float:
    """Compute the standard deviation of the scores, at least half of the step that one input makes."""
    return max(float(scores.std(ddof=1)), 1 / (2 * num_inputs))


def compute_two_sided_p(difference: float, standard_error: float, num_samples: int) -> float:
    """Compute the two-sided p of a t-test; 1 for NaN."""
    if math.isnan(difference):
        return 1.0
    if standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * scipy.stats.t.sf(abs(difference) / standard_error, num_samples - 1))
