"""Statistics: bootstrap intervals, paired tests with Holm's correction, effect sizes and required sample sizes.

Examples are the sampling unit: two methods are compared on the examples that both explained, pair by pair.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from jaxtyping import Float, Int

from clearhead.errors import InputError

NUM_BOOTSTRAP_RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95
ALPHA = 0.05
#: Maximum number of pairs for the exact signed-rank test. For few pairs the normal approximation is too conservative at
#: small p-values: for 18 pairs that all agree it gives p = 2e-4 instead of 8e-6, and Holm's correction for 31 methods
#: requires 1e-4. With many ties and zeros it is also too liberal: for ten pairs, five of them zero and five in
#: agreement, it gives 0.03 instead of 0.06.
MAX_EXACT_PAIRS = 50
#: Differences closer than this, as a fraction of the largest, are ties, and those this close to zero are zero. Stored
#: figures have six digits: 0.666667 − 0.333333 and 0.333333 − 0 are the same third. The tolerance is relative because
#: figures have any scale: a negligible difference of logits can be a large one of small probabilities.
TIE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean with its confidence interval.

    Attributes:
        mean: The mean.
        low: Lower bound; NaN for a single example.
        high: Upper bound; NaN for a single example.
        count: Number of examples.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if not self.has_bounds:
            return f"{self.mean:.3f} (no interval)"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def has_bounds(self) -> bool:
        """Whether there were enough examples for an interval."""
        return not math.isnan(self.low)


def bootstrap_interval(
    values: Float[np.ndarray, "example"],
    level: float = CONFIDENCE_LEVEL,
    num_resamples: int = NUM_BOOTSTRAP_RESAMPLES,
    seed: int = 0,
    groups: Int[np.ndarray, "example"] | None = None,
) -> ConfidenceInterval:
    """Compute the mean and its percentile bootstrap interval.

    Args:
        values: One value per example; NaN is dropped.
        level: Confidence level.
        num_resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
        groups: Group of each example, if examples of a group depend on each other. Whole groups are resampled.

    Returns:
        The interval, without bounds for a single example or group.

    Example:
        >>> str(bootstrap_interval(np.array([1.0, 1.0, 1.0])))
        '1.000 [1.000, 1.000]'
        >>> str(bootstrap_interval(np.array([1.0])))
        '1.000 (no interval)'
    """
    values = np.asarray(values, dtype=np.float64)
    valid = ~np.isnan(values)
    values = values[valid]
    if not len(values):
        return ConfidenceInterval(math.nan, math.nan, math.nan, 0)
    group_indices = np.arange(len(values))
    if groups is not None:
        group_indices = np.unique(groups[valid], return_inverse=True)[1]
    if group_indices.max() == 0:
        return ConfidenceInterval(float(values.mean()), math.nan, math.nan, len(values))
    if group_indices.max() + 1 == len(values):
        means = resample_means(values, num_resamples, seed)
    else:
        means = resample_group_means(values, group_indices, num_resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return ConfidenceInterval(float(values.mean()), float(low), float(high), len(values))


def resample_means(
    values: Float[np.ndarray, "example"], num_resamples: int, seed: int, max_elements: int = 2**22
) -> Float[np.ndarray, "resample"]:
    """Compute the means of bootstrap resamples, in chunks that bound the memory.

    Args:
        values: One value per example.
        num_resamples: Number of resamples.
        seed: Seed of the resampling.
        max_elements: Maximum number of drawn values in memory.

    Returns:
        One mean per resample.
    """
    rng = np.random.default_rng(seed)
    rows_per_chunk = max(1, max_elements // len(values))
    chunk_means = []
    for start in range(0, num_resamples, rows_per_chunk):
        num_rows = min(rows_per_chunk, num_resamples - start)
        indices = rng.integers(len(values), size=(num_rows, len(values)))
        chunk_means.append(values[indices].mean(1))
    return np.concatenate(chunk_means)


def bootstrap_band(
    values: Float[np.ndarray, "example point"],
    level: float = CONFIDENCE_LEVEL,
    num_resamples: int = NUM_BOOTSTRAP_RESAMPLES,
    seed: int = 0,
) -> Float[np.ndarray, "2 point"]:
    """Compute the bootstrap interval of each point of a mean curve. Whole curves are resampled.

    Args:
        values: One curve per example.
        level: Confidence level.
        num_resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.

    Returns:
        Lower and upper bounds of the points.

    Example:
        >>> bootstrap_band(np.array([[1.0, 0.5], [1.0, 0.5]])).tolist()
        [[1.0, 0.5], [1.0, 0.5]]
    """
    count = len(values)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), num_resamples)
    return np.asarray(np.quantile(draws @ values / count, [(1 - level) / 2, (1 + level) / 2], axis=0))


def resample_group_means(
    values: Float[np.ndarray, "example"], groups: Int[np.ndarray, "example"], num_resamples: int, seed: int
) -> Float[np.ndarray, "resample"]:
    """Compute the means of bootstrap resamples of whole groups of examples."""
    sums = np.bincount(groups, values)
    sizes = np.bincount(groups)
    draws = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), num_resamples)
    return np.asarray(draws @ sums / (draws @ sizes))


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two methods on the same examples; positive where the first has larger values.

    Attributes:
        first: Name of the first method.
        second: Name of the second method.
        difference: The mean difference with its bootstrap interval.
        p_value: p-value of Wilcoxon's signed-rank test.
        holm_p_value: The p-value with Holm's correction for all compared pairs.
        effect_size: The mean difference in standard deviations of the differences (Cohen's d for pairs).
        extra_examples_needed: How many more examples would make the difference significant with a power of 0.8; 0 if
            it already is, None if the methods do not differ at all.
    """

    first: str
    second: str
    difference: ConfidenceInterval
    p_value: float
    holm_p_value: float
    effect_size: float
    extra_examples_needed: int | None

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is below `ALPHA`."""
        return self.holm_p_value < ALPHA


def compare_paired(
    first: Float[np.ndarray, "example"], second: Float[np.ndarray, "example"]
) -> tuple[Float[np.ndarray, "pair"], float, float]:
    """Compare two methods on shared examples: differences, p of the signed-rank test, and effect size.

    Args:
        first: Values of the first method; NaN where an example has none.
        second: Values of the second method, for the same examples.

    Returns:
        The differences, the p-value of the signed-rank test, and the effect size.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2 or not differences.any():
        return differences, 1.0, 0.0
    return differences, compute_signed_rank_p_value(differences), _compute_effect_size(differences)


