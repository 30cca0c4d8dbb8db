"""Similarity of two texts under one encoder, compared with a slow replica; and cross-encoders, which score a pair."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import Contrast, InputError, UnsupportedError
from tests import models
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified, assert_alike, gap, with_few
from tests.replicas.dual_encoder import fuse, relevance

PAIRS = [
    ("I like the movie.", "She hates the book because it isn't good"),
    ("So boring!", "So boring, so long, and the movie!"),
    ("You look extremely confused", "He said it."),
]
NAMES = ("bert", "albert", "roberta", "modernbert", "deberta")
#: ModernBERT computes its softmax in float32 even in a float64 model.
TOLERANCES = {"modernbert": 1e-5}
STOCHASTIC_METHODS = ("random", "kernel-shap", "shap", "lime", "gradient-shap", "smoothgrad", "deeplift-shap")
STOCHASTIC_METHODS += ("calibrated",)


@cache
def explainer(name: str, pooling: str = "mean") -> clearhead.Explainer:
    return clearhead.load(*models.text_model(name, "Model"), task="similarity", readout=pooling)


def embed_text(name: str, text: str, pooling: str) -> Tensor:
    """Embed one text alone, as sentence-transformers does."""
    model, tokenizer = models.text_model(name, "Model")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = model(ids).last_hidden_state[0]
    return states.mean(0) if pooling == "mean" else states[0 if pooling == "first" else -1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_target_value_equals_cosine_similarity(name: str, pooling: str) -> None:
    for e, texts in zip(explainer(name, pooling).explain(PAIRS, method="generic"), PAIRS, strict=True):
        cosine = torch.nn.functional.cosine_similarity(*(embed_text(name, text, pooling) for text in texts), dim=0)
        assert e.streams == ("text", "other") and e["text"].units.texts == texts[:1]
        assert e["other"].stream == "other" and e["other"].units.texts == texts[1:]
        assert e.target["kind"] == "similarity" and e.target["name"] == texts[1] and e.target["scale"] == "cosine"
        assert e.target["value"] == pytest.approx(float(cosine), abs=1e-6)
        assert e.prediction["value"] == e.target["value"] and e.certificate["readout_checked"]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_generic_equals_slow_replica(pooling: str) -> None:
    e = explainer("bert", pooling).explain(PAIRS[0], method="generic")
    model, tokenizer = models.text_model("bert", "Model")
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    outputs = [eager(**tokenizer(text, return_tensors="pt"), output_attentions=True) for text in PAIRS[0]]
    states = [output.last_hidden_state[0] for output in outputs]
    pooled = [part.mean(0) if pooling == "mean" else part[0 if pooling == "first" else -1] for part in states]
    cosine = torch.nn.functional.cosine_similarity(*pooled, dim=0)
    for stream, output in zip(("text", "other"), outputs, strict=True):
        gradients = torch.autograd.grad(cosine, output.attentions, retain_graph=True)
        maps = [fuse(a[0].detach(), g[0]) for a, g in zip(output.attentions, gradients, strict=True)]
        matrix = relevance(maps) - np.eye(len(maps[0]))
        rows = {"mean": matrix.mean(0), "first": matrix[0], "last": matrix[-1]}
        assert gap(e[stream].scores, rows[pooling]) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_batch_equals_single_and_texts_are_interchangeable(name: str) -> None:
    ex, within = explainer(name), TOLERANCES.get(name, 1e-9)
    methods = with_few(line.name for line in ex.methods() if line.applies)
    assert {"shap", "occlusion", "generic", "saliency"} <= {method.name for method in methods}
    together = ex.explain(PAIRS, method=methods)
    swapped_pairs = ex.explain([(second, first) for first, second in PAIRS], method=methods)
    for i, texts in enumerate(PAIRS):
        for method, alone in ex.explain(texts, method=methods).items():
            for stream, swapped in (("text", "other"), ("other", "text")):
                size = float(np.abs(alone[stream].scores).max())
                name = alone.provenance["method"]
                assert_alike(together[method][i][stream], alone[stream], amplified(name, within), size)
                if name not in STOCHASTIC_METHODS:  # their random numbers are seeded by the whole input
                    difference = gap(swapped_pairs[method][i][swapped].scores, alone[stream].scores, size)
                    assert difference < amplified(name, within), method


def test_padding_does_not_change_scores() -> None:
    ex, tokenizer = explainer("bert"), models.tokenizer("wordpiece")
    halves = [tokenizer([pair[i] for pair in PAIRS], padding="max_length", max_length=30) for i in (0, 1)]
    inputs = {**halves[0], **{f"other_{name}": part for name, part in halves[1].items()}}
    for e, alone in zip(ex.explain(inputs, method="generic"), ex.explain(PAIRS, method="generic"), strict=True):
        for stream in ("text", "other"):
            assert e[stream].tokens == alone[stream].tokens
            assert gap(e[stream].scores, alone[stream].scores) < 1e-9


def test_contrast_equals_difference_of_similarities() -> None:
    ex, (text, other), foil = explainer("bert"), PAIRS[0], "He said it."
    methods = ["generic", "input-x-gradient"]
    contrast = ex.explain((text, other), method=methods, target=Contrast(None, foil))
    similarity, foil_similarity = ex.explain((text, other), method=methods), ex.explain((text, foil), method=methods)
    assert contrast["generic"].target["name"] == f"{other} − {foil}"
    values = similarity["generic"].target["value"], foil_similarity["generic"].target["value"]
    assert contrast["generic"].target["value"] == pytest.approx(values[0] - values[1])
    difference = similarity["input-x-gradient"]["text"].scores - foil_similarity["input-x-gradient"]["text"].scores
    assert gap(contrast["input-x-gradient"]["text"].scores, difference) < 1e-9
    assert gap(contrast["generic"]["other"].scores, similarity["generic"]["other"].scores) < 1e-9


def test_model_and_tokenizer_are_unchanged() -> None:
    model, tokenizer = models.text_model("bert", "Model")
    before = model_snapshot.of_model(model), model_snapshot.of_processor(tokenizer)
    ex = clearhead.load(model, tokenizer, task="similarity", readout="mean")
    ex.explain(PAIRS, method=["generic", "saliency"], target=Contrast(None, "a book"))
    assert not model_snapshot.changes(before[0], model_snapshot.of_model(model))
    assert not model_snapshot.changes(before[1], model_snapshot.of_processor(tokenizer))


def test_loading_options_are_recorded_in_provenance(tmp_path: Path) -> None:
    model, tokenizer = models.text_model("bert", "Model", torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    e = clearhead.load(tmp_path, task="similarity", readout="mean").explain(PAIRS[0], method="generic")
    assert e.provenance["load_options"] == {"task": "similarity", "readout": "mean"}
    assert e.provenance["model_class"] == "BertModel"
    with pytest.raises(InputError, match="pass as target= a function of its output"):
        clearhead.load(tmp_path).explain(PAIRS[0], method="generic")  # without the task it is a bare encoder


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("one text", r"expected two texts, \(first, second\)"),
        (("one", "two", "three"), "expected two texts"),
        (("one", " "), "the text is empty"),
        (("one", 2), "expected a text"),
        ({"input_ids": [[2, 9, 3]]}, "must contain input_ids and other_input_ids"),
        ({"input_ids": [[2, 9, 3]], "other_input_ids": [[2, 9, 3]] * 2}, "1 first texts and 2 second texts"),
    ],
)
def test_invalid_input_raises(raw: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        explainer("bert").explain(raw, method="generic")


def test_invalid_loading_options_raise() -> None:
    model, tokenizer = models.text_model("bert", "Model")
    for readout in (None, "max", 3):
        with pytest.raises(InputError, match="choose how the encoder's tokens are pooled into a text vector"):
            clearhead.load(model, tokenizer, task="similarity", readout=readout)
    with pytest.raises(InputError, match=r"unknown task 'similar': did you mean 'similarity'\?"):
        clearhead.load(model, tokenizer, task="similar", readout="mean")
    with pytest.raises(UnsupportedError, match=r"has a head: pass its bare encoder, model\.bert"):
        clearhead.load(*models.text_model("bert"), task="similarity", readout="mean")
    with pytest.raises(InputError, match=r"unknown scale 'logit'.*Accepted: cosine"):
        explainer("bert").explain(PAIRS[0], scale="logit", method="generic")
    with pytest.raises(InputError, match="measures the similarity of two inputs"):
        explainer("bert").explain(PAIRS[0], target="a label", method="generic")


# -- cross-encoders


def test_reranker_score_is_a_regression_of_a_text_pair() -> None:
    """One text in two segments, one number: no class, no probability."""
    ex = clearhead.load(*models.text_model("bert", num_labels=1))
    query, passage = PAIRS[0]
    together = ex.explain(PAIRS, method=["generic", "input-x-gradient"])
    e = together["generic"][0]
    assert e.stream == "text" and e.units.texts == (query, passage) and set(e.units.segments) == {0, 1}
    inputs = ex.adapter.processor(query, passage, return_tensors="pt")
    with torch.no_grad():
        score = float(ex.adapter.model(**inputs).logits[0, 0])
    assert e.target["value"] == pytest.approx(score) and e.prediction["value"] == pytest.approx(score)
    assert "probability" not in e.prediction and e.target["scale"] == "logit"
    for method, explanations in together.items():
        for explanation, pair in zip(explanations, PAIRS, strict=True):
            alone = ex.explain(pair, method)
            assert_alike(explanation, alone, 1e-9, float(np.abs(alone.scores).max()))
    with pytest.raises(InputError, match="regression model without classes"):
        ex.explain(PAIRS[0], scale="probability", method="generic")
