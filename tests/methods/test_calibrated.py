"""Calibrated Shapley values: the replica, convergence to exact values, coverage of the intervals, the stopping rule."""

from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest
import torch

import clearhead
from clearhead.methods._coalition_pairs import PairSampler
from clearhead.methods._perturbation import CoalitionGame
from clearhead.methods._shapley_posterior import compute_shapley_posterior
from clearhead.methods.calibrated import Calibrated
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import coalition_values, replica_comparison
from tests.methods.test_deeplift import load_bert_with_small_weights
from tests.replicas import calibrated, kernel_shap


def run_game(values, guess=None, sensitivity=None, seed=0, **options):
    """Explain a game with 2^M values; bit i of an index is player i. Return the scores, half-widths and the result."""
    count = len(values).bit_length() - 1
    components = {"deeplift-shap": guess, "saliency": sensitivity}
    components = {name: torch.as_tensor(scores) for name, scores in components.items() if scores is not None}
    game = CoalitionGame(count, seed, get_windows=None, get_hierarchy=None, component_scores=components)
    rounds, answers, evaluated = Calibrated(unit_context=None, **options).iter_coalitions(game), None, 0
    while True:
        try:
            rows = rounds.send(answers)
        except StopIteration as end:
            result = end.value
            covariance = result.intervals.compute_covariance(torch.eye(count, dtype=torch.float64))
            half_widths = result.intervals.multiplier * covariance.diagonal().clamp(min=0).sqrt()
            return result.scores.numpy(), half_widths.numpy(), result, evaluated
        evaluated += len(rows)
        answers = torch.as_tensor(values[(rows.numpy() * 2 ** np.arange(count)).sum(1)])


def draw_game(generator, count, misfit=1.0):
    """The values of a game with sparse additive effects and interactions of two and three players."""
    masks = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    effects = generator.standard_t(3, size=count)
    values = masks @ effects
    for order in (2, 3):
        for _ in range(count):
            members = generator.choice(count, size=order, replace=False)
            values = values + misfit * generator.normal() * masks[:, members].prod(1)
    return values, effects


def compute_shapley(values):
    count = len(values).bit_length() - 1
    return kernel_shap.scores(range(count), lambda members: values[sum(2**member for member in members)])


def draw_data(count, num_pairs, seed, guess_is_zero=False):
    generator = np.random.default_rng(seed)
    values, effects = draw_game(generator, count)
    sampler = PairSampler(count, torch.Generator().manual_seed(seed))
    coalitions = sampler.draw(num_pairs)
    bits = 2 ** np.arange(count)
    present, absent = ((z.numpy() * bits).sum(1) for z in (coalitions, ~coalitions))
    return (
        coalitions,
        torch.as_tensor((values[present] - values[absent]) / 2),
        sampler.compute_weights(),
        sampler.compute_evaluated_share(),
        torch.as_tensor(values[-1] - values[0]),
        torch.as_tensor(0 * effects if guess_is_zero else effects + generator.normal(size=count)),
        torch.as_tensor(1 + generator.random(count)),
    )


@pytest.mark.parametrize(("count", "num_pairs"), [(5, 7), (6, 25), (9, 31), (12, 7), (12, 40)])
def test_scores_and_covariance_equal_reference_implementation(count: int, num_pairs: int) -> None:
    data = draw_data(count, num_pairs, seed=count)
    posterior = compute_shapley_posterior(*data)
    scores, covariance, weight = calibrated.scores(
        *(part.numpy() if isinstance(part, torch.Tensor) else part for part in data)
    )
    assert replica_comparison.gap(posterior.mean, scores) < 1e-9
    own = posterior.compute_covariance(torch.eye(count, dtype=torch.float64))
    assert replica_comparison.gap(own, covariance) < 1e-7  # differences of nearly equal numbers
    torch.testing.assert_close(posterior.variances, own.diagonal().clamp(min=0))
    assert posterior.guess_weight == pytest.approx(weight, rel=1e-7)


