"""KernelSHAP equals exact Shapley values on models and on games with known values."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import clearhead
from clearhead.methods._perturbation import CoalitionGame
from clearhead.methods.kernel_shap import KernelShap, sample_coalitions
from tests import models
from tests.methods import coalition_values, replica_comparison
from tests.replicas import kernel_shap


def run_game(method, count, value, seed=0):
    """Run a method on a game; return its result and every coalition that it evaluated."""
    game = CoalitionGame(count, seed, get_windows=None, get_hierarchy=None)
    rounds, coalitions, values = method.iter_coalitions(game), [], None
    while True:
        try:
            rows = rounds.send(values)
        except StopIteration as end:
            return end.value, coalitions
        coalitions += [tuple(row.nonzero().flatten().tolist()) for row in rows]
        values = torch.tensor([value(row.nonzero().flatten().tolist()) for row in rows], dtype=torch.float64)


def make_method(**options):
    return KernelShap(unit_context=None, **options)


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "deberta/classify"])
def test_model_scores_equal_exact_shapley_values(subject: str) -> None:
    raw = models.inputs(subject)[0 if subject != "deberta/classify" else 2]
    players, units, value = coalition_values.game(subject, raw)
    assert len(players) <= 11
    e = replica_comparison.explainer(subject).explain(raw, "kernel-shap")
    assert (
        replica_comparison.gap(e.scores, coalition_values.on_units(kernel_shap.scores(players, value), players, units))
        < 1e-9
    )
    assert e.base_value == pytest.approx(value([]), rel=1e-12)
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 11])
def test_game_of_up_to_eleven_players_equals_exact_shapley_values(count: int) -> None:
    generator = np.random.default_rng(count)
    values = generator.normal(size=2**count)

    def value(members):
        return values[sum(2**member for member in members)]

    result, coalitions = run_game(make_method(), count, value)
    np.testing.assert_allclose(result.scores, kernel_shap.scores(range(count), value), atol=1e-9)
    assert len(coalitions) == len(set(coalitions)) == 2**count


@pytest.mark.parametrize("count", [4, 12, 40])
@pytest.mark.parametrize("evaluations", [None, 200])
def test_additive_game_recovers_its_weights(count: int, evaluations: int | None) -> None:
    weights = np.linspace(-2, 3, count)
    result, coalitions = run_game(
        make_method(evaluations=evaluations), count, lambda members: 5 + weights[members].sum()
    )
    np.testing.assert_allclose(result.scores, weights, atol=1e-9)
    assert result.base_value == 5
    assert len(coalitions) <= (evaluations or 2 * count + 1024)


def test_more_evaluations_reduce_the_error() -> None:
    """A game of thirteen players with known Shapley values: a product of players is divided equally among them."""
    count = 13
    expected = np.arange(count) / 10
    expected[2:5] += 1 / 3
    gaps = []
    for evaluations in (60, 600, 5000):
        runs = [
            run_game(
                make_method(evaluations=evaluations),
                count,
                lambda members: sum(m / 10 for m in members) + ({2, 3, 4} <= set(members)),
                seed,
            )[0].scores.numpy()
            for seed in range(5)
        ]
        gaps.append(np.mean([np.abs(scores - expected).max() for scores in runs]))
    assert all(more < less / 2 for less, more in pairwise(gaps)), gaps


@pytest.mark.parametrize("count", range(12, 71))
def test_underdetermined_fit_has_minimum_norm(count: int) -> None:
    """A coalition and its complement give one equation for φ: (v(z) − v(¬z)) / 2.

    Their sum does not depend on φ; its rounding error once caused scores of 1e13.
    """

    def value(members: list[int]) -> float:
        return np.random.default_rng([count, *members]).normal()

    result, _ = run_game(make_method(evaluations=40), count, value)
    z, weights = sample_coalitions(
        count, 38, CoalitionGame(count, 0, get_windows=None, get_hierarchy=None).make_generator()
    )
    base, total = value([]), value(list(range(count))) - value([])
    rows, targets = [], []
    for row, weight in zip(z[::2].numpy(), weights[::2].numpy(), strict=True):
        present_value, absent_value = (value(np.flatnonzero(members).tolist()) - base for members in (row, ~row))
        rows.append(weight**0.5 * (row - row.mean()))  # minus the mean, since Σ φ is fixed
        targets.append(weight**0.5 * ((present_value - absent_value) / 2 - total * (row.mean() - 0.5)))
    smallest = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=1e-9)[0]
    assert replica_comparison.gap(result.scores, total / count + smallest) < 1e-9


def test_symmetric_and_null_players_have_exact_values() -> None:
    """These axioms hold for exact values only, so they are not declared for sampled ones."""
    result, _ = run_game(make_method(), 4, lambda members: float({1, 2} <= set(members)))
    np.testing.assert_allclose(result.scores, [0, 0.5, 0.5, 0], atol=1e-12)


@pytest.mark.parametrize(("count", "budget"), [(12, 300), (16, 1054), (30, 62), (30, 4), (200, 1000)])
def test_sampled_coalitions_include_their_complements(count: int, budget: int) -> None:
    rows, weights = sample_coalitions(count, budget, torch.Generator().manual_seed(0))
    assert 0 < len(rows) <= budget and len(rows) == len(weights)
    sizes = rows.sum(1)
    assert sizes.min() >= 1 and sizes.max() <= count - 1
    coalitions = {tuple(row.tolist()) for row in rows}
    assert all(tuple((~row).tolist()) in coalitions for row in rows)
    total = sum((count - 1) / (s * (count - s)) for s in range(1, count))
    assert float(weights.sum()) == pytest.approx(total)


def test_sampled_coalitions_depend_only_on_seed_and_content() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    method = clearhead.Method("kernel-shap", evaluations=100)
    e = ex.explain(text, method)
    assert e.certificate["checks"]["evaluations"] <= 100
    assert replica_comparison.gap(ex.explain([models.TEXTS[0], text], method)[1].scores, e.scores) < 1e-10
    assert replica_comparison.gap(ex.explain(text, method, seed=1).scores, e.scores) > 1e-6
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-12)


@pytest.mark.parametrize("evaluations", [3, 0, 2.5, "many"])
def test_invalid_evaluations_are_rejected(evaluations) -> None:
    with pytest.raises(clearhead.InputError, match=r"evaluations=.* is not valid"):
        replica_comparison.explainer("bert/classify").explain(
            models.TEXTS[0], clearhead.Method("kernel-shap", evaluations=evaluations)
        )
