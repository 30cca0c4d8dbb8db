"""Statistics: intervals of means, paired tests of means with Holm's correction, effect sizes, required sample sizes.

Examples are the sampling unit: two methods are compared on the examples that both explained, pair by pair. How often
the intervals cover the mean, and how often the tests name a false winner, is simulated in docs/statistics.md.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from jaxtyping import Float, Int

from clearhead.errors import InputError

NUM_RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95
ALPHA = 0.05
#: Bounds of accuracies, precisions and other rates. To be declared for values that often are exactly 0 or 1.
RATE_BOUNDS = (0.0, 1.0)
#: The skewness γ of a sample is multiplied by this: where it matters, samples are less skewed than their distribution.
#: With 1, methods with log-normal errors and equal means are ranked apart in 5.8 % of comparisons of 6 methods on 50
#: examples, with 1.25 in 4.5 %.
SKEWNESS_FACTOR = 1.25
#: Hall's correction is for small γW. Beyond −γW of this, W is divided by 1.71 instead: the cubic polynomial H is flat
#: at γW = −3, and no large W could be significant. Without a maximum, 20 differences (1 with probability 0.85, or −1)
#: are significant in 18 % of samples, with 1.5 in 65 % (Student's t: 93 %).
MAX_SKEWNESS_CORRECTION = 1.5
#: H(W)/W at that maximum, without the term γ/(6n).
_MIN_HALL_RATIO = (1 - (1 - MAX_SKEWNESS_CORRECTION / 3) ** 3) / MAX_SKEWNESS_CORRECTION
#: Maximum number of differences that are not zero for the sign-flip test, which enumerates 2^n signs.
MAX_SIGN_FLIPS = 24
#: Differences closer than this, as a fraction of the larger, are equal. Stored figures have six digits:
#: 0.666667 − 0.333333 and 0.333333 − 0 are the same third.
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
        """Format mean, bounds and number of examples, e.g. "0.713 [0.665, 0.761], n = 250"."""
        return f"{self.format_without_count()}, n = {self.count}"

    def format_without_count(self) -> str:
        """Format mean and bounds, for tables that have the number of examples in another cell.

        Returns:
            Mean and bounds with three decimals; "(no interval)" in place of the bounds of a single example.

        Example:
            >>> ConfidenceInterval(0.7128, 0.6651, 0.7614, count=250).format_without_count()
            '0.713 [0.665, 0.761]'
        """
        if not self.has_bounds:
            return f"{self.mean:.3f} (no interval)"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def has_bounds(self) -> bool:
        """Whether there were enough examples for an interval."""
        return not math.isnan(self.low)


def compute_mean_interval(
    values: Float[np.ndarray, "example"],
    level: float = CONFIDENCE_LEVEL,
    bounds: tuple[float, float] | None = None,
    groups: Int[np.ndarray, "example"] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> ConfidenceInterval:
    """Compute the mean and its confidence interval.

    Without bounds it is Student's t interval, extended by Hall's interval on the side of the long tail
    (`compute_mean_band`). With bounds it is Gaffke's interval: the Bayesian bootstrap of the examples and one more
    example, which lies at the lower bound for `low` and at the upper bound for `high`. Of zeros and ones it is Clopper
    and Pearson's interval. It holds for any distribution between the bounds, also if all examples are equal, but it is
    wider than necessary where no value can be near a bound.

    Args:
        values: One value per example; NaN is dropped.
        level: Confidence level.
        bounds: Smallest and largest possible value (`RATE_BOUNDS`), for values that often lie at a bound.
        groups: Group of each example, if examples of a group depend on each other. Groups are then the sampling unit.
        num_resamples: Number of resamples of the Bayesian bootstrap.
        seed: Seed of the resampling.

    Returns:
        The interval, without bounds for a single example or group.

    Raises:
        InputError: If a value is out of bounds.

    Example:
        >>> str(compute_mean_interval(np.array([1.0, 2.0, 3.0])))
        '2.000 [-0.484, 4.484], n = 3'
        >>> str(compute_mean_interval(np.array([1.0, 1.0, 1.0]), bounds=RATE_BOUNDS))
        '1.000 [0.292, 1.000], n = 3'
        >>> str(compute_mean_interval(np.array([1.0])))
        '1.000 (no interval), n = 1'
    """
    values = np.asarray(values, dtype=np.float64)
    valid = ~np.isnan(values)
    values = values[valid]
    count = len(values)
    if not count:
        return ConfidenceInterval(math.nan, math.nan, math.nan, 0)
    if bounds is not None:
        values = _clip_rounding_errors(values, bounds)
    mean = float(values.mean())
    group_indices = np.arange(count) if groups is None else np.unique(groups[valid], return_inverse=True)[1]
    sizes = np.bincount(group_indices).astype(float)
    sums = np.bincount(group_indices, values)
    if len(sizes) == 1:
        return ConfidenceInterval(mean, math.nan, math.nan, count)
    if bounds is None:
        # the mean of all examples, linearised: a mean of one value per group
        low, high = compute_mean_band(mean + (sums - mean * sizes) / sizes.mean(), level)
    elif len(sizes) == count and np.isin(values, bounds).all():
        low, high = _compute_binomial_bounds(values == bounds[1], level) * (bounds[1] - bounds[0]) + bounds[0]
    else:
        low, high = _compute_gaffke_bounds(sums, sizes, bounds, level, num_resamples, seed)
    return ConfidenceInterval(mean, float(low), float(high), count)


def _clip_rounding_errors(values: Float[np.ndarray, "example"], bounds: tuple[float, float]) -> np.ndarray:
    """Clip values that are out of bounds by no more than a rounding error, and raise for others."""
    tolerance = TIE_TOLERANCE * (bounds[1] - bounds[0])
    if values.min() < bounds[0] - tolerance or values.max() > bounds[1] + tolerance:
        raise InputError(
            f"values from {values.min():g} to {values.max():g} are out of the bounds {bounds[0]:g} and {bounds[1]:g}: "
            "pass the smallest and the largest possible value, or no bounds"
        )
    return np.clip(values, *bounds)


def compute_mean_band(
    values: Float[np.ndarray, "example *point"], level: float = CONFIDENCE_LEVEL
) -> Float[np.ndarray, "2 *point"]:
    """Compute the interval of the mean at each point of a curve, or of one mean if there is one value per example.

    With mean x̄, standard deviation s and skewness γ of n examples, Student's t interval contains each mean μ for which
    W = (x̄ − μ)/s has |√n·W| ≤ q, where q is the quantile of the t distribution. Hall's interval contains each μ with
    |√n·H(W)| ≤ q, where H(W) = W + γW²/3 + γ²W³/27 + γ/(6n) is less skewed than W. The result contains both: estimated
    from a sample, γ is too small where it matters, so Hall's interval may extend Student's, but not shorten it.

    Args:
        values: One value or curve per example.
        level: Confidence level.

    Returns:
        Lower and upper bounds; NaN for a single example.

    Example:
        >>> compute_mean_band(np.array([[1.0, 0.5], [1.0, 0.5]])).tolist()
        [[1.0, 0.5], [1.0, 0.5]]
    """
    count = len(values)
    if count < 2:
        return np.full((2, *values.shape[1:]), math.nan)
    mean, standard_deviation, skewness = _compute_moments(np.asarray(values, dtype=np.float64))
    quantile = scipy.stats.t.ppf((1 + level) / 2, count - 1) / math.sqrt(count)
    low = np.maximum(quantile, _invert_hall_transform(quantile, skewness, count))
    high = np.minimum(-quantile, _invert_hall_transform(-quantile, skewness, count))
    return np.stack([mean - standard_deviation * low, mean - standard_deviation * high])


def _compute_moments(values: Float[np.ndarray, "example *point"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute mean, standard deviation and skewness (times `SKEWNESS_FACTOR`) over examples."""
    count = len(values)
    mean = values.mean(0)
    deviations = values - mean
    # equal values whose mean is rounded deviate from it
    deviations = np.where(np.abs(deviations) <= 1e-15 * count * np.abs(values).max(0), 0.0, deviations)
    variance = (deviations**2).mean(0)
    # The usual correction of the skewness of small samples, which is zero for two examples.
    correction = math.sqrt(count * (count - 1)) / (count - 2) if count > 2 else 0.0
    standardised = deviations / np.sqrt(np.where(variance > 0, variance, 1.0))
    skewness = SKEWNESS_FACTOR * correction * (standardised**3).mean(0)
    return mean, np.sqrt(variance * count / (count - 1)), skewness