def test_sign_and_size_of_the_guess_have_no_effect() -> None:
    *data, guess, scales = draw_data(9, 20, seed=1)
    expected = compute_shapley_posterior(*data, guess, scales)
    for factor in (-1.0, 3.0):
        posterior = compute_shapley_posterior(*data, factor * guess, scales)
        torch.testing.assert_close(posterior.mean, expected.mean)
        torch.testing.assert_close(posterior.variances, expected.variances)
        assert posterior.guess_weight == pytest.approx(expected.guess_weight / factor)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prior", ["none", "random", "negated"])
def test_all_coalitions_give_exact_shapley_values_without_uncertainty(count: int, prior: str) -> None:
    generator = np.random.default_rng(count)
    values = generator.normal(size=2**count)
    expected = compute_shapley(values)
    guess = {"none": None, "random": generator.normal(size=count), "negated": -expected}[prior]
    scores, half_widths, result, evaluated = run_game(values, guess, evaluations=2**count + 16, tolerance=0.0)
    np.testing.assert_allclose(scores, expected, atol=1e-9)
    np.testing.assert_array_equal(half_widths, 0)
    assert evaluated == 2**count
    assert result.resolved_options["stopped_because"] == "all coalitions were evaluated"


def test_model_scores_equal_exact_shapley_values() -> None:
    raw = models.inputs("bert/classify")[0]
    players, units, value = coalition_values.game("bert/classify", raw)
    method = clearhead.Method("calibrated", evaluations=2**12, tolerance=0.0)
    e = replica_comparison.explainer("bert/classify").explain(raw, method)
    expected = coalition_values.on_units(kernel_shap.scores(players, value), players, units)
    assert replica_comparison.gap(e.scores, expected) < 1e-9
    np.testing.assert_array_equal(e.intervals[:, 0], e.intervals[:, 1])
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-12)
    assert e.certificate["checks"]["completeness_gap"] < 1e-9


@pytest.mark.parametrize("prior", ["good", "none", "random"])
@pytest.mark.parametrize("evaluations", [32, 64])
def test_intervals_cover_the_exact_values_of_nine_units_in_ten(prior: str, evaluations: int) -> None:
    generator = np.random.default_rng(evaluations)
    covered, count = [], 9
    for seed in range(60):
        values, effects = draw_game(generator, count)
        noise = generator.normal(size=count)
        guess = {"good": effects + 0.3 * noise, "none": None, "random": noise}[prior]
        scores, half_widths, _, _ = run_game(values, guess, seed=seed, evaluations=evaluations, tolerance=0.0)
        covered += list(np.abs(scores - compute_shapley(values)) <= half_widths)
    assert len(covered) == 540
    assert 0.85 <= np.mean(covered) <= 0.95


def test_random_and_negated_guesses_converge_to_the_exact_values() -> None:
    generator = np.random.default_rng(0)
    games = [draw_game(generator, 9) for _ in range(10)]
    for sign in (1, -1):
        errors, widths = [], []
        for evaluations in (16, 64, 256):
            runs = [
                run_game(values, sign * generator.normal(size=9), seed=i, evaluations=evaluations, tolerance=0.0)
                for i, (values, _) in enumerate(games)
            ]
            errors.append(
                np.mean([np.abs(s - compute_shapley(v)).max() for (s, *_), (v, _) in zip(runs, games, strict=True)])
            )
            widths.append(np.mean([half_widths.max() for _, half_widths, *_ in runs]))
        assert errors[2] < errors[1] / 1.5 < errors[0] / 3
        assert widths[2] < widths[1] / 1.5 < widths[0] / 3


def test_good_guess_is_better_than_none() -> None:
    generator = np.random.default_rng(0)
    errors = {True: [], False: []}
    for seed in range(30):
        values, effects = draw_game(generator, 9)
        for has_guess in (True, False):
            scores = run_game(values, effects if has_guess else None, seed=seed, evaluations=16, tolerance=0.0)[0]
            errors[has_guess].append(np.square(scores - compute_shapley(values)).mean())
    assert np.mean(errors[True]) < np.mean(errors[False]) / 2