def compute_signed_rank_p_value(differences: Float[np.ndarray, "pair"]) -> float:
    """Compute the two-sided p-value of Wilcoxon's signed-rank test.

    Ties share a rank; zeros have a rank but no sign (Pratt). Under the null hypothesis each difference has either sign
    with equal probability, which gives the exact distribution of the positive rank sum for any ties.

    Args:
        differences: One difference per pair.

    Returns:
        The p-value: exact for up to `MAX_EXACT_PAIRS` pairs, and by the normal approximation above.

    Example:
        >>> compute_signed_rank_p_value(np.array([0.3, 0.1, 0.2]))
        0.25
        >>> compute_signed_rank_p_value(np.array([0.3, -0.1, 0.2, 0.0]))
        0.5
    """
    if len(differences) > MAX_EXACT_PAIRS:
        return float(_compute_approximate_p_values(differences[None])[0])
    steps = _rank_with_tolerance(differences)
    doubled_ranks = (2 * scipy.stats.rankdata(np.abs(steps))).astype(int)  # integers even where two share a rank
    probabilities = _compute_rank_sum_distribution(tuple(sorted(doubled_ranks[steps != 0].tolist())))
    positive_sum = doubled_ranks[steps > 0].sum()
    return float(min(1.0, 2 * min(probabilities[: positive_sum + 1].sum(), probabilities[positive_sum:].sum())))


