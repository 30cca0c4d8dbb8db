"""Intervals cover, corrections equal their definition, ties are ties."""

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


def test_interval_equals_a_slow_bootstrap() -> None:
    values = np.random.default_rng(3).normal(size=37)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        drawn = [values[rng.integers(37)] for _ in range(37)]
        means.append(sum(drawn) / 37)
    found = bootstrap_interval(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=0.03)
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=0.03)


def test_interval_coverage() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(200):
        found = bootstrap_interval(rng.normal(0.3, 1.0, size=60), num_resamples=400, seed=seed)
        inside += found.low <= 0.3 <= found.high
    assert 180 <= inside <= 199


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
    for place, own in enumerate(p):
        smaller = sorted(p)
        expected = max(min(1.0, (len(p) - rank) * value) for rank, value in enumerate(smaller) if value <= own)
        assert adjust_p_values_holm(p)[place] == pytest.approx(expected)


def test_paired_test_equals_scipy() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=60)
    b = a + rng.normal(0.4, 0.5, size=60)
    own, p, effect = compare_paired(a, b)
    assert p == pytest.approx(scipy.stats.wilcoxon(a, b, zero_method="pratt", correction=True, method="approx").pvalue)
    assert effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1)) and effect < 0
    assert len(own) == 60
    assert compare_paired(a[:20], b[:20])[1] == pytest.approx(
        scipy.stats.wilcoxon(a[:20], b[:20], method="exact").pvalue
    )
    assert compare_paired(a, a)[1:] == (1.0, 0.0)
    shared = b.copy()
    shared[:10] = np.nan
    assert len(compare_paired(a, shared)[0]) == 50


@pytest.mark.parametrize("seed", range(6))
def test_exact_test_with_ties_and_zeros(seed: int) -> None:
    """Against every way of giving the differences signs."""
    given = np.random.default_rng(seed).integers(-2, 4, size=9).astype(float)
    sizes = np.abs(given)
    order = [1 + sum(other < own for other in sizes) + (sum(other == own for other in sizes) - 1) / 2 for own in sizes]
    above = sum(rank for rank, own in zip(order, given, strict=True) if own > 0)
    sums = [
        sum(rank for rank, own, up in zip(order, given, signs, strict=True) if own and up)
        for signs in product((False, True), repeat=9)
    ]
    as_low, as_high = np.mean([one <= above for one in sums]), np.mean([one >= above for one in sums])
    assert compute_signed_rank_p_value(given) == pytest.approx(min(1.0, 2 * min(as_low, as_high)))


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_nearly_equal_differences_are_ties(times: int, scale: float) -> None:
    """Thirds kept with six digits, and what floating point leaves of nothing; 6 pairs (exact) and 54 (approximate)."""
    kept = [0.666667 - 0.333333, 0.333333 - 0, 0.333333 - 0.666667, 1 - 0.333333, 0.3 - (0.1 + 0.2), 0.666667 - 1]
    meant = np.array([1, 1, -1, 2, 0, -1] * times, dtype=float) / 3
    assert compute_signed_rank_p_value(scale * np.array(kept * times)) == pytest.approx(
        compute_signed_rank_p_value(meant), rel=1e-12
    )
    assert compute_signed_rank_p_value(np.array(kept)) == 0.75  # ranks 3.5 (four) and 6: 12 of 32 signs give 13 or more


def test_normal_approximation_is_inaccurate_for_few_pairs() -> None:
    def approximate(given: np.ndarray) -> float:
        return float(scipy.stats.wilcoxon(given, zero_method="pratt", correction=True, method="approx").pvalue)

    agree, zeros = np.arange(1.0, 19), np.repeat([0.0, 1.0], 5)
    assert compute_signed_rank_p_value(agree) == pytest.approx(2 / 2**18) and approximate(agree) > 1e-4
    assert compute_signed_rank_p_value(zeros) == pytest.approx(2 / 2**5) and approximate(zeros) < 0.05


