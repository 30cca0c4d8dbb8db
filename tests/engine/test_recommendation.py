"""The recommended method: the default of `explain`, by kind of model and length, with the figures behind it."""

import json
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.engine import recommendation
from tests import models
from tests.adapters import test_decoder as decoders

KNOWN_ANSWERS = json.loads((Path(recommendation.__file__).parent / "known_answers.json").read_text())["columns"]


def test_default_method_is_the_recommended_one() -> None:
    ex = models.explainer("bert/classify")
    e = ex.explain(models.TEXTS[0])
    assert e.method == ex.recommended.method == "ensemble"
    assert ex.plan(models.TEXTS[0])[0].passes == ex.plan(models.TEXTS[0], "ensemble")[0].passes


def test_explicit_method_and_profile_are_unaffected() -> None:
    ex = models.explainer("bert/classify")
    assert ex.explain(models.TEXTS[0], "rollout").method == "rollout"
    assert ex.explain(models.TEXTS[0], profile="bi_bert_c").method.startswith("generic")
    assert ex.explain(models.TEXTS[0], per="head").method == "generic"


def test_long_inputs_have_a_method_that_needs_no_full_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendation, "MAX_FULL_LENGTH", 4)
    ex = decoders.explainer("llama")
    e = ex.explain(decoders.PROMPTS[0])
    assert len(e) > 4 and e.method == "saliency"


def test_figures_are_those_of_the_kind_of_model() -> None:
    recommended = models.explainer("bert/classify").recommended
    assert recommended.model_kind == "text encoder"
    assert recommended.figures["ensemble"] == KNOWN_ANSWERS["logic/text"]["ensemble"]
    assert list(recommended.figures.values()) == sorted(recommended.figures.values(), reverse=True)
    assert f"average precision {recommended.figures['ensemble']:.2f}" in str(recommended)


def test_recommended_method_has_the_best_mean_of_all_methods_of_ten_passes() -> None:
    """Over the columns of all kinds; methods that lack a column are no candidates."""
    columns = [column for _, _, kind_columns in recommendation.MODEL_KINDS for column in kind_columns]
    means = {
        name: sum(KNOWN_ANSWERS[column][name] for column in columns) / len(columns)
        for name in KNOWN_ANSWERS[columns[0]]
        if all(name in KNOWN_ANSWERS[column] for column in columns)
        and clearhead.Method(name).cost.count_inputs(num_units=1) <= 10
    }
    best = max(means, key=lambda name: means[name])
    assert best == recommendation.RECOMMENDED_METHOD, means


def test_model_without_gradients_gets_a_perturbation_method() -> None:
    model, tokenizer = models.text_model("bert")
    quantised = torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear})
    recommended = clearhead.load(quantised, tokenizer).recommended
    assert recommended.method == "shap"
    assert "ensemble does not apply" in recommended.reason
