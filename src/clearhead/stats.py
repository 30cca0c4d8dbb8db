"""How sure we are: bootstrap intervals, paired tests with Holm's correction, effect sizes, and how many more examples.

Examples are the sample: two methods are compared on the examples that both explained, pair by pair.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from jaxtyping import Float, Int

from clearhead.errors import InputError

RESAMPLES = 2000
LEVEL = 0.95
ALPHA = 0.05
#: Up to so many pairs the signed-rank test is exact. The normal approximation of few is too careful where it counts: of
#: 18 that all agree it makes p = 2e-4 and not 8e-6, and Holm's correction for 31 methods asks for 1e-4. With many ties
#: and zeros it is too bold as well: of ten pairs, five zeros and five that agree, it makes 0.03 and not 0.06.
EXACT = 50
#: Differences that are this near, as a share of the largest, are a tie, and this near zero they are zero. Figures are
#: kept with six digits: 0.666667 − 0.333333 and 0.333333 − 0 are the same third. A share, because figures have any
#: scale: what is nothing between logits is all there is between small probabilities.
HAIR = 1e-5


@dataclass(frozen=True)
class Interval:
    """A mean, and where it would lie with other examples of the same kind; one example alone does not say (NaN)."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if self.known else f"{self.mean:.3f} (no interval)"

    @property
    def known(self) -> bool:
        return not math.isnan(self.low)


def interval(
    values: Float[np.ndarray, "example"],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
    groups: Int[np.ndarray, "example"] | None = None,
) -> Interval:
    """The mean with its bootstrap interval (percentiles of the means of examples drawn with replacement).

    groups: numbers that are equal for examples that are not independent of each other; groups are drawn whole

    >>> str(interval(np.array([1.0, 1.0, 1.0])))
    '1.000 [1.000, 1.000]'
    >>> str(interval(np.array([1.0])))
    '1.000 (no interval)'
    """
    values = np.asarray(values, dtype=np.float64)
    there = ~np.isnan(values)
    values = values[there]
    if not len(values):
        return Interval(math.nan, math.nan, math.nan, 0)
    own = np.arange(len(values)) if groups is None else np.unique(groups[there], return_inverse=True)[1]
    if own.max() == 0:
        return Interval(float(values.mean()), math.nan, math.nan, len(values))
    if own.max() + 1 == len(values):
        means = resampled_means(values, resamples, seed)
    else:
        means = resampled_groups(values, own, resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high), len(values))


def resampled_means(
    values: Float[np.ndarray, "example"], resamples: int, seed: int, at_once: int = 2**22
) -> Float[np.ndarray, "resample"]:
    """A few resamples at a time, so that memory does not grow with the number of examples."""
    rng = np.random.default_rng(seed)
    rows = max(1, at_once // len(values))
    parts = []
    for start in range(0, resamples, rows):
        chosen = rng.integers(len(values), size=(min(rows, resamples - start), len(values)))
        parts.append(values[chosen].mean(1))
    return np.concatenate(parts)


def band(
    values: Float[np.ndarray, "example point"], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Float[np.ndarray, "2 point"]:
    """The bootstrap intervals of the means of a curve's points, low and high; examples are drawn as whole curves.

    >>> band(np.array([[1.0, 0.5], [1.0, 0.5]])).tolist()
    [[1.0, 0.5], [1.0, 0.5]]
    """
    count = len(values)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), resamples)
    return np.asarray(np.quantile(draws @ values / count, [(1 - level) / 2, (1 + level) / 2], axis=0))


def resampled_groups(
    values: Float[np.ndarray, "example"], groups: Int[np.ndarray, "example"], resamples: int, seed: int
) -> Float[np.ndarray, "resample"]:
    """The means of examples whose groups were drawn with replacement."""
    sums, sizes = np.bincount(groups, values), np.bincount(groups)
    draws = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), resamples)
    return np.asarray(draws @ sums / (draws @ sizes))


