"""DeepLIFT SHAP: a mean over baselines; random baselines are drawn from a seed that depends on the input."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison
from tests.methods.test_deeplift import embed_with_baseline, explainer, load_bert_with_small_weights
from tests.replicas import deeplift_shap as replica


def test_equals_reference_implementation() -> None:
    ex, text = load_bert_with_small_weights(), models.TEXTS[1]
    e = ex.explain(text, Method("deeplift-shap", baselines=("mean", "mask"), examples=("So boring!",)))
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x, mean = embed_with_baseline(ex, text)
    mask, example = mean.copy(), mean.copy()
    mask[1:-1] = table[ex.adapter.processor.mask_token_id]
    other, _ = embed_with_baseline(ex, "So boring!")
    example[1 : len(other)] = other[1:]
    expected = replica.scores(ex.adapter.model, x, [mean, mask, example], e.target["index"])
    assert replica_comparison.gap(e.scores, expected) < 1e-10
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12


def test_single_baseline_equals_deeplift() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[0]
    e = ex.explain(text, Method("deeplift-shap", baselines="mask"))
    assert replica_comparison.gap(e.scores, ex.explain(text, Method("deeplift", baseline="mask")).scores) < 1e-12


def test_random_baselines_depend_only_on_seed_and_content() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[2]
    single, other_seed = (ex.explain(text, "deeplift-shap", seed=seed).scores for seed in (0, 1))
    batched = ex.explain(models.TEXTS, "deeplift-shap")[2].scores
    assert replica_comparison.gap(batched, single) < 1e-10
    assert replica_comparison.gap(other_seed, single) > 1e-3


def test_random_baselines_are_the_same_for_all_continuation_steps() -> None:
    """Steps that are computed in several chunks, each with another part of the continuation, have the same draws."""
    ex = explainer("gpt2")
    all_steps = ex.explain("She hates", "deeplift-shap", answer=" the book because")
    first_step = ex.explain("She hates", "deeplift-shap", clearhead.GeneratedToken(0), answer=" the book because")
    assert len(all_steps.matrix) > 2
    assert replica_comparison.gap(all_steps.matrix[0][: len(first_step.scores)], first_step.scores) < 1e-10


def test_more_samples_reduce_the_error() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[2]
    reference, few, some = (ex.explain(text, Method("deeplift-shap", samples=n), seed=n).scores for n in (60, 2, 20))
    assert np.abs(some - reference).mean() < np.abs(few - reference).mean() / 1.5


def test_image_of_one_colour_has_zero_scores() -> None:
    """All baselines of an image of one colour equal the image."""
    ex = explainer("vit/image")
    flat = np.full((20, 20, 3), 90, dtype=np.uint8)
    assert not ex.explain(flat, "deeplift-shap").scores.any()
    e = ex.explain(models.inputs("vit/image")[0], "deeplift-shap")
    assert np.abs(e.scores).max() > 1e-3


def test_captum_profile_equals_the_mean_of_captum_deeplift() -> None:
    ex, text = load_bert_with_small_weights(), models.TEXTS[0]
    with pytest.warns(UserWarning, match="captum's deeplift-shap"):
        e = ex.explain(text, Method("deeplift-shap", baselines=("mean", "mask")), profile="captum")
    scores = []
    for name in ("mean", "mask"):
        with pytest.warns(UserWarning, match="captum's deeplift"):
            scores.append(ex.explain(text, Method("deeplift", baseline=name), profile="captum").scores)
    assert replica_comparison.gap(e.scores, np.mean(scores, axis=0)) < 1e-12


def test_zero_samples_are_rejected() -> None:
    with pytest.raises(clearhead.InputError, match="samples=0 is not valid"):
        explainer("bert/classify").explain("a text", Method("deeplift-shap", samples=0))
    assert torch.is_grad_enabled()