@pytest.mark.parametrize(("count", "minimum"), [(5, 16), (6, 24)])
def test_additive_game_stops_as_soon_as_it_is_overdetermined(count: int, minimum: int) -> None:
    """Seven pairs determine the five free scores of six players, but leave too little to see that nothing else acts."""
    values, effects = draw_game(np.random.default_rng(0), count, misfit=0.0)
    scores, half_widths, result, evaluated = run_game(values, evaluations=30, tolerance=0.05)
    assert evaluated == minimum
    assert result.resolved_options["stopped_because"] == "every interval is narrower than the tolerance"
    np.testing.assert_allclose(scores, effects, atol=0.1 * np.abs(effects).max())
    assert half_widths.max() < 0.1 * np.abs(effects).max()


def test_additive_game_with_a_proportional_guess_stops_at_the_minimum() -> None:
    values, effects = draw_game(np.random.default_rng(1), 12, misfit=0.0)
    scores, half_widths, _, evaluated = run_game(values, 5 * effects, evaluations=64, tolerance=0.05)
    assert evaluated == 16
    np.testing.assert_allclose(scores, effects, atol=1e-6)
    assert half_widths.max() < 1e-4


@pytest.mark.parametrize("evaluations", [16, 40, 64, 101])
def test_game_with_interactions_uses_all_evaluations(evaluations: int) -> None:
    values = np.random.default_rng(0).normal(size=2**12)
    *_, result, evaluated = run_game(values, np.ones(12), evaluations=evaluations, tolerance=0.05)
    assert evaluated == evaluations // 2 * 2
    assert result.resolved_options["stopped_because"] == "the maximum number of evaluations was reached"


def test_larger_tolerance_stops_earlier() -> None:
    values, effects = draw_game(np.random.default_rng(3), 10, misfit=0.3)
    evaluated = [run_game(values, effects, evaluations=500, tolerance=t)[3] for t in (0.3, 0.1, 0.01)]
    assert 16 <= evaluated[0] < evaluated[1] < evaluated[2] <= 500


@pytest.mark.parametrize("num_players", [2, 3, 6, 7])
def test_sampler_draws_each_pair_once(num_players: int) -> None:
    sampler = PairSampler(num_players, torch.Generator().manual_seed(0))
    drawn = sampler.draw(10**6)
    assert len(drawn) == 2 ** (num_players - 1) - 1 and not sampler.num_remaining
    both = {tuple(row) for row in torch.cat([drawn, ~drawn]).tolist()}
    assert both == {row for row in product([False, True], repeat=num_players) if 0 < sum(row) < num_players}
    assert sampler.compute_evaluated_share() == 1
    weights = dict(zip(map(tuple, drawn.tolist()), sampler.compute_weights().tolist(), strict=True))
    kernel = {row: 1 / (comb(num_players, sum(row)) * sum(row) * (num_players - sum(row))) for row in weights}
    for row, weight in weights.items():
        assert weight == pytest.approx(kernel[row] / sum(kernel.values()))


def test_sizes_of_drawn_pairs_follow_the_kernel() -> None:
    sampler = PairSampler(30, torch.Generator().manual_seed(0))
    sizes = sampler.draw(60).sum(1).tolist()
    masses = np.array([2 / (size * (30 - size)) for size in range(1, 15)] + [1 / 15**2])
    counts = np.array([sum(min(size, 30 - size) == s for size in sizes) for s in range(1, 16)])
    assert np.abs(counts - 60 * masses / masses.sum()).max() < 2
    assert float(sampler.compute_weights().sum()) == pytest.approx(1)


def test_scores_do_not_depend_on_other_inputs_of_the_batch() -> None:
    ex, method = replica_comparison.explainer("bert/classify"), clearhead.Method("calibrated", evaluations=24)
    batch = ex.explain(models.TEXTS[:2], method)
    alone = ex.explain(models.TEXTS[1], method)
    assert replica_comparison.gap(batch[1].scores, alone.scores) < 1e-9
    assert replica_comparison.gap(batch[1].intervals, alone.intervals) < 1e-9