@dataclass(frozen=True)
class Difference:
    """How two methods differ on the same examples; positive where the first has more.

    p: of Wilcoxon's signed-rank test; holm: the same, corrected for all pairs that were compared
    effect: the mean difference in standard deviations of the differences (Cohen's d for pairs)
    more: how many more examples like these would make the difference significant with a power of 0.8; 0 where it
        is already, None where the methods do not differ at all
    """

    first: str
    second: str
    difference: Interval
    p: float
    holm: float
    effect: float
    more: int | None

    @property
    def significant(self) -> bool:
        return self.holm < ALPHA


def paired(
    one: Float[np.ndarray, "example"], other: Float[np.ndarray, "example"]
) -> tuple[Float[np.ndarray, "pair"], float, float]:
    """The differences of those examples that have both, p of the signed-rank test, and the effect size."""
    differences = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2 or not differences.any():
        return differences, 1.0, 0.0
    return differences, signed_rank(differences), _effect(differences)


def signed_rank(differences: Float[np.ndarray, "pair"]) -> float:
    """p of Wilcoxon's signed-rank test, two-sided; equal sizes share a rank, zeros have one and no sign (Pratt).

    Were the methods alike, every difference could as well have the other sign: that gives the sum of the ranks of those
    above zero its distribution, whatever the ties.

    >>> signed_rank(np.array([0.3, 0.1, 0.2])), signed_rank(np.array([0.3, -0.1, 0.2, 0.0]))
    (0.25, 0.5)
    """
    if len(differences) > EXACT:
        return float(_approximate(differences[None])[0])
    steps = _steps(differences)
    doubled = (2 * scipy.stats.rankdata(np.abs(steps))).astype(int)  # whole numbers, also where two share a rank
    chance = _sums(tuple(sorted(doubled[steps != 0].tolist())))
    above = doubled[steps > 0].sum()
    return float(min(1.0, 2 * min(chance[: above + 1].sum(), chance[above:].sum())))


def _steps(differences: Float[np.ndarray, "*rows pair"]) -> Int[np.ndarray, "*rows pair"]:
    """Differences as whole numbers in the same order, with signs: ties are equal, and what is almost zero is zero.

    A step begins at the smallest size that is more than a hair above the one where the last began. Rounded to a grid,
    two that are almost equal could still fall on two sides of a bound.

    >>> _steps(np.array([0.666667 - 0.333333, 0.0 - 0.333333, 1e-17, 0.5])).tolist()
    [1, -1, 0, 2]
    """
    sizes = np.abs(differences)
    order = np.argsort(sizes, axis=-1)
    ascending = np.take_along_axis(sizes, order, axis=-1)
    hair = HAIR * ascending[..., -1]
    begun, step = np.zeros_like(hair), np.zeros(hair.shape, dtype=int)
    steps = np.empty(sizes.shape, dtype=int)
    for place in range(sizes.shape[-1]):
        size = ascending[..., place]
        larger = size > begun + hair
        begun, step = np.where(larger, size, begun), step + larger
        np.put_along_axis(steps, order[..., place, None], step[..., None], axis=-1)
    return np.sign(differences).astype(int) * steps


@lru_cache(maxsize=256)
def _sums(ranks: tuple[int, ...]) -> Float[np.ndarray, "sum"]:
    """How likely each sum of these is, if each is in it or not by the toss of a coin."""
    chance = np.ones(1)
    for rank in ranks:
        chance = (np.pad(chance, (0, rank)) + np.pad(chance, (rank, 0))) / 2
    return chance


def _approximate(differences: Float[np.ndarray, "row pair"]) -> Float[np.ndarray, "row"]:
    """The same for many rows, by the normal distribution with its correction for continuity."""
    tested = scipy.stats.wilcoxon(_steps(differences), axis=1, zero_method="pratt", correction=True, method="approx")
    return np.asarray(tested.pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, kind="stable")
    corrected, so_far = [0.0] * len(p), 0.0
    for step, place in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p) - step) * p[place]))
        corrected[place] = so_far
    return corrected


def examples_needed(effect: float, alpha: float = ALPHA, power: float = 0.8) -> int | None:
    """How many pairs show an effect of this size at this level with this power (normal approximation, two-sided).

    >>> examples_needed(0.5), examples_needed(0.0)
    (32, None)
    """
    if effect == 0:
        return None
    wanted = scipy.stats.norm.ppf(1 - alpha / 2) + scipy.stats.norm.ppf(power)
    return max(2, math.ceil((wanted / effect) ** 2))


