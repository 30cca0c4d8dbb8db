"""Gradient SHAP against its replica with the same draws, and what it estimates."""

import numpy as np
import pytest

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import gradient_shap as replica


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_equals_its_replica(subject: str, noise: float) -> None:
    method = Method("gradient-shap", samples=7, noise=noise, baselines=("zero", "mean"))
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), method)
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        zero = np.zeros_like(one.walker.x)
        if subject == "vit/image":
            other = np.broadcast_to(one.walker.x.mean((2, 3), keepdims=True), one.walker.x.shape)
        else:
            other = replica_inputs.mean_word(subject, one)
        expected = replica.scores(one.walker, [zero, other], one.seed, **one.cut, samples=7, noise=noise)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.allowed(subject), 1e-9)


def test_estimates_integrated_gradients() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    exact = ex.explain(text, "integrated-gradients").scores
    few, many = (ex.explain(text, Method("gradient-shap", samples=count)) for count in (20, 2000))
    assert replica_comparison.gap(many.scores, exact) < 0.05
    assert many.certificate["checks"]["standard_error"] < few.certificate["checks"]["standard_error"] / 5
    checks = many.certificate["checks"]
    assert checks["completeness_gap"] * np.abs(many.scores).max() < 4 * checks["standard_error"]


def test_examples_as_baselines() -> None:
    """From the input itself nothing is left to explain; of another text, its vectors are the baseline."""
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    assert not ex.explain(text, Method("gradient-shap", examples=(text,))).scores.any()
    e = ex.explain(text, Method("gradient-shap", examples=("So boring!",), samples=3))
    one = replica_inputs.cases("bert/classify")[1]
    other = replica_inputs.cases("bert/classify")[2].walker.x
    baseline = replica_inputs.mean_word("bert/classify", one)
    baseline[0, 1 : len(other[0])] = other[0, 1:]
    expected = replica.scores(one.walker, [baseline], one.seed, **one.cut, samples=3)
    assert replica_comparison.gap(e.scores, expected) < 1e-9


@pytest.mark.parametrize("name", ["gradient-shap", "deeplift-shap"])
def test_one_example_is_a_text_and_not_its_letters(name: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[1]
    one, listed = (ex.explain(text, Method(name, examples=given)).scores for given in ("bad", ["bad"]))
    np.testing.assert_array_equal(one, listed)
    assert not ex.explain(text, Method(name, examples=text)).scores.any()


def test_seeded_by_content() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    one, same, other = (ex.explain(text, "gradient-shap", seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert replica_comparison.gap(other, one) > 1e-3


def test_bad_numbers() -> None:
    with pytest.raises(clearhead.InputError, match="samples=-1 is not possible"):
        replica_comparison.explainer("bert/classify").explain("a text", Method("gradient-shap", samples=-1))