def test_components_are_the_scores_of_their_methods() -> None:
    ex = load_bert_with_small_weights()
    results = ex.explain(models.TEXTS[0], ["calibrated", "saliency", "deeplift-shap"])
    e = results["calibrated"]
    assert list(e.components) == ["deeplift-shap", "saliency"]
    for name, scores in e.components.items():
        np.testing.assert_array_equal(scores, results[name].scores)
    plan = ex.plan(models.TEXTS[0], ["calibrated", "deeplift-shap"])
    assert [planned["purpose"] for planned in plan[0].passes][-1] == "masked inputs", "after those of the components"
    assert plan[0].passes[-1]["inputs"] == 64


def test_model_without_gradients_is_explained_without_prior() -> None:
    model, tokenizer = models.text_model("bert")
    quantised = torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear})
    e = clearhead.load(quantised, tokenizer).explain("I like the movie", "calibrated")
    assert e.components == {} and e.intervals is not None
    assert set(e.provenance["omitted_components"]) == {"deeplift-shap", "saliency"}


def test_component_that_does_not_apply_is_left_out_and_named() -> None:
    e = decoders.explainer("mixtral").explain(decoders.PROMPTS[0], "calibrated")
    assert list(e.components) == ["saliency"]
    assert "topk has no rule" in e.provenance["omitted_components"]["deeplift-shap"]


def test_prior_is_an_option() -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain(models.TEXTS[0], clearhead.Method("calibrated", prior="attn-lrp"))
    assert list(e.components) == ["attn-lrp", "saliency"]
    e = ex.explain(models.TEXTS[0], clearhead.Method("calibrated", prior="none"))
    assert e.components == {} and "omitted_components" not in e.provenance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluations": 15}, r"evaluations=15 is not valid: use an integer of at least 16"),
        ({"tolerance": -0.1}, r"a number that is not negative"),
        ({"prior": "lime"}, r"prior='lime' is a perturbation-based or combined method"),
        ({"prior": "unknown"}, r"unknown"),
    ],
)
def test_invalid_options_are_rejected(options: dict, message: str) -> None:
    with pytest.raises(clearhead.InputError, match=message):
        replica_comparison.explainer("bert/classify").explain(
            models.TEXTS[0], clearhead.Method("calibrated", **options)
        )


def test_intervals_of_words_use_the_covariance(tmp_path) -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain("unbelievable undertakings", clearhead.Method("calibrated", evaluations=16))
    content = e.units.content_indices()
    assert len(e.words()) < len(e), "the test needs subword tokens"
    words = e.words()
    _, parents = e.units.merge("word")
    for word in range(len(words)):
        members = np.flatnonzero(np.asarray(parents) == word)
        variance = sum(e.covariance[i, j] for i in members for j in members)
        half_width = e.provenance["interval_multiplier"] * max(variance, 0) ** 0.5
        expected = [words.scores[word] - half_width, words.scores[word] + half_width]
        np.testing.assert_allclose(words.intervals[word], expected, atol=1e-9)
    # the sum over all units is known
    assert e.covariance[np.ix_(content, content)].sum() == pytest.approx(0, abs=1e-9)
    special = [i for i in range(len(e)) if i not in content]
    np.testing.assert_array_equal(e.intervals[special], 0)
    e.save(tmp_path / "e.safetensors")
    assert clearhead.load_explanation(tmp_path / "e.safetensors") == e
    assert clearhead.from_dict(words.to_dict()) == words


def test_intervals_that_cannot_be_computed_are_dropped_with_the_reason() -> None:
    ex = replica_comparison.explainer("bert/classify")
    first, second = (ex.explain(models.TEXTS[0], "calibrated", seed=seed) for seed in (0, 1))
    absolute = first.words(absolute=True)
    assert absolute.intervals is None and "signed scores" in absolute.provenance["missing_intervals"]
    unknown_covariance = replace(first, covariance=None).words()
    assert unknown_covariance.intervals is None
    assert "covariance of" in unknown_covariance.provenance["missing_intervals"]
    difference = first - second
    assert difference.intervals is None and "difference" in difference.provenance["missing_intervals"]
