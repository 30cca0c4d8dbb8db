"""The ensemble equals its reference implementation, leaves out what does not apply, and keeps its components."""

import numpy as np
import pytest
import torch

import clearhead
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import replica_comparison
from tests.methods.test_deeplift import load_bert_with_small_weights
from tests.replicas import ensemble


def test_equals_reference_implementation_of_both_components() -> None:
    ex = load_bert_with_small_weights()
    for text in models.TEXTS:
        results = ex.explain(text, ["ensemble", "deeplift-shap", "saliency"])
        e, *components = results.values()
        expected = ensemble.scores([{"text": component.scores} for component in components])
        assert replica_comparison.gap(e.scores, expected["text"]) < 1e-10


@pytest.mark.parametrize("zoo_model", ["shapes-vqa", "shapes-vilt"])
def test_streams_share_one_size(zoo_model: str) -> None:
    ex = clearhead.load(f"zoo:{zoo_model}", device="cpu", dtype="float64")
    results = ex.explain(ex.adapter.make_example_input(), ["ensemble", "deeplift-shap", "saliency"])
    e, *components = results.values()
    expected = ensemble.scores([{s: c[s].scores for s in c.streams} for c in components])
    for stream in e.streams:
        assert replica_comparison.gap(e[stream].scores, expected[stream]) < 1e-10


def test_components_are_the_scores_of_their_methods() -> None:
    ex = load_bert_with_small_weights()
    results = ex.explain(models.TEXTS[0], ["ensemble", "saliency", "deeplift-shap"])
    e = results["ensemble"]
    assert list(e.components) == ["deeplift-shap", "saliency"]
    for name, scores in e.components.items():
        np.testing.assert_array_equal(scores, results[name].scores)
    gap = e.components["deeplift-shap"].sum() - (e.target["value"] - results["deeplift-shap"].base_value)
    assert abs(gap) < 1e-9
    words = e.words()
    np.testing.assert_allclose(words.components["saliency"], results["saliency"].words().scores)
    assert results["saliency"].components == {}


def test_saved_components_are_loaded(tmp_path) -> None:
    e = load_bert_with_small_weights().explain(models.TEXTS[0], "ensemble")
    e.save(tmp_path / "e.safetensors")
    loaded = clearhead.load_explanation(tmp_path / "e.safetensors")
    assert loaded == e
    np.testing.assert_array_equal(loaded.components["saliency"], e.components["saliency"])


def test_component_that_does_not_apply_is_left_out_and_named() -> None:
    """DeepLIFT has no rule for the choice of experts in Mixtral."""
    ex = decoders.explainer("mixtral")
    e = ex.explain(decoders.PROMPTS[0], "ensemble")
    assert list(e.components) == ["saliency"]
    assert "topk has no rule" in e.provenance["omitted_components"]["deeplift-shap"]
    alone = ex.explain(decoders.PROMPTS[0], "saliency").scores
    expected = ensemble.scores([{"text": alone}])
    assert replica_comparison.gap(e.scores, expected["text"]) < 1e-10


def test_model_to_which_no_component_applies_is_refused_with_every_reason() -> None:
    model, tokenizer = models.text_model("bert")
    quantised = torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear})
    with pytest.raises(
        clearhead.UnsupportedError, match=r"none of its components applies: deeplift-shap: .*; saliency: "
    ):
        clearhead.load(quantised, tokenizer).explain("I like the movie", "ensemble")


def test_constant_target_scores_zero() -> None:
    """All components are zero: their size is no divisor."""
    e = load_bert_with_small_weights().explain(
        models.TEXTS[0], "ensemble", target=lambda output: 0 * output.logits[:, 0]
    )
    np.testing.assert_array_equal(e.scores, 0)


def test_plan_lists_the_passes_of_both_components_once() -> None:
    plan = load_bert_with_small_weights().plan(models.TEXTS[0], ["ensemble", "deeplift-shap"])
    assert [planned["methods"] for planned in plan[0].passes] == [["saliency"], ["deeplift-shap"], ["deeplift-shap"]]