def _apply_hall_transform(w: np.ndarray, skewness: np.ndarray, count: int) -> np.ndarray:
    """Compute Hall's H(W), which increases with W; linear in W beyond `MAX_SKEWNESS_CORRECTION`."""
    cubic = w + skewness * w**2 / 3 + skewness**2 * w**3 / 27
    linear = w * _MIN_HALL_RATIO
    return np.where(skewness * w < -MAX_SKEWNESS_CORRECTION, linear, cubic) + skewness / (6 * count)


def _invert_hall_transform(y: float, skewness: np.ndarray, count: int) -> np.ndarray:
    """Compute the W for which H(W) = y, from H(W) = ((1 + γW/3)³ − 1)/γ + γ/(6n)."""
    shifted = y - skewness / (6 * count)
    is_skewed = np.abs(skewness) > 1e-6
    divisor = np.where(is_skewed, skewness, 1.0)
    cubic = np.where(is_skewed, 3 / divisor * (np.cbrt(1 + divisor * shifted) - 1), shifted)
    return np.where(skewness * cubic < -MAX_SKEWNESS_CORRECTION, shifted / _MIN_HALL_RATIO, cubic)


def _compute_binomial_bounds(is_success: np.ndarray, level: float) -> np.ndarray:
    """Compute Clopper and Pearson's bounds of a rate."""
    count, num_successes = len(is_success), int(is_success.sum())
    low, high = 0.0, 1.0
    if num_successes:
        low = scipy.stats.beta.ppf((1 - level) / 2, num_successes, count - num_successes + 1)
    if num_successes < count:
        high = scipy.stats.beta.ppf((1 + level) / 2, num_successes + 1, count - num_successes)
    return np.array([low, high])


