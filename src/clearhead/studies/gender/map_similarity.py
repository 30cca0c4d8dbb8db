"""Similarity of two profiles over the tokens of a sentence, compared with chance level.

Profiles are made absolute and scaled to unit length first. Distances of independent profiles are far below their
maximum, so a small distance alone is no evidence: the chance level for the same length is reported with each distance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import scipy
from jaxtyping import Float

from clearhead.errors import InputError

TokenProfile = Float[np.ndarray, "token"]
DISTANCE_NAMES = ("cosine", "euclid", "manhattan", "haversine")


@dataclass(frozen=True)
class ProfileSimilarity:
    """Similarity of pairs of profiles, mean over sentences.

    Attributes:
        distances: Mean distance by name.
        chance: Mean distance of independent profiles of the same lengths.
        p: p-value of a permutation test of the cosine distance.
        spearman: Mean rank correlation of the absolute values; 0 by chance.
        kendall: Mean Kendall rank correlation of the absolute values; 0 by chance.
        count: Number of sentences.
    """

    distances: dict[str, float]
    chance: dict[str, float]
    p: float
    spearman: float
    kendall: float
    count: int


def compute_distances(first: TokenProfile, second: TokenProfile, position: int = 3) -> dict[str, float]:
    """Compute four distances of two profiles u and v after normalisation.

    Cosine distance; Euclidean distance / √n; Manhattan distance / n; haversine distance of (u_0, u_position) and
    (v_0, v_position).

    Raises:
        InputError: A profile is zero or not finite.

    Example:
        >>> compute_distances(np.array([3.0, 0, 0, -4]), np.array([3.0, 0, 0, 4]))
        {'cosine': 0.0, 'euclid': 0.0, 'manhattan': 0.0, 'haversine': 0.0}
    """
    u = _normalise_profile(first)
    v = _normalise_profile(second)
    n = len(u)
    position = min(position, n - 1)
    haversine = (
        np.sin((v[0] - u[0]) / 2) ** 2 + np.cos(u[0]) * np.cos(v[0]) * np.sin((v[position] - u[position]) / 2) ** 2
    )
    return {
        "cosine": float(max(0.0, 1 - u @ v)),
        "euclid": float(np.linalg.norm(u - v) / math.sqrt(n)),
        "manhattan": float(np.abs(u - v).sum() / n),
        "haversine": float(2 * np.arcsin(np.sqrt(haversine))),
    }


@cache
def compute_chance_distances(length: int, position: int = 3, num_draws: int = 4000, seed: int = 0) -> tuple[float, ...]:
    """Estimate the mean distances of two independent half-normal profiles, in the order of `DISTANCE_NAMES`; cached."""
    rng = np.random.default_rng([seed, length])
    draws = [compute_distances(rng.normal(size=length), rng.normal(size=length), position) for _ in range(num_draws)]
    return tuple(float(np.mean([distances[name] for distances in draws])) for name in DISTANCE_NAMES)


def compute_profile_similarity(
    first_profiles: Sequence[TokenProfile],
    second_profiles: Sequence[TokenProfile],
    position: int = 3,
    num_permutations: int = 1000,
    seed: int = 0,
) -> ProfileSimilarity:
    """Compare two profiles of each sentence.

    Args:
        first_profiles: First profile of each sentence.
        second_profiles: Second profile of each sentence.
        position: Token that the haversine distance compares, next to the first one.
        num_permutations: Number of random token orders for the p-value of the cosine distance.
        seed: Seed of the permutations.

    Raises:
        InputError: There are no profiles, their numbers differ, or one is zero.
    """
    if len(first_profiles) != len(second_profiles) or not first_profiles:
        raise InputError(
            "two profiles for each sentence are compared, "
            f"but there are {len(first_profiles)} and {len(second_profiles)}"
        )
    pairs = list(zip(first_profiles, second_profiles, strict=True))
    distances = [compute_distances(first, second, position) for first, second in pairs]
    chance = np.mean([compute_chance_distances(len(first), position) for first in first_profiles], axis=0)
    spearman = [scipy.stats.spearmanr(np.abs(first), np.abs(second))[0] for first, second in pairs]
    kendall = [scipy.stats.kendalltau(np.abs(first), np.abs(second))[0] for first, second in pairs]
    rng = np.random.default_rng(seed)
    observed = float(np.mean([values["cosine"] for values in distances]))
    unit_pairs = [(_normalise_profile(first), _normalise_profile(second)) for first, second in pairs]
    shuffled = [np.mean([1 - u @ rng.permutation(v) for u, v in unit_pairs]) for _ in range(num_permutations)]
    return ProfileSimilarity(
        distances={name: float(np.mean([values[name] for values in distances])) for name in DISTANCE_NAMES},
        chance=dict(zip(DISTANCE_NAMES, chance.tolist(), strict=True)),
        p=(1 + sum(value <= observed for value in shuffled)) / (1 + num_permutations),
        spearman=float(np.nanmean(spearman)),
        kendall=float(np.nanmean(kendall)),
        count=len(first_profiles),
    )


def _normalise_profile(profile: TokenProfile) -> TokenProfile:
    """Take absolute values and scale to unit length."""
    norm = float(np.linalg.norm(profile))
    if not norm or not math.isfinite(norm):
        raise InputError("a profile of zeros (or of values that are not finite) has no direction to compare")
    return np.abs(np.asarray(profile, dtype=np.float64)) / norm
