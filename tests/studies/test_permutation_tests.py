"""Permutation tests against exhaustive permutations, q-values against scipy, and confounders."""

from itertools import combinations, product

import numpy as np
import pytest
import scipy

from clearhead.errors import InputError
from clearhead.stats import RATE_BOUNDS, compute_mean_interval
from clearhead.studies.code.permutation_tests import (
    compare_groups,
    compare_paired_inputs,
    compute_cliffs_delta,
    compute_q_values,
)


def test_p_values_equal_exhaustive_relabelling():
    rng = np.random.default_rng(0)
    values, first = rng.normal(size=(8, 3)), np.arange(8) < 4
    values[:4, 0] += 2
    gaps = []
    for chosen in combinations(range(8), 4):
        label = np.isin(np.arange(8), chosen)
        gaps.append(values[label].mean(0) - values[~label].mean(0))
    observed = values[:4].mean(0) - values[4:].mean(0)
    exact = (np.abs(gaps) >= np.abs(observed) - 1e-12).mean(0)
    result = compare_groups(values, first, num_permutations=20_000)
    np.testing.assert_allclose(result.mean_difference, observed)
    np.testing.assert_allclose(result.p_values, exact, atol=0.012)


def test_paired_p_values_equal_exhaustive_sign_flips():
    gaps = np.random.default_rng(1).normal(0.6, 1, size=(9, 2))
    flips = np.array(list(product([-1, 1], repeat=9))) @ gaps / 9
    exact = (np.abs(flips) >= np.abs(gaps.mean(0)) - 1e-12).mean(0)
    result = compare_paired_inputs(np.zeros((9, 2)), gaps, num_permutations=20_000)
    np.testing.assert_allclose(result.p_values, exact, atol=0.012)
    np.testing.assert_allclose(result.mean_difference, gaps.mean(0))


def make_values_of_few_functions(rng, functions=24, each=10):
    """Make questions about few functions: each function has its own attention and its own difficulty, which are
    independent of each other."""
    function_ids = np.repeat(np.arange(functions), each)
    values = rng.normal(size=(functions, 4))[function_ids] + 0.3 * rng.normal(size=(len(function_ids), 4))
    right = rng.random(len(function_ids)) < rng.choice([0.2, 0.8], size=functions)[function_ids]
    return values, right, function_ids


def test_grouping_by_function_controls_false_positive_rate():
    rng, ungrouped_hits, grouped_hits, draws = np.random.default_rng(5), 0, 0, 100
    for _ in range(draws):
        values, right, function_ids = make_values_of_few_functions(rng)
        ungrouped_hits += int((compare_groups(values, right, num_permutations=300).p_values < 0.05).sum())
        grouped_hits += int(
            (compare_groups(values, right, num_permutations=300, function_ids=function_ids).p_values < 0.05).sum()
        )
    assert ungrouped_hits / (4 * draws) > 0.3, "without grouping, peculiarities of a function count as a difference"
    assert grouped_hits / (4 * draws) < 0.09


def test_grouped_test_detects_a_planted_difference():
    values, right, function_ids = make_values_of_few_functions(np.random.default_rng(6))
    values[:, 2] += 1.5 * right
    result = compare_groups(values, right, function_ids=function_ids)
    assert result.p_values[2] < 0.001 and result.mean_difference[2] > 1
    singletons = compare_groups(values[::10], right[::10], function_ids=function_ids[::10])
    np.testing.assert_array_equal(
        singletons.p_values, compare_groups(values[::10], right[::10]).p_values
    )  # one question per function
    one_sided = np.where((right & (function_ids > 0))[:, None], np.nan, values)
    assert np.isnan(
        compare_groups(one_sided, right, function_ids=function_ids).p_values
    ).all()  # only one function has right answers


def test_paired_sign_flips_are_per_function():
    rng = np.random.default_rng(7)
    function_ids = np.repeat(np.arange(6), 5)
    gaps = (rng.normal(size=(6, 3)) + 0.5)[function_ids] + 0.05 * rng.normal(size=(30, 3))
    sums = np.array([gaps[function_ids == number].sum(0) for number in range(6)])
    flips = np.array(list(product([-1, 1], repeat=6))) @ sums
    exact = (np.abs(flips) >= np.abs(sums.sum(0)) - 1e-12).mean(0)
    result = compare_paired_inputs(np.zeros((30, 3)), gaps, num_permutations=20_000, function_ids=function_ids)
    np.testing.assert_allclose(result.p_values, exact, atol=0.012)
    assert (compare_paired_inputs(np.zeros((30, 3)), gaps, num_permutations=20_000).p_values < result.p_values).all()


@pytest.mark.parametrize("num_functions", [5, 20])
def test_intervals_over_functions_cover_the_mean(num_functions):
    """Functions of different sizes; the questions about one function have nearly the same value."""
    rng, coverage = np.random.default_rng(8), {True: 0, False: 0}
    for _ in range(300):
        function_ids = np.repeat(np.arange(num_functions), rng.integers(1, 9, size=num_functions))
        values = rng.normal(size=num_functions)[function_ids] + 0.2 * rng.normal(size=len(function_ids))
        for grouped in coverage:
            result = compute_mean_interval(values, groups=function_ids if grouped else None)
            coverage[grouped] += result.low <= 0 <= result.high
    assert coverage[True] > 0.91 * 300 and coverage[False] < 0.85 * 300
    independent = rng.normal(size=30)
    alone, grouped = compute_mean_interval(independent), compute_mean_interval(independent, groups=np.arange(30))
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high))


