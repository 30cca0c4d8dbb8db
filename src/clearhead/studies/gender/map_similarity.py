"""How alike two profiles over the tokens of a sentence are – and how alike they would be by chance.

Both are made absolute and of length one first. Distances of independent profiles are far from their maximum, so that a
small distance alone says nothing: the chance level of the same length stands beside each of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import scipy
from jaxtyping import Float

from clearhead.errors import InputError

Profile = Float[np.ndarray, "token"]
DISTANCES = ("cosine", "euclid", "manhattan", "haversine")


@dataclass(frozen=True)
class Similarity:
    """Means over sentences; `chance` of independent profiles of the same lengths; p of a permutation test of cosine.

    spearman, kendall: mean rank correlations, 0 by chance
    """

    distances: dict[str, float]
    chance: dict[str, float]
    p: float
    spearman: float
    kendall: float
    count: int


def distances(one: Profile, other: Profile, place: int = 3) -> dict[str, float]:
    """Cosine distance, Euclid's over √n, Manhattan over n, and haversine between (u_0, u_place) and (v_0, v_place).

    >>> distances(np.array([3.0, 0, 0, -4]), np.array([3.0, 0, 0, 4]))
    {'cosine': 0.0, 'euclid': 0.0, 'manhattan': 0.0, 'haversine': 0.0}
    """
    u, v = _unit(one), _unit(other)
    n, place = len(u), min(place, len(u) - 1)
    haversine = np.sin((v[0] - u[0]) / 2) ** 2 + np.cos(u[0]) * np.cos(v[0]) * np.sin((v[place] - u[place]) / 2) ** 2
    return {
        "cosine": float(max(0.0, 1 - u @ v)),
        "euclid": float(np.linalg.norm(u - v) / math.sqrt(n)),
        "manhattan": float(np.abs(u - v).sum() / n),
        "haversine": float(2 * np.arcsin(np.sqrt(haversine))),
    }


@cache
def chance(n: int, place: int = 3, draws: int = 4000, seed: int = 0) -> tuple[float, ...]:
    """The mean distances of two independent half-normal profiles of this length, in the order of `DISTANCES`."""
    rng = np.random.default_rng([seed, n])
    drawn = [distances(rng.normal(size=n), rng.normal(size=n), place) for _ in range(draws)]
    return tuple(float(np.mean([one[name] for one in drawn])) for name in DISTANCES)


def similarity(
    ones: Sequence[Profile], others: Sequence[Profile], place: int = 3, permutations: int = 1000, seed: int = 0
) -> Similarity:
    """Two profiles for each sentence, compared; p: how often tokens in random order are as alike."""
    if len(ones) != len(others) or not ones:
        raise InputError(f"two profiles for each sentence are compared, but there are {len(ones)} and {len(others)}")
    each = [distances(one, other, place) for one, other in zip(ones, others, strict=True)]
    by_chance = np.mean([chance(len(one), place) for one in ones], axis=0)
    ranks = [(scipy.stats.spearmanr(*pair)[0], scipy.stats.kendalltau(*pair)[0]) for pair in _absolute(ones, others)]
    rng = np.random.default_rng(seed)
    own = float(np.mean([one["cosine"] for one in each]))
    units = [(_unit(one), _unit(other)) for one, other in zip(ones, others, strict=True)]
    shuffled = [np.mean([1 - u @ rng.permutation(v) for u, v in units]) for _ in range(permutations)]
    return Similarity(
        distances={name: float(np.mean([one[name] for one in each])) for name in DISTANCES},
        chance=dict(zip(DISTANCES, by_chance.tolist(), strict=True)),
        p=(1 + sum(value <= own for value in shuffled)) / (1 + permutations),
        spearman=float(np.nanmean([one for one, _ in ranks])),
        kendall=float(np.nanmean([one for _, one in ranks])),
        count=len(ones),
    )


def _absolute(ones: Sequence[Profile], others: Sequence[Profile]) -> list[tuple[Profile, Profile]]:
    return [(np.abs(one), np.abs(other)) for one, other in zip(ones, others, strict=True)]


def _unit(profile: Profile) -> Profile:
    size = float(np.linalg.norm(profile))
    if not size or not math.isfinite(size):
        raise InputError("a profile of zeros (or of no finite numbers) has no direction to compare")
    return np.abs(np.asarray(profile, dtype=np.float64)) / size
