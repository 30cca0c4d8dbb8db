"""Passes that nobody records through torch.compile, for real: the same numbers, and a model that stays as it was."""

import copy
import shutil

import pytest
import torch
import transformers

import clearhead
from tests.invariants import model_snapshot

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")


def bert():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, vocab_size=40, initializer_range=0.3)
    ).eval()


@compiler
def test_the_same_numbers_and_an_untouched_model():
    model, given = bert(), {"input_ids": torch.arange(5, 13)[None]}
    expected = clearhead.load(model).explain(given, ["occlusion", "generic"])
    before = model_snapshot.of_model(model)
    torch._dynamo.utils.counters.clear()
    ex = clearhead.load(model, compiled=True)
    found = ex.explain(given, ["occlusion", "generic"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    assert model_snapshot.of_model(model) == before
    for name, e in found.items():
        assert abs(expected[name].scores).max() > 1e-4
        assert abs(e.scores - expected[name].scores).max() <= 1e-5 * abs(expected[name].scores).max()


def test_recorded_passes_are_never_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **how: pytest.fail("compiled"))
    clearhead.load(bert(), compiled=True).explain({"input_ids": torch.arange(5, 13)[None]}, ["generic", "saliency"])


def test_a_copy_compiles_its_own_model(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)
    ex, given = clearhead.load(bert(), compiled=True), {"input_ids": torch.arange(5, 13)[None]}
    expected, other = ex.explain(given, "occlusion").scores, copy.deepcopy(ex)
    with torch.no_grad():
        ex.adapter.model.classifier.weight.zero_()
    assert (other.explain(given, "occlusion").scores == expected).all()


def test_models_that_are_compiled_already():
    model = bert()
    with pytest.raises(clearhead.InputError, match=r"give the original \(model\._orig_mod\), with compiled=True"):
        clearhead.load(torch.compile(model))
    clearhead.load(torch.compile(model)._orig_mod)
    given = {"input_ids": torch.arange(5, 13)[None]}
    expected = clearhead.load(model).explain(given)
    model.compile(backend="eager")  # modules inside it can be listened to
    assert (clearhead.load(model).explain(given).scores == expected.scores).all()
