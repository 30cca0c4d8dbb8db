"""Permutation tests against every permutation, false discoveries against scipy, and lengths that confound."""

from itertools import combinations, product

import numpy as np
import pytest
import scipy

from clearhead.errors import InputError
from clearhead.stats import bootstrap_interval
from clearhead.studies.code.permutation_tests import (
    compare_groups,
    compare_paired_inputs,
    compute_cliffs_delta,
    compute_q_values,
)


def test_p_is_the_share_of_all_labellings():
    rng = np.random.default_rng(0)
    values, first = rng.normal(size=(8, 3)), np.arange(8) < 4
    values[:4, 0] += 2
    gaps = []
    for chosen in combinations(range(8), 4):
        label = np.isin(np.arange(8), chosen)
        gaps.append(values[label].mean(0) - values[~label].mean(0))
    observed = values[:4].mean(0) - values[4:].mean(0)
    exact = (np.abs(gaps) >= np.abs(observed) - 1e-12).mean(0)
    found = compare_groups(values, first, num_permutations=20_000)
    np.testing.assert_allclose(found.mean_difference, observed)
    np.testing.assert_allclose(found.p_values, exact, atol=0.012)


def test_signs_of_the_same_inputs():
    gaps = np.random.default_rng(1).normal(0.6, 1, size=(9, 2))
    flips = np.array(list(product([-1, 1], repeat=9))) @ gaps / 9
    exact = (np.abs(flips) >= np.abs(gaps.mean(0)) - 1e-12).mean(0)
    found = compare_paired_inputs(np.zeros((9, 2)), gaps, num_permutations=20_000)
    np.testing.assert_allclose(found.p_values, exact, atol=0.012)
    np.testing.assert_allclose(found.mean_difference, gaps.mean(0))


def about_few_functions(rng, functions=24, each=10):
    """Questions about a few functions: each function has its own attention and its own difficulty, which have nothing
    to do with each other."""
    own = np.repeat(np.arange(functions), each)
    values = rng.normal(size=(functions, 4))[own] + 0.3 * rng.normal(size=(len(own), 4))
    right = rng.random(len(own)) < rng.choice([0.2, 0.8], size=functions)[own]
    return values, right, own


def test_several_questions_about_one_function_are_no_independent_evidence():
    rng, naive, held, draws = np.random.default_rng(5), 0, 0, 100
    for _ in range(draws):
        values, right, own = about_few_functions(rng)
        naive += int((compare_groups(values, right, num_permutations=300).p_values < 0.05).sum())
        held += int((compare_groups(values, right, num_permutations=300, function_ids=own).p_values < 0.05).sum())
    assert naive / (4 * draws) > 0.3, "one by one, a function's own peculiarity is taken for a difference"
    assert held / (4 * draws) < 0.09


def test_a_difference_is_found_among_functions_all_the_same():
    values, right, own = about_few_functions(np.random.default_rng(6))
    values[:, 2] += 1.5 * right
    found = compare_groups(values, right, function_ids=own)
    assert found.p_values[2] < 0.001 and found.mean_difference[2] > 1
    same = compare_groups(values[::10], right[::10], function_ids=own[::10])
    np.testing.assert_array_equal(
        same.p_values, compare_groups(values[::10], right[::10]).p_values
    )  # one question a function
    one_sided = np.where((right & (own > 0))[:, None], np.nan, values)
    assert np.isnan(
        compare_groups(one_sided, right, function_ids=own).p_values
    ).all()  # right answers of one function alone


def test_signs_flip_function_by_function():
    rng = np.random.default_rng(7)
    own = np.repeat(np.arange(6), 5)
    gaps = (rng.normal(size=(6, 3)) + 0.5)[own] + 0.05 * rng.normal(size=(30, 3))
    sums = np.array([gaps[own == number].sum(0) for number in range(6)])
    flips = np.array(list(product([-1, 1], repeat=6))) @ sums
    exact = (np.abs(flips) >= np.abs(sums.sum(0)) - 1e-12).mean(0)
    found = compare_paired_inputs(np.zeros((30, 3)), gaps, num_permutations=20_000, function_ids=own)
    np.testing.assert_allclose(found.p_values, exact, atol=0.012)
    assert (compare_paired_inputs(np.zeros((30, 3)), gaps, num_permutations=20_000).p_values < found.p_values).all()


def test_intervals_draw_functions_whole():
    rng, own, inside = np.random.default_rng(8), np.repeat(np.arange(20), 8), {True: 0, False: 0}
    for _ in range(200):
        values = rng.normal(size=20)[own] + 0.2 * rng.normal(size=160)
        for grouped in inside:
            found = bootstrap_interval(values, num_resamples=400, groups=own if grouped else None)
            inside[grouped] += found.low <= 0 <= found.high
    assert inside[True] > 0.85 * 200 and inside[False] < 0.7 * 200
    alone = rng.normal(size=30)
    assert bootstrap_interval(alone, groups=np.arange(30)) == bootstrap_interval(alone)


