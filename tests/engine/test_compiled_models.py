"""Forward passes without recording through torch.compile: the same scores, and an unchanged model."""

import copy
import shutil

import pytest
import torch
import transformers

import clearhead
from tests.invariants import model_snapshot

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")


def bert():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, vocab_size=40, initializer_range=0.3)
    ).eval()


@needs_compiler
def test_compiled_scores_equal_eager_and_model_is_unchanged():
    model, inputs = bert(), {"input_ids": torch.arange(5, 13)[None]}
    expected = clearhead.load(model).explain(inputs, ["occlusion", "generic"])
    before = model_snapshot.of_model(model)
    torch._dynamo.utils.counters.clear()
    ex = clearhead.load(model, compiled=True)
    actual = ex.explain(inputs, ["occlusion", "generic"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    assert model_snapshot.of_model(model) == before
    for name, explanation in actual.items():
        assert abs(expected[name].scores).max() > 1e-4
        assert abs(explanation.scores - expected[name].scores).max() <= 1e-5 * abs(expected[name].scores).max()


def test_recorded_passes_are_never_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    clearhead.load(bert(), compiled=True).explain({"input_ids": torch.arange(5, 13)[None]}, ["generic", "saliency"])


def test_deepcopy_of_explainer_compiles_its_own_model(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    ex, inputs = clearhead.load(bert(), compiled=True), {"input_ids": torch.arange(5, 13)[None]}
    expected, copied = ex.explain(inputs, "occlusion").scores, copy.deepcopy(ex)
    with torch.no_grad():
        ex.adapter.model.classifier.weight.zero_()
    assert (copied.explain(inputs, "occlusion").scores == expected).all()


def test_compiled_module_raises_and_in_place_compile_is_accepted():
    model = bert()
    with pytest.raises(
        clearhead.InputError, match=r"pass the original model \(model\._orig_mod\), and set compiled=True"
    ):
        clearhead.load(torch.compile(model))
    clearhead.load(torch.compile(model)._orig_mod)
    inputs = {"input_ids": torch.arange(5, 13)[None]}
    expected = clearhead.load(model).explain(inputs, method="generic")
    model.compile(backend="eager")  # its modules still run their hooks
    assert (clearhead.load(model).explain(inputs, method="generic").scores == expected.scores).all()
