"""Statistics: coverage of intervals, corrections by their definition, handling of ties."""

from itertools import product

import numpy as np
import pytest
import scipy

from clearhead.bench.protocols.base import Measurement
from clearhead.bench.tables import MetricColumn, build_columns, compute_column_agreement, render_markdown_table
from clearhead.errors import InputError
from clearhead.stats import (
    adjust_p_values_holm,
    bootstrap_band,
    bootstrap_interval,
    compare_all_pairs,
    compare_paired,
    compute_examples_needed,
    compute_rank_ranges,
    compute_signed_rank_p_value,
)


def test_interval_equals_slow_bootstrap() -> None:
    values = np.random.default_rng(3).normal(size=37)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        drawn = [values[rng.integers(37)] for _ in range(37)]
        means.append(sum(drawn) / 37)
    result = bootstrap_interval(values)
    assert result.mean == pytest.approx(values.mean())
    assert result.low == pytest.approx(np.quantile(means, 0.025), abs=0.03)
    assert result.high == pytest.approx(np.quantile(means, 0.975), abs=0.03)


def test_interval_coverage_is_95_percent() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        result = bootstrap_interval(rng.normal(0.3, 1.0, size=60), num_resamples=400, seed=seed)
        covered += result.low <= 0.3 <= result.high
    assert 180 <= covered <= 199


def test_missing_values_are_dropped() -> None:
    assert (
        bootstrap_interval(np.array([1.0, np.nan, 3.0])).mean == 2
        and bootstrap_interval(np.array([1.0, np.nan])).count == 1
    )
    assert np.isnan(bootstrap_interval(np.array([np.nan])).mean)


def test_one_example_has_no_interval() -> None:
    alone = bootstrap_interval(np.array([0.31, np.nan]))
    assert alone.mean == 0.31 and alone.count == 1 and not alone.has_bounds and str(alone) == "0.310 (no interval)"
    one_group = bootstrap_interval(np.array([1.0, 2.0, 3.0]), groups=np.array([7, 7, 7]))
    assert one_group.mean == 2 and one_group.count == 3 and not one_group.has_bounds
    assert bootstrap_interval(np.array([1.0, 2.0, 3.0]), groups=np.array([7, 7, 8])).has_bounds


def test_holm_equals_its_definition() -> None:
    p = [0.001, 0.2, 0.012, 0.04, 0.012]
    for index, p_value in enumerate(p):
        sorted_p = sorted(p)
        expected = max(min(1.0, (len(p) - rank) * value) for rank, value in enumerate(sorted_p) if value <= p_value)
        assert adjust_p_values_holm(p)[index] == pytest.approx(expected)


def test_paired_test_equals_scipy() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=60)
    b = a + rng.normal(0.4, 0.5, size=60)
    differences, p, effect = compare_paired(a, b)
    assert p == pytest.approx(scipy.stats.wilcoxon(a, b, zero_method="pratt", correction=True, method="approx").pvalue)
    assert effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1)) and effect < 0
    assert len(differences) == 60
    assert compare_paired(a[:20], b[:20])[1] == pytest.approx(
        scipy.stats.wilcoxon(a[:20], b[:20], method="exact").pvalue
    )
    assert compare_paired(a, a)[1:] == (1.0, 0.0)
    b_with_missing = b.copy()
    b_with_missing[:10] = np.nan
    assert len(compare_paired(a, b_with_missing)[0]) == 50


@pytest.mark.parametrize("seed", range(6))
def test_exact_test_with_ties_and_zeros_equals_enumeration(seed: int) -> None:
    """Compare with an enumeration of all signs of the differences."""
    differences = np.random.default_rng(seed).integers(-2, 4, size=9).astype(float)
    magnitudes = np.abs(differences)
    order = [
        1 + sum(other < value for other in magnitudes) + (sum(other == value for other in magnitudes) - 1) / 2
        for value in magnitudes
    ]
    positive_rank_sum = sum(rank for rank, value in zip(order, differences, strict=True) if value > 0)
    sums = [
        sum(rank for rank, value, is_positive in zip(order, differences, signs, strict=True) if value and is_positive)
        for signs in product((False, True), repeat=9)
    ]
    p_lower, p_upper = (
        np.mean([rank_sum <= positive_rank_sum for rank_sum in sums]),
        np.mean([rank_sum >= positive_rank_sum for rank_sum in sums]),
    )
    assert compute_signed_rank_p_value(differences) == pytest.approx(min(1.0, 2 * min(p_lower, p_upper)))


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_nearly_equal_differences_are_ties(times: int, scale: float) -> None:
    """Thirds rounded to six digits, and a rounding error instead of zero; 6 pairs (exact) and 54 (approximate)."""
    rounded = [0.666667 - 0.333333, 0.333333 - 0, 0.333333 - 0.666667, 1 - 0.333333, 0.3 - (0.1 + 0.2), 0.666667 - 1]
    exact = np.array([1, 1, -1, 2, 0, -1] * times, dtype=float) / 3
    assert compute_signed_rank_p_value(scale * np.array(rounded * times)) == pytest.approx(
        compute_signed_rank_p_value(exact), rel=1e-12
    )
    assert (
        compute_signed_rank_p_value(np.array(rounded)) == 0.75
    )  # ranks 3.5 (four) and 6: 12 of 32 signs give 13 or more


def test_normal_approximation_is_inaccurate_for_few_pairs() -> None:
    def approximate(differences: np.ndarray) -> float:
        return float(scipy.stats.wilcoxon(differences, zero_method="pratt", correction=True, method="approx").pvalue)

    agree, zeros = np.arange(1.0, 19), np.repeat([0.0, 1.0], 5)
    assert compute_signed_rank_p_value(agree) == pytest.approx(2 / 2**18) and approximate(agree) > 1e-4
    assert compute_signed_rank_p_value(zeros) == pytest.approx(2 / 2**5) and approximate(zeros) < 0.05


def test_eighteen_agreeing_examples_are_significant_among_thirty_methods() -> None:
    """465 pairs: the smallest p of the normal approximation for 18 examples, 2e-4, is not significant."""
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
    values = np.random.default_rng(5).normal(size=(40, 3)) * [0.1, 1.0, 3.0] + [1.0, 0.0, -1.0]
    low, high = bootstrap_band(values, num_resamples=20_000)
    for point in range(3):
        alone = bootstrap_interval(values[:, point], num_resamples=20_000)
        width = alone.high - alone.low
        assert (low[point], high[point]) == pytest.approx((alone.low, alone.high), abs=0.03 * width)