def test_corrected_as_scipy_corrects():
    p = np.random.default_rng(2).uniform(size=(4, 5)) ** 2
    np.testing.assert_allclose(compute_q_values(p).ravel(), scipy.stats.false_discovery_control(p.ravel()))
    holes = np.where(p < 0.1, np.nan, p)
    kept = ~np.isnan(holes)
    np.testing.assert_allclose(compute_q_values(holes)[kept], scipy.stats.false_discovery_control(holes[kept]))


def test_delta_by_counting_pairs():
    rng = np.random.default_rng(3)
    one, other = rng.integers(6, size=12).astype(float), rng.integers(6, size=9).astype(float)
    counted = np.mean([np.sign(a - b) for a in one for b in other])
    assert compute_cliffs_delta(one, other) == pytest.approx(counted)
    assert compute_cliffs_delta(np.append(one, np.nan), other) == pytest.approx(counted)


def test_nothing_is_found_where_nothing_is():
    """200 draws of 30 cells: at a rate of 0.05, a draw with any false discovery is as rare as that."""
    rng, wrong = np.random.default_rng(4), 0
    for _ in range(200):
        found = compare_groups(rng.lognormal(size=(60, 30)), rng.permutation(60) < 12, num_permutations=800, seed=1)
        wrong += bool(found.is_significant.any())
    assert wrong <= 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)


def test_what_is_there_is_found_with_holes():
    rng = np.random.default_rng(5)
    first = np.arange(80) < 30
    values = rng.normal(size=(80, 2, 10))
    values[first, 1, 3] += 1.5
    values[rng.random(values.shape) < 0.2] = np.nan
    values[:, 0, 0] = np.nan
    values[first, 0, 1] = np.nan
    found = compare_groups(values, first, num_permutations=4000)
    assert np.argwhere(found.is_significant).tolist() == [[1, 3]] and found.cliffs_delta[1, 3] > 0.5
    assert np.isnan(found.p_values[0, 0]) and np.isnan(found.q_values[0, 1])
    assert found.value_counts[0, 1, 3] == (~np.isnan(values[first, 1, 3])).sum()


def test_a_difference_of_length_alone_is_none():
    """Wrong answers come from longer inputs, and the score grows with length: shuffled among inputs of like length."""
    rng = np.random.default_rng(6)
    lengths = rng.choice([20, 50, 90], size=400)
    first = rng.random(400) < lengths / 120
    values = np.log(lengths)[:, None] + rng.normal(0, 0.3, (400, 1))
    assert compare_groups(values, first, num_permutations=999).p_values[0] < 0.005
    assert compare_groups(values, first, lengths.astype(float), num_permutations=999).p_values[0] > 0.05
    values[first] += 0.3
    assert compare_groups(values, first, lengths.astype(float), num_permutations=999).p_values[0] < 0.005


def test_a_difference_of_kind_alone_is_none():
    """Identifiers are harder than separators, and looked at less: right and wrong must be compared within each."""
    rng = np.random.default_rng(8)
    kinds = rng.choice(["identifier", "separator"], size=400)
    first = rng.random(400) < np.where(kinds == "identifier", 0.5, 0.95)
    values = np.where(kinds == "identifier", 0.0, 1.0)[:, None] + rng.normal(0, 0.5, (400, 1))
    assert compare_groups(values, first, num_permutations=999).p_values[0] < 0.005
    assert compare_groups(values, first, categories=list(kinds), num_permutations=999).p_values[0] > 0.05
    values[first] += 0.4
    found = compare_groups(values, first, categories=list(kinds), num_permutations=999)
    assert found.p_values[0] < 0.005 and found.mean_difference[0] == pytest.approx(0.4, abs=0.2)


def test_one_sided_groups_are_refused():
    with pytest.raises(InputError, match="groups of 1 and 9 inputs cannot be compared"):
        compare_groups(np.zeros((10, 1)), np.arange(10) < 1)
    with pytest.raises(InputError, match="same inputs and heads are needed twice"):
        compare_paired_inputs(np.zeros((3, 2)), np.zeros((3, 4)))


def test_why_no_input_is_dropped_for_being_far_from_the_mean():
    """Keeping what lies within mean ± t·SEM of each group, as a report did, finds differences in noise alone."""
    rng = np.random.default_rng(7)
    values, first = rng.lognormal(size=(600, 24)), np.arange(600) < 480

    def kept(column):
        reach = scipy.stats.t.ppf(0.975, len(column) - 1) * scipy.stats.sem(column)
        return column[np.abs(column - column.mean()) < reach]

    groups = [(kept(column[first]), kept(column[~first])) for column in values.T]
    filtered = [
        scipy.stats.ttest_ind(one, other).pvalue < 0.05 for one, other in groups if min(len(one), len(other)) > 1
    ]
    assert np.mean(filtered) > 0.5
    assert not compare_groups(values, first, num_permutations=2000).is_significant.any()