def test_eighteen_agreeing_examples_are_significant_among_thirty_methods() -> None:
    """465 pairs: the normal approximation's least p of 18, 2e-4, would never do."""
    rng = np.random.default_rng(5)
    values = {f"m{n}": rng.normal(0, 0.1, size=18) for n in range(30)}
    assert compute_rank_ranges({**values, "best": np.full(18, 3.0)})["best"] == "1"


def test_extra_examples_needed() -> None:
    """With the number of pairs that is asked for, about 80 % of studies find the effect."""
    needed = compute_examples_needed(0.4)
    assert needed is not None
    rng = np.random.default_rng(2)
    found = [scipy.stats.ttest_1samp(rng.normal(0.4, 1.0, size=needed), 0).pvalue < 0.05 for _ in range(500)]
    assert 0.74 < np.mean(found) < 0.87
    a = rng.normal(size=12)
    (one,) = compare_all_pairs({"a": a, "b": a + rng.normal(0.2, 1.0, size=12)})
    assert not one.is_significant and one.extra_examples_needed is not None and one.extra_examples_needed > 0
    (same,) = compare_all_pairs({"a": a, "b": a})
    assert same.extra_examples_needed is None and not same.is_significant
    (far,) = compare_all_pairs({"a": a, "b": a + 2 + 0.1 * rng.normal(size=12)})
    assert far.is_significant and far.extra_examples_needed == 0


def test_rank_ranges_of_indistinguishable_methods() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=60)
    values = {
        name: base + shift + 0.2 * rng.normal(size=60) for name, shift in [("a", 0), ("b", 0), ("c", 2), ("d", -2)]
    }
    assert compute_rank_ranges(values) == {"a": "2–3", "b": "2–3", "c": "1", "d": "4"}
    assert compute_rank_ranges(values, smaller_is_better=True) == {"a": "2–3", "b": "2–3", "c": "4", "d": "1"}


def test_methods_must_have_the_same_examples() -> None:
    with pytest.raises(InputError, match="same examples"):
        compare_all_pairs({"a": np.zeros(3), "b": np.zeros(4)})


def test_a_table_shows_intervals_ties_and_gaps() -> None:
    rows = [
        Measurement(str(i), method, "text", {"f": value + 0.01 * (i % 3)})
        for i in range(12)
        for method, value in (("good", 0.9), ("bad", 0.1))
    ]
    text = render_markdown_table(build_columns("m", rows, "f", {"other": "has no rule"}))
    lines = text.splitlines()
    assert lines[2].startswith("| good | 0.910 [") and lines[2].endswith("· 1 |")
    assert lines[3].endswith("· 2 |") and lines[4] == "| other | – |" and lines[-1] == "| examples | 12 |"


def test_agreement_of_fills_is_rank_correlation() -> None:
    def column(name: str, **means: float) -> MetricColumn:
        return MetricColumn(name, ["1", "2"], {method: np.array([mean, mean + 0.1]) for method, mean in means.items()})

    table = [column("black", a=1, b=2, c=3, d=4), column("blur", a=1, b=3, c=2, e=9), column("mean", a=3, b=2, c=1)]
    found = compute_column_agreement(table)
    assert found["black", "blur"] == pytest.approx(1 / 3) and found["black", "mean"] == -1
    assert found["blur", "mean"] == pytest.approx(-1 / 3)


def test_band_equals_pointwise_intervals() -> None:
    values = np.random.default_rng(5).normal(size=(40, 3)) * [0.1, 1.0, 3.0] + [1.0, 0.0, -1.0]
    low, high = bootstrap_band(values, num_resamples=20_000)
    for point in range(3):
        alone = bootstrap_interval(values[:, point], num_resamples=20_000)
        width = alone.high - alone.low
        assert (low[point], high[point]) == pytest.approx((alone.low, alone.high), abs=0.03 * width)