def _compute_gaffke_bounds(
    sums: Float[np.ndarray, "group"],
    sizes: Float[np.ndarray, "group"],
    bounds: tuple[float, float],
    level: float,
    num_resamples: int,
    seed: int,
    max_elements: int = 2**22,
) -> tuple[float, float]:
    """Compute Gaffke's bounds of a mean: quantiles of randomly weighted means of the groups and a group at a bound.

    The weights are exponentially distributed. They are drawn in chunks, to bound the memory.
    """
    rng = np.random.default_rng(seed)
    rows_per_chunk = max(1, max_elements // (len(sums) + 1))
    chunks = []
    for start in range(0, num_resamples, rows_per_chunk):
        weights = rng.exponential(size=(min(rows_per_chunk, num_resamples - start), len(sums) + 1))
        weighted_sums, bound_weights = weights[:, :-1] @ sums, weights[:, -1] * sizes.mean()
        total_weights = weights[:, :-1] @ sizes + bound_weights
        chunks.append([(weighted_sums + bound * bound_weights) / total_weights for bound in bounds])
    low_means, high_means = np.concatenate(chunks, axis=1)
    return float(np.quantile(low_means, (1 - level) / 2)), float(np.quantile(high_means, (1 + level) / 2))


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two methods on the same examples; positive where the first has larger values.

    Attributes:
        first: Name of the first method.
        second: Name of the second method.
        difference: The mean difference with its interval.
        p_value: p-value of the paired test of the mean (`compute_paired_p_value`).
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
    """Compare the means of two methods on shared examples.

    Differences that are only rounding errors are set to zero.

    Args:
        first: Values of the first method; NaN where an example has none.
        second: Values of the second method, for the same examples.

    Returns:
        The differences, the p-value of the paired test of their mean (`compute_paired_p_value`), and the effect size.

    Example:
        >>> differences, p_value, effect_size = compare_paired(np.array([0.5, 0.7, 0.9]), np.array([0.4, 0.5, 0.6]))
        >>> p_value, round(effect_size, 2)
        (0.25, 2.0)
    """
    differences = _subtract_paired(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    if len(differences) < 2 or not differences.any():
        return differences, 1.0, 0.0
    return differences, compute_paired_p_value(differences), _compute_effect_size(differences)


def _subtract_paired(
    first: Float[np.ndarray, "example"], second: Float[np.ndarray, "example"]
) -> Float[np.ndarray, "pair"]:
    """Compute the differences of the pairs without NaN; zero where they are rounding errors of the values.

    A rounding error is small compared with both values of its pair, or with most values (0.3 − (0.1 + 0.2) in one
    method and 0 in the other). The largest value is no scale: a single outlier would turn all differences into zeros.

    >>> _subtract_paired(np.array([0.3, 5.0, 1e6]), np.array([0.1 + 0.2, 4.0, 0.0])).tolist()
    [0.0, 1.0, 1000000.0]
    """
    differences = first - second
    valid = ~np.isnan(differences)
    differences = differences[valid]
    magnitudes = np.maximum(np.abs(first), np.abs(second))[valid]
    if not magnitudes.any():
        return differences
    scales = np.maximum(magnitudes, np.median(magnitudes[magnitudes > 0]))
    return np.where(np.abs(differences) <= TIE_TOLERANCE * scales, 0.0, differences)


def compute_paired_p_value(differences: Float[np.ndarray, "pair"]) -> float:
    """Compute the two-sided p-value of the hypothesis that the mean difference is zero.

    It is the largest p-value of three tests: Student's t test, Hall's t test, which corrects it for skewed differences
    (`compute_mean_band`), and the sign-flip test, which is exact for few symmetric differences, equal ones included.

    Args:
        differences: One difference per pair, at least two, not all zero.

    Returns:
        The p-value.

    Example:
        >>> compute_paired_p_value(np.array([0.3, 0.1, 0.2]))
        0.25
        >>> round(compute_paired_p_value(np.array([0.3, 0.1, 0.2, 0.2, 0.1, 0.3, 0.2, -0.1])), 3)
        0.089
    """
    count = len(differences)
    mean, standard_deviation, skewness = _compute_moments(differences)
    p_value = compute_sign_flip_p_value(differences)
    if standard_deviation > 0:
        w = np.asarray(mean / standard_deviation)
        hall = _apply_hall_transform(w, skewness, count)
        # different signs: the correction is as large as the mean, so nothing is known about the direction
        smallest = min(abs(float(w)), abs(float(hall))) if w * hall > 0 else 0.0
        p_value = max(p_value, 2 * float(scipy.stats.t.sf(math.sqrt(count) * smallest, count - 1)))
    return min(1.0, p_value)


def compute_sign_flip_p_value(differences: Float[np.ndarray, "pair"]) -> float:
    """Compute the exact two-sided p-value of the sign-flip (Fisher's permutation) test of the mean.

    If differences have either sign with equal probability, p is twice the fraction of all signs that give at least this
    sum. A sign pattern gives a smaller sum if the differences that it flips have a positive sum (of the same sign as
    all differences together); sums of zero within `TIE_TOLERANCE` of the flipped magnitudes are ties.

    Args:
        differences: One difference per pair.

    Returns:
        The p-value for up to `MAX_SIGN_FLIPS` differences that are not zero, its lower bound 2^(1−n) above.

    Example:
        >>> compute_sign_flip_p_value(np.array([0.3, 0.1, 0.2]))
        0.25
        >>> compute_sign_flip_p_value(np.array([0.3, -0.1, 0.2, 0.0]))
        0.5
    """
    nonzero = differences[differences != 0]
    if not len(nonzero):
        return 1.0
    if len(nonzero) > MAX_SIGN_FLIPS:
        return float(2.0 ** (1 - len(nonzero)))
    oriented = nonzero if nonzero.sum() > 0 else -nonzero
    shrunk = oriented - TIE_TOLERANCE * np.abs(oriented)
    # every subset of all differences is a subset of the first half and one of the second half
    first_sums, second_sums = (_compute_subset_sums(half) for half in np.array_split(shrunk, 2))
    num_sums = np.searchsorted(np.sort(second_sums), -first_sums, side="right").sum()
    return min(1.0, float(2 * num_sums / 2 ** len(nonzero)))


def _compute_subset_sums(values: Float[np.ndarray, "value"]) -> Float[np.ndarray, "subset"]:
    """Compute the sums of all subsets of the values, the empty one included."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums


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


def compare_all_pairs(values: Mapping[str, Float[np.ndarray, "example"]]) -> list[PairedDifference]:
    """Compare every pair of methods on the examples that both explained.

    Args:
        values: One value per example for each method, NaN where a method has none.

    Returns:
        One result per pair, with Holm's correction over all pairs.

    Raises:
        InputError: If the methods have different numbers of examples.

    Example:
        >>> a = np.linspace(0, 1, 40)
        >>> pair = compare_all_pairs({"a": a, "b": a - 0.5 + 0.1 * np.sin(np.arange(40))})[0]
        >>> pair.first, pair.second, pair.is_significant, pair.extra_examples_needed
        ('a', 'b', True, 0)
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
        interval = compute_mean_interval(differences)
        comparisons.append(PairedDifference(first, second, interval, p_value, holm_p_value, effect_size, extra_needed))
    return comparisons


def _iter_tested_pairs(
    values: Mapping[str, Float[np.ndarray, "example"]],
) -> Iterator[tuple[str, str, Float[np.ndarray, "pair"], float, float, float]]:
    """Yield for every pair of methods: names, differences, p-value, Holm's p-value and Cohen's d."""
    names = list(values)
    if len(set(map(len, values.values()))) > 1:
        raise InputError(
            "paired tests need the same examples for every method, in the same order (NaN where one is missing)"
        )
    pairs = [(first, second) for i, first in enumerate(names) for second in names[i + 1 :]]
    results = [compare_paired(values[first], values[second]) for first, second in pairs]
    holm_p_values = adjust_p_values_holm([p_value for _, p_value, _ in results])
    for pair, result, holm_p_value in zip(pairs, results, holm_p_values, strict=True):
        differences, p_value, effect_size = result
        yield *pair, differences, p_value, holm_p_value, effect_size


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
    """Compute for each method the range of ranks by its mean that the paired tests cannot distinguish.

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
        if holm_p_value < ALPHA:
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
