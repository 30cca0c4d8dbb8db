"""DeepLIFT SHAP: a mean over references, of which the random ones are keyed by the content of the input."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison
from tests.methods.test_deeplift import explainer, near_bert, vectors
from tests.replicas import deeplift_shap as replica


def test_equals_its_replica() -> None:
    ex, text = near_bert(), models.TEXTS[1]
    e = ex.explain(text, Method("deeplift-shap", baselines=("mean", "mask"), examples=("So boring!",)))
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x, mean = vectors(ex, text)
    mask, example = mean.copy(), mean.copy()
    mask[1:-1] = table[ex.adapter.processor.mask_token_id]
    other, _ = vectors(ex, "So boring!")
    example[1 : len(other)] = other[1:]
    expected = replica.scores(ex.adapter.model, x, [mean, mask, example], e.target["index"])
    assert replica_comparison.gap(e.scores, expected) < 1e-10
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12


def test_one_baseline_is_deeplift() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[0]
    one = ex.explain(text, Method("deeplift-shap", baselines="mask"))
    assert replica_comparison.gap(one.scores, ex.explain(text, Method("deeplift", baseline="mask")).scores) < 1e-12


def test_random_references_depend_on_seed_and_content_alone() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[2]
    alone, other = (ex.explain(text, "deeplift-shap", seed=seed).scores for seed in (0, 1))
    among = ex.explain(models.TEXTS, "deeplift-shap")[2].scores
    assert replica_comparison.gap(among, alone) < 1e-10
    assert replica_comparison.gap(other, alone) > 1e-3


def test_random_words_stay_when_the_text_goes_on() -> None:
    """Steps that are computed in several chunks, each of which sees another part of the answer, have the same draws."""
    ex = explainer("gpt2")
    whole = ex.explain("She hates", "deeplift-shap", answer=" the book because")
    first = ex.explain("She hates", "deeplift-shap", clearhead.GeneratedToken(0), answer=" the book because")
    assert len(whole.matrix) > 2
    assert replica_comparison.gap(whole.matrix[0][: len(first.scores)], first.scores) < 1e-10


def test_more_samples_are_nearer_to_the_mean_of_many() -> None:
    ex, text = explainer("bert/classify"), models.TEXTS[2]
    many, few, some = (ex.explain(text, Method("deeplift-shap", samples=n), seed=n).scores for n in (60, 2, 20))
    assert np.abs(some - many).mean() < np.abs(few - many).mean() / 1.5


def test_pictures_of_one_colour() -> None:
    """A picture of one colour has nothing but itself to be held against."""
    ex = explainer("vit/image")
    flat = np.full((20, 20, 3), 90, dtype=np.uint8)
    assert not ex.explain(flat, "deeplift-shap").scores.any()
    e = ex.explain(models.inputs("vit/image")[0], "deeplift-shap")
    assert np.abs(e.scores).max() > 1e-3


def test_a_profile_for_captum_s() -> None:
    ex, text = near_bert(), models.TEXTS[0]
    with pytest.warns(UserWarning, match="captum's deeplift-shap"):
        e = ex.explain(text, Method("deeplift-shap", baselines=("mean", "mask")), profile="captum")
    parts = []
    for name in ("mean", "mask"):
        with pytest.warns(UserWarning, match="captum's deeplift"):
            parts.append(ex.explain(text, Method("deeplift", baseline=name), profile="captum").scores)
    assert replica_comparison.gap(e.scores, np.mean(parts, axis=0)) < 1e-12


def test_bad_numbers() -> None:
    with pytest.raises(clearhead.InputError, match="samples=0 is not possible"):
        explainer("bert/classify").explain("a text", Method("deeplift-shap", samples=0))
    assert torch.is_grad_enabled()