def test_accuracy_intervals_over_functions_cover_the_mean():
    rng, num_covered = np.random.default_rng(9), 0
    for _ in range(200):
        function_ids = np.repeat(np.arange(8), rng.integers(1, 9, size=8))
        is_correct = rng.random(len(function_ids)) < rng.beta(9, 1, size=8)[function_ids]
        result = compute_mean_interval(
            is_correct.astype(float), bounds=RATE_BOUNDS, groups=function_ids, num_resamples=400
        )
        num_covered += result.low <= 0.9 <= result.high
    assert num_covered > 0.93 * 200


def test_q_values_equal_scipy():
    p = np.random.default_rng(2).uniform(size=(4, 5)) ** 2
    np.testing.assert_allclose(compute_q_values(p).ravel(), scipy.stats.false_discovery_control(p.ravel()))
    with_nan = np.where(p < 0.1, np.nan, p)
    is_valid = ~np.isnan(with_nan)
    np.testing.assert_allclose(
        compute_q_values(with_nan)[is_valid], scipy.stats.false_discovery_control(with_nan[is_valid])
    )


def test_cliffs_delta_equals_counting_pairs():
    rng = np.random.default_rng(3)
    first, second = rng.integers(6, size=12).astype(float), rng.integers(6, size=9).astype(float)
    counted = np.mean([np.sign(a - b) for a in first for b in second])
    assert compute_cliffs_delta(first, second) == pytest.approx(counted)
    assert compute_cliffs_delta(np.append(first, np.nan), second) == pytest.approx(counted)


def test_false_discovery_rate_on_noise_is_controlled():
    """200 draws of 30 cells: at a rate of 0.05, at most 5 % of draws (plus 3 standard errors) have a discovery."""
    rng, num_false = np.random.default_rng(4), 0
    for _ in range(200):
        result = compare_groups(rng.lognormal(size=(60, 30)), rng.permutation(60) < 12, num_permutations=800, seed=1)
        num_false += bool(result.is_significant.any())
    assert num_false <= 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)


def test_planted_cell_is_found_with_missing_values():
    rng = np.random.default_rng(5)
    first = np.arange(80) < 30
    values = rng.normal(size=(80, 2, 10))
    values[first, 1, 3] += 1.5
    values[rng.random(values.shape) < 0.2] = np.nan
    values[:, 0, 0] = np.nan
    values[first, 0, 1] = np.nan
    result = compare_groups(values, first, num_permutations=4000)
    assert np.argwhere(result.is_significant).tolist() == [[1, 3]] and result.cliffs_delta[1, 3] > 0.5
    assert np.isnan(result.p_values[0, 0]) and np.isnan(result.q_values[0, 1])
    assert result.value_counts[0, 1, 3] == (~np.isnan(values[first, 1, 3])).sum()


def test_length_strata_remove_a_length_confounder():
    """Wrong answers come from longer inputs and the score grows with length: permute only among similar lengths."""
    rng = np.random.default_rng(6)
    lengths = rng.choice([20, 50, 90], size=400)
    first = rng.random(400) < lengths / 120
    values = np.log(lengths)[:, None] + rng.normal(0, 0.3, (400, 1))
    assert compare_groups(values, first, num_permutations=999).p_values[0] < 0.005
    assert compare_groups(values, first, lengths.astype(float), num_permutations=999).p_values[0] > 0.05
    values[first] += 0.3
    assert compare_groups(values, first, lengths.astype(float), num_permutations=999).p_values[0] < 0.005


def test_category_strata_remove_a_category_confounder():
    """Identifiers are harder than separators and receive less attention: compare only within each category."""
    rng = np.random.default_rng(8)
    kinds = rng.choice(["identifier", "separator"], size=400)
    first = rng.random(400) < np.where(kinds == "identifier", 0.5, 0.95)
    values = np.where(kinds == "identifier", 0.0, 1.0)[:, None] + rng.normal(0, 0.5, (400, 1))
    assert compare_groups(values, first, num_permutations=999).p_values[0] < 0.005
    assert compare_groups(values, first, categories=list(kinds), num_permutations=999).p_values[0] > 0.05
    values[first] += 0.4
    result = compare_groups(values, first, categories=list(kinds), num_permutations=999)
    assert result.p_values[0] < 0.005 and result.mean_difference[0] == pytest.approx(0.4, abs=0.2)


def test_too_small_or_mismatched_groups_raise():
    with pytest.raises(InputError, match="groups of 1 and 9 inputs cannot be compared"):
        compare_groups(np.zeros((10, 1)), np.arange(10) < 1)
    with pytest.raises(InputError, match="must have the same inputs and heads"):
        compare_paired_inputs(np.zeros((3, 2)), np.zeros((3, 4)))


def test_dropping_values_far_from_the_mean_inflates_false_positives():
    """Keeping only values within mean ± t·SEM of each group, as one report did, finds differences in pure noise."""
    rng = np.random.default_rng(7)
    values, first = rng.lognormal(size=(600, 24)), np.arange(600) < 480

    def keep_near_mean(column):
        reach = scipy.stats.t.ppf(0.975, len(column) - 1) * scipy.stats.sem(column)
        return column[np.abs(column - column.mean()) < reach]

    groups = [(keep_near_mean(column[first]), keep_near_mean(column[~first])) for column in values.T]
    filtered = [
        scipy.stats.ttest_ind(right, wrong).pvalue < 0.05 for right, wrong in groups if min(len(right), len(wrong)) > 1
    ]
    assert np.mean(filtered) > 0.5
    assert not compare_groups(values, first, num_permutations=2000).is_significant.any()