def differences(values: Mapping[str, Float[np.ndarray, "example"]], seed: int = 0) -> list[Difference]:
    """Every pair of methods, tested on the examples that both have; NaN marks one that a method has not."""
    found = []
    for a, b, own, p, corrected_p, effect in _tested(values):
        more = None
        if len(own) and own.any():
            # the level that this pair would have to reach were it the only one left to decide, Holm's factor kept
            factor = max(1.0, corrected_p / p) if p > 0 else 1.0
            needed = examples_needed(effect, ALPHA / factor)
            more = 0 if corrected_p < ALPHA else max(1, (needed or 0) - len(own))
        found.append(Difference(a, b, interval(own, seed=seed), p, corrected_p, effect, more))
    return found


def _tested(
    values: Mapping[str, Float[np.ndarray, "example"]],
) -> Iterator[tuple[str, str, Float[np.ndarray, "pair"], float, float, float]]:
    """Every two methods: their differences, p, p corrected for all pairs, and the effect size."""
    names = list(values)
    if len({len(own) for own in values.values()}) > 1:
        raise InputError(
            "paired tests need the same examples for every method, in one order (NaN where one is missing)"
        )
    pairs = [(a, b) for place, a in enumerate(names) for b in names[place + 1 :]]
    tested = _paired_at_once(values, pairs)
    corrected = holm([p for _, p, _ in tested])
    for (a, b), (own, p, effect), corrected_p in zip(pairs, tested, corrected, strict=True):
        yield a, b, own, p, corrected_p, effect


def _paired_at_once(
    values: Mapping[str, Float[np.ndarray, "example"]], pairs: Sequence[tuple[str, str]]
) -> list[tuple[Float[np.ndarray, "pair"], float, float]]:
    """`paired` for every pair; in one call of scipy's where there are many examples of all: many times as fast."""
    matrix = np.array([np.asarray(values[a], dtype=float) - np.asarray(values[b], dtype=float) for a, b in pairs])
    if matrix.ndim != 2 or matrix.shape[1] <= EXACT or np.isnan(matrix).any():
        return [paired(values[a], values[b]) for a, b in pairs]
    moves = matrix.any(1)
    p = np.ones(len(pairs))
    if moves.any():
        p[moves] = _approximate(matrix[moves])
    return [(row, float(own), _effect(row) if row.any() else 0.0) for row, own in zip(matrix, p, strict=True)]


def _leaning(differences: Float[np.ndarray, "pair"]) -> float:
    """Which side the signed-rank test is on: the sum of the ranks of |d|, with their signs."""
    steps = _steps(differences)
    return float((np.sign(steps) * scipy.stats.rankdata(np.abs(steps))).sum())


def _effect(differences: Float[np.ndarray, "pair"]) -> float:
    spread, mean = float(differences.std(ddof=1)), float(differences.mean())
    return mean / spread if spread else math.copysign(math.inf, mean)


def ranks(values: Mapping[str, Float[np.ndarray, "example"]], smaller_is_better: bool = False) -> dict[str, str]:
    """Where each method stands: the range of ranks that it shares with those it cannot be told from.

    A method's best rank is one more than the number of methods that are significantly better; its worst is the number
    of methods minus those that are significantly worse. Written "1", or "2–4" for a tie.

    >>> a = np.linspace(0, 1, 40)
    >>> ranks({"a": a, "b": a + 0.001 * np.sin(np.arange(40)), "c": a - 0.5})
    {'a': '1–2', 'b': '1–2', 'c': '3'}
    """
    better, worse = dict.fromkeys(values, 0), dict.fromkeys(values, 0)
    for first, second, own, _, corrected, _ in _tested(values):
        if corrected < ALPHA and own.mean() * _leaning(own) > 0:  # else a few large losses outweigh many small gains
            winner, loser = (first, second) if (own.mean() < 0) == smaller_is_better else (second, first)
            better[loser] += 1
            worse[winner] += 1
    said = {}
    for name in values:
        best, last = 1 + better[name], len(values) - worse[name]
        said[name] = str(best) if best == last else f"{best}–{last}"
    return said
