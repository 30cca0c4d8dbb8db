"""Gradient SHAP equals its reference implementation with the same draws, and approaches integrated gradients."""

import numpy as np
import pytest

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import gradient_shap as replica


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_equals_reference_implementation(subject: str, noise: float) -> None:
    method = Method("gradient-shap", samples=7, noise=noise, baselines=("zero", "mean"))
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), method)
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        zero = np.zeros_like(case.evaluator.x)
        if subject == "vit/image":
            other = np.broadcast_to(case.evaluator.x.mean((2, 3), keepdims=True), case.evaluator.x.shape)
        else:
            other = replica_inputs.compute_mean_baseline(subject, case)
        expected = replica.scores(case.evaluator, [zero, other], case.seed, **case.patch_layout, samples=7, noise=noise)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.get_tolerance(subject), 1e-9)


def test_many_samples_approach_integrated_gradients() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    exact = ex.explain(text, "integrated-gradients").scores
    few, many = (ex.explain(text, Method("gradient-shap", samples=count)) for count in (20, 2000))
    assert replica_comparison.gap(many.scores, exact) < 0.05
    assert many.certificate["checks"]["standard_error"] < few.certificate["checks"]["standard_error"] / 5
    checks = many.certificate["checks"]
    assert checks["completeness_gap"] * np.abs(many.scores).max() < 4 * checks["standard_error"]


def test_examples_are_used_as_baselines() -> None:
    """With the input itself as baseline all scores are zero; with another text, its embeddings are the baseline."""
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    assert not ex.explain(text, Method("gradient-shap", examples=(text,))).scores.any()
    e = ex.explain(text, Method("gradient-shap", examples=("So boring!",), samples=3))
    case = replica_inputs.make_cases("bert/classify")[1]
    other = replica_inputs.make_cases("bert/classify")[2].evaluator.x
    baseline = replica_inputs.compute_mean_baseline("bert/classify", case)
    baseline[0, 1 : len(other[0])] = other[0, 1:]
    expected = replica.scores(case.evaluator, [baseline], case.seed, **case.patch_layout, samples=3)
    assert replica_comparison.gap(e.scores, expected) < 1e-9


@pytest.mark.parametrize("name", ["gradient-shap", "deeplift-shap"])
def test_string_example_equals_list_of_one_string(name: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    from_string, from_list = (ex.explain(text, Method(name, examples=examples)).scores for examples in ("bad", ["bad"]))
    np.testing.assert_array_equal(from_string, from_list)
    assert not ex.explain(text, Method(name, examples=text)).scores.any()


def test_seed_reproduces_scores_and_another_seed_changes_them() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    scores, repeated, other_seed = (ex.explain(text, "gradient-shap", seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(scores, repeated)
    assert replica_comparison.gap(other_seed, scores) > 1e-3


def test_negative_samples_are_rejected() -> None:
    with pytest.raises(clearhead.InputError, match="samples=-1 is not valid"):
        replica_comparison.explainer("bert/classify").explain("a text", Method("gradient-shap", samples=-1))
