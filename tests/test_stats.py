"""Statistics: simulated coverage and error rates, corrections by their definition, handling of ties."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy

from clearhead.bench.protocols.base import Measurement
from clearhead.bench.tables import MetricColumn, build_columns, compute_column_agreement, render_markdown_table
from clearhead.errors import InputError
from clearhead.stats import (
    RATE_BOUNDS,
    adjust_p_values_holm,
    compare_all_pairs,
    compare_paired,
    compute_examples_needed,
    compute_mean_band,
    compute_mean_interval,
    compute_paired_p_value,
    compute_rank_ranges,
    compute_sign_flip_p_value,
)

#: Distribution → (sampler of the given shape, mean, bounds of the interval).
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], float, Any]] = {
    "normal": (lambda rng, shape: rng.normal(size=shape), 0.0, None),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), 1.0, None),
    "log-normal": (lambda rng, shape: rng.lognormal(size=shape), float(np.exp(0.5)), None),
    "beta near 1": (lambda rng, shape: rng.beta(0.9, 0.1, size=shape), 0.9, RATE_BOUNDS),
    "rate 0.5": (lambda rng, shape: (rng.random(shape) < 0.5).astype(float), 0.5, RATE_BOUNDS),
    "rate 0.9": (lambda rng, shape: (rng.random(shape) < 0.9).astype(float), 0.9, RATE_BOUNDS),
    "rate 0.98": (lambda rng, shape: (rng.random(shape) < 0.98).astype(float), 0.98, RATE_BOUNDS),
}


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20, 50])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_cover_the_mean(name: str, count: int) -> None:
    """Coverage of 95 % intervals; no interval covers the mean of few examples of an unbounded skewed distribution."""
    draw, mean, bounds = DISTRIBUTIONS[name]
    least = {"exponential": 0.90 if count < 10 else 0.93, "log-normal": 0.86 if count < 10 else 0.89}.get(name, 0.94)
    rng = np.random.default_rng(count)
    if bounds is None:
        low, high = compute_mean_band(draw(rng, (count, 4000)))
    else:
        samples = draw(rng, (300, count))
        intervals = [compute_mean_interval(values, bounds=bounds, num_resamples=400) for values in samples]
        low, high = np.array([(interval.low, interval.high) for interval in intervals]).T
    coverage = ((low <= mean) & (mean <= high)).mean()
    assert coverage >= least
    if name == "normal":
        assert coverage <= 0.98


def test_interval_contains_exactly_the_means_that_the_test_does_not_reject() -> None:
    """Interval and p-value are two implementations, one of the inverse transform; the sign-flip test only adds to p."""
    rng = np.random.default_rng(4)
    for values in (
        rng.normal(size=30),
        rng.lognormal(size=40),
        -rng.lognormal(size=40),
        np.r_[np.ones(30), -np.ones(4)],
    ):
        interval = compute_mean_interval(values)
        for bound in (interval.low, interval.high):
            assert compute_paired_p_value(values - bound) == pytest.approx(0.05, abs=1e-6)


def test_symmetric_sample_has_students_interval() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = scipy.stats.t.interval(0.95, 4, values.mean(), scipy.stats.sem(values))
    interval = compute_mean_interval(values)
    assert (interval.low, interval.high) == pytest.approx(expected)


def test_interval_extends_students_towards_the_tail() -> None:
    values = np.array([1.0, 1.1, 1.2, 1.0, 1.3, 1.1, 6.0])
    low, high = scipy.stats.t.interval(0.95, 6, values.mean(), scipy.stats.sem(values))
    interval = compute_mean_interval(values)
    assert interval.low == pytest.approx(low) and interval.high > high + 1


def test_rate_interval_equals_clopper_and_pearson() -> None:
    for count, successes in ((5, 5), (8, 7), (20, 3), (6, 0)):
        values = np.repeat([1.0, 0.0], [successes, count - successes])
        exact = scipy.stats.binomtest(successes, count).proportion_ci(0.95)
        interval = compute_mean_interval(values, bounds=RATE_BOUNDS)
        assert (interval.low, interval.high) == pytest.approx((exact.low, exact.high))
        nearly = compute_mean_interval(np.abs(values - 1e-9), bounds=RATE_BOUNDS, num_resamples=40_000)
        assert (nearly.low, nearly.high) == pytest.approx((exact.low, exact.high), abs=0.01)


def test_equal_examples_have_an_interval_if_bounded() -> None:
    """n equal values x: a new example has a weight of up to 1 − 0.025^(1/n), and may lie at either bound."""
    interval = compute_mean_interval(np.full(7, 0.7), bounds=RATE_BOUNDS, num_resamples=40_000)
    weight = 1 - 0.025 ** (1 / 7)
    assert (interval.low, interval.high) == pytest.approx((0.7 * (1 - weight), 0.7 + 0.3 * weight), abs=0.01)


def test_values_out_of_bounds_raise() -> None:
    with pytest.raises(InputError, match="out of the bounds 0 and 1"):
        compute_mean_interval(np.array([0.5, 1.2]), bounds=RATE_BOUNDS)
    rounded, exact = (compute_mean_interval(np.array([0.5, 1 + error]), bounds=RATE_BOUNDS) for error in (1e-12, 0))
    assert rounded == exact


def test_missing_values_are_dropped() -> None:
    assert compute_mean_interval(np.array([1.0, np.nan, 3.0])).mean == 2
    assert compute_mean_interval(np.array([1.0, np.nan])).count == 1
    assert np.isnan(compute_mean_interval(np.array([np.nan])).mean)


def test_one_example_has_no_interval() -> None:
    alone = compute_mean_interval(np.array([0.31, np.nan]))
    assert alone.mean == 0.31 and alone.count == 1 and not alone.has_bounds
    assert str(alone) == "0.310 (no interval), n = 1"
    one_group = compute_mean_interval(np.array([1.0, 2.0, 3.0]), groups=np.array([7, 7, 7]))
    assert one_group.mean == 2 and one_group.count == 3 and not one_group.has_bounds
    assert compute_mean_interval(np.array([1.0, 2.0, 3.0]), groups=np.array([7, 7, 8])).has_bounds


def test_holm_equals_its_definition() -> None:
    p = [0.001, 0.2, 0.012, 0.04, 0.012]
    for index, p_value in enumerate(p):
        sorted_p = sorted(p)
        expected = max(min(1.0, (len(p) - rank) * value) for rank, value in enumerate(sorted_p) if value <= p_value)
        assert adjust_p_values_holm(p)[index] == pytest.approx(expected)


def test_paired_test_of_symmetric_differences_equals_students() -> None:
    rng = np.random.default_rng(1)
    half = rng.normal(size=30)
    a = rng.normal(size=60)
    b = a + np.r_[half, -half] + 0.4
    differences, p, effect = compare_paired(a, b)
    assert p == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue)
    assert effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1)) and effect < 0
    assert len(differences) == 60
    assert compare_paired(a, a)[1:] == (1.0, 0.0)
    b_with_missing = b.copy()
    b_with_missing[:10] = np.nan
    assert len(compare_paired(a, b_with_missing)[0]) == 50


@pytest.mark.parametrize("seed", range(6))
def test_sign_flip_test_equals_enumeration(seed: int) -> None:
    """Integers, so that many sums are equal, and zeros."""
    differences = np.random.default_rng(seed).integers(-2, 4, size=9).astype(float)
    sums = [np.dot(signs, differences) for signs in product((-1, 1), repeat=9)]
    expected = np.mean(np.abs(sums) >= abs(differences.sum()))
    assert compute_sign_flip_p_value(differences) == pytest.approx(expected)
    reference = scipy.stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert compute_sign_flip_p_value(differences) == pytest.approx(min(1.0, reference.pvalue))


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_nearly_equal_differences_are_ties(scale: float) -> None:
    """Thirds rounded to six digits, and a rounding error instead of zero."""
    first = scale * np.array([0.666667, 0.333333, 0.333333, 1.0, 0.3, 0.666667])
    second = scale * np.array([0.333333, 0.0, 0.666667, 0.333333, 0.1 + 0.2, 1.0])
    differences, _, _ = compare_paired(first, second)
    assert (differences == 0).tolist() == [False] * 4 + [True, False]
    assert compute_sign_flip_p_value(differences) == compute_sign_flip_p_value(np.array([1, 1, -1, 2, 0, -1.0]))


def test_rounding_errors_of_equal_methods_are_no_difference() -> None:
    values = np.random.default_rng(0).random(40)
    assert compare_paired(values, values * (1 + 1e-9))[1] == 1
    assert compare_paired(np.r_[values, 0.0], np.r_[values, 1e-12])[1] == 1


@pytest.mark.parametrize("outlier", [2e5, 2e9])
def test_an_outlier_does_not_turn_other_differences_into_zeros(outlier: float) -> None:
    differences, p, _ = compare_paired(np.r_[np.ones(30), outlier], np.zeros(31))
    assert differences.tolist() == [1.0] * 30 + [outlier]
    assert p == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue) and p < 0.5
    assert compute_sign_flip_p_value(np.r_[np.ones(20), outlier]) == 2 / 2**21
    few = np.r_[np.ones(8), -1, outlier]
    assert compute_sign_flip_p_value(few) == compute_sign_flip_p_value(np.r_[np.ones(8), -1, 100])


def test_equal_or_few_differences_are_significant_only_by_their_signs() -> None:
    assert compute_paired_p_value(np.full(5, 0.1)) == 2 / 2**5
    assert compute_paired_p_value(np.repeat([0.0, 1.0], [25, 5])) == 2 / 2**5  # Student's t: 0.02
    assert compute_paired_p_value(np.full(60, 0.1)) == 2 / 2**60


def test_few_opposed_differences_do_not_outweigh_many() -> None:
    """Hall's correction without a maximum gives p = 0.03, Student's t 1e-12."""
    assert compute_paired_p_value(np.repeat([1.0, -1.0], [45, 5])) < 1e-5


@pytest.mark.parametrize(
    ("name", "num_methods", "count"),
    [
        *(("exponential", num_methods, count) for num_methods, count in [(2, 5), (2, 20), (2, 100), (6, 10), (6, 50)]),
        *(("log-normal", num_methods, count) for num_methods, count in [(2, 50), (2, 100), (6, 50), (6, 100)]),
        *(("normal", num_methods, count) for num_methods, count in [(2, 10), (6, 20)]),
        *(("beta near 1", num_methods, count) for num_methods, count in [(2, 50), (6, 50)]),
    ],
)
def test_false_winners_are_rare(name: str, num_methods: int, count: int) -> None:
    """Methods with equal means, but errors that are skewed in opposite directions, are ranked apart in at most 5 %."""
    draw, mean, _ = DISTRIBUTIONS[name]
    num_runs = 400 if num_methods == 2 else 150
    errors = draw(np.random.default_rng(7), (num_runs, num_methods, count)) - mean
    errors[:, 1::2] *= -1
    if num_methods == 2:
        errors[:, 1] = 0
    num_false = 0
    for run_errors in errors:
        ranks = compute_rank_ranges({str(index): values for index, values in enumerate(run_errors)})
        num_false += set(ranks.values()) != {f"1–{num_methods}"}
    # 99 % of the simulations of a test with an error of exactly 5 % stay below
    assert num_false <= scipy.stats.binom.ppf(0.99, num_runs, 0.05)


def test_eighteen_agreeing_examples_are_significant_among_thirty_methods() -> None:
    """465 pairs: the smallest p of a normal approximation for 18 signs, 2e-4, is not significant."""
    rng = np.random.default_rng(5)
    values = {f"m{n}": rng.normal(0, 0.1, size=18) for n in range(30)}
    assert compute_rank_ranges({**values, "best": np.full(18, 3.0)})["best"] == "1"


def test_examples_needed_give_80_percent_power() -> None:
    """With the computed number of pairs, about 80 % of studies find the effect."""
    needed = compute_examples_needed(0.4)
    assert needed is not None
    rng = np.random.default_rng(2)
    is_significant = [scipy.stats.ttest_1samp(rng.normal(0.4, 1.0, size=needed), 0).pvalue < 0.05 for _ in range(500)]
    assert 0.74 < np.mean(is_significant) < 0.87
    a = rng.normal(size=12)
    (pair,) = compare_all_pairs({"a": a, "b": a + rng.normal(0.2, 1.0, size=12)})
    assert not pair.is_significant and pair.extra_examples_needed is not None and pair.extra_examples_needed > 0
    (equal_pair,) = compare_all_pairs({"a": a, "b": a})
    assert equal_pair.extra_examples_needed is None and not equal_pair.is_significant
    (distinct_pair,) = compare_all_pairs({"a": a, "b": a + 2 + 0.1 * rng.normal(size=12)})
    assert distinct_pair.is_significant and distinct_pair.extra_examples_needed == 0


def test_indistinguishable_methods_share_a_rank_range() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=60)
    values = {
        name: base + shift + 0.2 * rng.normal(size=60) for name, shift in [("a", 0), ("b", 0), ("c", 2), ("d", -2)]
    }
    assert compute_rank_ranges(values) == {"a": "2–3", "b": "2–3", "c": "1", "d": "4"}
    assert compute_rank_ranges(values, smaller_is_better=True) == {"a": "2–3", "b": "2–3", "c": "4", "d": "1"}


def test_comparing_methods_with_different_examples_raises() -> None:
    with pytest.raises(InputError, match="same examples"):
        compare_all_pairs({"a": np.zeros(3), "b": np.zeros(4)})


def test_markdown_table_shows_intervals_ranks_and_missing_methods() -> None:
    rows = [
        Measurement(str(i), method, "text", {"f": value + 0.01 * (i % 3)})
        for i in range(12)
        for method, value in (("good", 0.9), ("bad", 0.1))
    ]
    text = render_markdown_table(build_columns("m", rows, "f", {"other": "has no rule"}))
    lines = text.splitlines()
    assert lines[2].startswith("| good | 0.910 [") and lines[2].endswith("· 1 |")
    assert lines[3].endswith("· 2 |") and lines[4] == "| other | – |" and lines[-1] == "| examples | 12 |"


def test_column_agreement_is_rank_correlation() -> None:
    def column(name: str, **means: float) -> MetricColumn:
        return MetricColumn(name, ["1", "2"], {method: np.array([mean, mean + 0.1]) for method, mean in means.items()})

    table = [column("black", a=1, b=2, c=3, d=4), column("blur", a=1, b=3, c=2, e=9), column("mean", a=3, b=2, c=1)]
    result = compute_column_agreement(table)
    assert result["black", "blur"] == pytest.approx(1 / 3) and result["black", "mean"] == -1
    assert result["blur", "mean"] == pytest.approx(-1 / 3)


def test_band_equals_pointwise_intervals() -> None:
    values = np.random.default_rng(5).lognormal(size=(40, 3)) * [0.1, 1.0, -3.0] + [1.0, 0.0, -1.0]
    low, high = compute_mean_band(values)
    for point in range(3):
        alone = compute_mean_interval(values[:, point])
        assert (low[point], high[point]) == pytest.approx((alone.low, alone.high))