def _rank_with_tolerance(differences: Float[np.ndarray, "*rows pair"]) -> Int[np.ndarray, "*rows pair"]:
    """Convert differences to signed integers in the same order: ties are equal, and values near zero are zero.

    A new level begins at the smallest magnitude above the start of the current level plus the tolerance. Rounding to a
    grid could separate two almost equal values.

    >>> _rank_with_tolerance(np.array([0.666667 - 0.333333, 0.0 - 0.333333, 1e-17, 0.5])).tolist()
    [1, -1, 0, 2]
    """
    magnitudes = np.abs(differences)
    order = np.argsort(magnitudes, axis=-1)
    ascending = np.take_along_axis(magnitudes, order, axis=-1)
    tolerance = TIE_TOLERANCE * ascending[..., -1]
    level_start = np.zeros_like(tolerance)
    level = np.zeros(tolerance.shape, dtype=int)
    levels = np.empty(magnitudes.shape, dtype=int)
    for i in range(magnitudes.shape[-1]):
        magnitude = ascending[..., i]
        begins_level = magnitude > level_start + tolerance
        level_start = np.where(begins_level, magnitude, level_start)
        level = level + begins_level
        np.put_along_axis(levels, order[..., i, None], level[..., None], axis=-1)
    return np.sign(differences).astype(int) * levels


@lru_cache(maxsize=256)
def _compute_rank_sum_distribution(ranks: tuple[int, ...]) -> Float[np.ndarray, "sum"]:
    """Compute the distribution of the sum of a random subset of ranks, each included with probability ½."""
    probabilities = np.ones(1)
    for rank in ranks:
        probabilities = (np.pad(probabilities, (0, rank)) + np.pad(probabilities, (rank, 0))) / 2
    return probabilities


def _compute_approximate_p_values(differences: Float[np.ndarray, "row pair"]) -> Float[np.ndarray, "row"]:
    """Compute signed-rank p-values of rows by the normal approximation; zeros as Pratt: ranked, without a sign."""
    result = scipy.stats.wilcoxon(
        _rank_with_tolerance(differences), axis=1, zero_method="pratt", correction=True, method="approx"
    )
    return np.asarray(result.pvalue)


