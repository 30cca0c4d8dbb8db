"""KernelSHAP against Shapley values by their definition, on models and on games with known values."""

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


def played(method, count, value, seed=0):
    """A method on a game of one's own: the shares, and every coalition that was asked for."""
    game = CoalitionGame(count, seed, get_windows=None, get_hierarchy=None)
    play, asked, worth = method.iter_coalitions(game), [], None
    while True:
        try:
            rows = play.send(worth)
        except StopIteration as end:
            return end.value, asked
        asked += [tuple(row.nonzero().flatten().tolist()) for row in rows]
        worth = torch.tensor([value(row.nonzero().flatten().tolist()) for row in rows], dtype=torch.float64)


def fold(**options):
    return KernelShap(unit_context=None, **options)


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "deberta/classify"])
def test_equals_the_definition(subject: str) -> None:
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
def test_any_game_of_up_to_eleven_is_solved_exactly(count: int) -> None:
    generator = np.random.default_rng(count)
    worth = generator.normal(size=2**count)

    def value(members):
        return worth[sum(2**member for member in members)]

    shares, asked = played(fold(), count, value)
    np.testing.assert_allclose(shares.scores, kernel_shap.scores(range(count), value), atol=1e-9)
    assert len(asked) == len(set(asked)) == 2**count


@pytest.mark.parametrize("count", [4, 12, 40])
@pytest.mark.parametrize("evaluations", [None, 200])
def test_an_additive_game_gives_back_its_weights(count: int, evaluations: int | None) -> None:
    weights = np.linspace(-2, 3, count)
    shares, asked = played(fold(evaluations=evaluations), count, lambda members: 5 + weights[members].sum())
    np.testing.assert_allclose(shares.scores, weights, atol=1e-9)
    assert shares.base_value == 5
    assert len(asked) <= (evaluations or 2 * count + 1024)


def test_more_evaluations_come_closer() -> None:
    """A game of thirteen with interactions, whose Shapley values are known: a product's are equal shares."""
    count = 13
    known = np.arange(count) / 10
    known[2:5] += 1 / 3
    gaps = []
    for evaluations in (60, 600, 5000):
        many = [
            played(
                fold(evaluations=evaluations),
                count,
                lambda members: sum(m / 10 for m in members) + ({2, 3, 4} <= set(members)),
                seed,
            )[0].scores.numpy()
            for seed in range(5)
        ]
        gaps.append(np.mean([np.abs(scores - known).max() for scores in many]))
    assert all(more < less / 2 for less, more in pairwise(gaps)), gaps


@pytest.mark.parametrize("count", range(12, 71))
def test_too_few_coalitions_give_the_smallest_of_the_fits(count: int) -> None:
    """A coalition and its complement are one equation for φ: (v(z) − v(¬z)) / 2. In what both of them say together
    there is no φ, and a rounding error taken for some made scores of 1e13."""

    def value(members: list[int]) -> float:
        return np.random.default_rng([count, *members]).normal()

    shares, _ = played(fold(evaluations=40), count, value)
    z, weights = sample_coalitions(
        count, 38, CoalitionGame(count, 0, get_windows=None, get_hierarchy=None).make_generator()
    )
    base, total = value([]), value(list(range(count))) - value([])
    rows, targets = [], []
    for row, weight in zip(z[::2].numpy(), weights[::2].numpy(), strict=True):
        there, away = (value(np.flatnonzero(part).tolist()) - base for part in (row, ~row))
        rows.append(weight**0.5 * (row - row.mean()))  # what is left of a row beside a constant: Σ φ is given
        targets.append(weight**0.5 * ((there - away) / 2 - total * (row.mean() - 0.5)))
    smallest = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=1e-9)[0]
    assert replica_comparison.gap(shares.scores, total / count + smallest) < 1e-9


def test_symmetric_players_and_null_players() -> None:
    """Not declared axioms of the sampled values, but of the exact ones."""
    shares, _ = played(fold(), 4, lambda members: float({1, 2} <= set(members)))
    np.testing.assert_allclose(shares.scores, [0, 0.5, 0.5, 0], atol=1e-12)


@pytest.mark.parametrize(("count", "budget"), [(12, 300), (16, 1054), (30, 62), (30, 4), (200, 1000)])
def test_coalitions_come_with_their_complements(count: int, budget: int) -> None:
    rows, weights = sample_coalitions(count, budget, torch.Generator().manual_seed(0))
    assert 0 < len(rows) <= budget and len(rows) == len(weights)
    sizes = rows.sum(1)
    assert sizes.min() >= 1 and sizes.max() <= count - 1
    here = {tuple(row.tolist()) for row in rows}
    assert all(tuple((~row).tolist()) in here for row in rows)
    total = sum((count - 1) / (s * (count - s)) for s in range(1, count))
    assert float(weights.sum()) == pytest.approx(total)


def test_the_seed_and_the_content_decide_what_is_drawn() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    method = clearhead.Method("kernel-shap", evaluations=100)
    one = ex.explain(text, method)
    assert one.certificate["checks"]["evaluations"] <= 100
    assert replica_comparison.gap(ex.explain([models.TEXTS[0], text], method)[1].scores, one.scores) < 1e-10
    assert replica_comparison.gap(ex.explain(text, method, seed=1).scores, one.scores) > 1e-6
    assert one.base_value + one.scores.sum() == pytest.approx(one.target["value"], rel=1e-12)


@pytest.mark.parametrize("evaluations", [3, 0, 2.5, "many"])
def test_bad_budgets(evaluations) -> None:
    with pytest.raises(clearhead.InputError, match=r"evaluations=.* is not possible"):
        replica_comparison.explainer("bert/classify").explain(
            models.TEXTS[0], clearhead.Method("kernel-shap", evaluations=evaluations)
        )