def adjust_p_values_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests by Holm's step-down correction.

    Args:
        p_values: The uncorrected p-values.

    Returns:
        The corrected p-values in the same order.

    Example:
        >>> adjust_p_values_holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    running_max = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        running_max = max(running_max, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running_max
    return corrected


def compute_examples_needed(effect_size: float, alpha: float = ALPHA, power: float = 0.8) -> int | None:
    """Compute the number of pairs needed to detect an effect (normal approximation, two-sided).

    Args:
        effect_size: Mean difference in standard deviations.
        alpha: Significance level.
        power: Probability of detecting the effect.

    Returns:
        The number of pairs, or None if there is no effect.

    Example:
        >>> compute_examples_needed(0.5)
        32
        >>> compute_examples_needed(0.0) is None
        True
    """
    if effect_size == 0:
        return None
    required = scipy.stats.norm.ppf(1 - alpha / 2) + scipy.stats.norm.ppf(power)
    return max(2, math.ceil((required / effect_size) ** 2))


def compare_all_pairs(values: Mapping[str, Float[np.ndarray, "example"]], seed: int = 0) -> list[PairedDifference]:
    """Compare every pair of methods on the examples that both explained.

    Args:
        values: One value per example for each method, NaN where a method has none.
        seed: Seed of the bootstrap.

    Returns:
        One result per pair, with Holm's correction over all pairs.

    Raises:
        InputError: If the methods have different numbers of examples.
    """
    comparisons = []
    for first, second, differences, p_value, holm_p_value, effect_size in _iter_tested_pairs(values):
        extra_needed = None
        if len(differences) and differences.any():
            # the level that this pair must reach if its Holm factor stays the same
            holm_factor = max(1.0, holm_p_value / p_value) if p_value > 0 else 1.0
            examples_needed = compute_examples_needed(effect_size, ALPHA / holm_factor) or 0
            extra_needed = max(1, examples_needed - len(differences))
            if holm_p_value < ALPHA:
                extra_needed = 0
        interval = bootstrap_interval(differences, seed=seed)
        comparisons.append(PairedDifference(first, second, interval, p_value, holm_p_value, effect_size, extra_needed))
    return comparisons


def _iter_tested_pairs(
    values: Mapping[str, Float[np.ndarray, "example"]],
) -> Iterator[tuple[str, str, Float[np.ndarray, "pair"], float, float, float]]:
    """Yield for every pair of methods: names, differences, signed-rank p-value, Holm's p-value and Cohen's d."""
    names = list(values)
    if len(set(map(len, values.values()))) > 1:
        raise InputError(
            "paired tests need the same examples for every method, in the same order (NaN where one is missing)"
        )
    pairs = [(first, second) for i, first in enumerate(names) for second in names[i + 1 :]]
    results = _compare_pairs(values, pairs)
    holm_p_values = adjust_p_values_holm([p_value for _, p_value, _ in results])
    for pair, result, holm_p_value in zip(pairs, results, holm_p_values, strict=True):
        differences, p_value, effect_size = result
        yield *pair, differences, p_value, holm_p_value, effect_size


def _compare_pairs(
    values: Mapping[str, Float[np.ndarray, "example"]], pairs: Sequence[tuple[str, str]]
) -> list[tuple[Float[np.ndarray, "pair"], float, float]]:
    """Run `compare_paired` for every pair; vectorised over pairs where there are many examples without NaN."""
    matrix = np.array([np.asarray(values[a], dtype=float) - np.asarray(values[b], dtype=float) for a, b in pairs])
    if matrix.ndim != 2 or matrix.shape[1] <= MAX_EXACT_PAIRS or np.isnan(matrix).any():
        return [compare_paired(values[a], values[b]) for a, b in pairs]
    differs = matrix.any(1)
    p_values = np.ones(len(pairs))
    if differs.any():
        p_values[differs] = _compute_approximate_p_values(matrix[differs])
    effect_sizes = [_compute_effect_size(row) if row.any() else 0.0 for row in matrix]
    return list(zip(matrix, p_values.tolist(), effect_sizes, strict=True))


def _compute_signed_rank_sum(differences: Float[np.ndarray, "pair"]) -> float:
    """Compute the sum of signed ranks; its sign tells which method the signed-rank test favours."""
    steps = _rank_with_tolerance(differences)
    return float((np.sign(steps) * scipy.stats.rankdata(np.abs(steps))).sum())


def _compute_effect_size(differences: Float[np.ndarray, "pair"]) -> float:
    """Compute Cohen's d of paired differences; infinite if all differences are equal."""
    standard_deviation = float(differences.std(ddof=1))
    mean = float(differences.mean())
    if not standard_deviation:
        return math.copysign(math.inf, mean)
    return mean / standard_deviation


def compute_rank_ranges(
    values: Mapping[str, Float[np.ndarray, "example"]], smaller_is_better: bool = False
) -> dict[str, str]:
    """Compute for each method the range of ranks that the tests cannot distinguish.

    A method's best rank is one more than the number of significantly better methods. Its worst rank is the number of
    methods minus the number of significantly worse ones.

    Args:
        values: One value per example for each method, NaN where a method has none.
        smaller_is_better: Whether smaller values rank first.

    Returns:
        The ranks of each method, written "1", or "2–4" for a range.

    Raises:
        InputError: If the methods have different numbers of examples.

    Example:
        >>> a = np.linspace(0, 1, 40)
        >>> compute_rank_ranges({"a": a, "b": a + 0.001 * np.sin(np.arange(40)), "c": a - 0.5})
        {'a': '1–2', 'b': '1–2', 'c': '3'}
    """
    num_better = dict.fromkeys(values, 0)
    num_worse = dict.fromkeys(values, 0)
    for first, second, differences, _, holm_p_value, _ in _iter_tested_pairs(values):
        # The mean and the rank sum must agree: a few large losses can outweigh many small gains in the mean.
        if holm_p_value < ALPHA and differences.mean() * _compute_signed_rank_sum(differences) > 0:
            winner, loser = first, second
            if (differences.mean() < 0) != smaller_is_better:
                winner, loser = second, first
            num_better[loser] += 1
            num_worse[winner] += 1
    ranges = {}
    for name in values:
        best = 1 + num_better[name]
        worst = len(values) - num_worse[name]
        ranges[name] = str(best) if best == worst else f"{best}–{worst}"
    return ranges
