"""Probes of models of one's own, whose attention is known through a registered function, and of the next word."""

import copy

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import probes
from clearhead.capture.sources.custom_modules import replacing
from clearhead.errors import InputError, Refusal
from clearhead.probes.uniform_attention import MEAN
from clearhead.studies.bilstm import BiLSTM, original, vocabulary
from tests import custom_models
from tests.invariants.model_snapshot import of_model
from tests.models import tokenizer

TEXTS = custom_models.TEXTS
PROBES = {
    "permutation": {"draws": 3},
    "uniform": {},
    "correlation": {},
    "adversary": {"steps": 2, "sets": 2},
    "heads": {},
}


@pytest.fixture(scope="module")
def ex():
    return custom_models.explainer("bilstm")


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_takes_a_recurrent_network_and_leaves_it_as_it_was(ex, name):
    before = of_model(ex.subject.model)
    once, again = (getattr(probes, name)(ex, TEXTS, **PROBES[name]).to_dict() for _ in range(2))
    assert of_model(ex.subject.model) == before and once == again
    alone = getattr(probes, name)(ex, TEXTS[:1], **PROBES[name])
    if name != "heads":
        figures = {key: value for key, value in once["lines"][0].items() if isinstance(value, float)}
        figures = {key: value for key, value in figures.items() if MEAN not in key}  # of the other inputs
        assert figures == pytest.approx({key: alone.lines[0][key] for key in figures}, abs=1e-9, nan_ok=True)


def test_uniform_weights_give_the_mean_of_the_states(ex):
    model = ex.subject.model
    for text, line in zip(TEXTS, probes.uniform(ex, TEXTS).lines, strict=True):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        states, lengths = model.lstm(model.embedding(ids))[0], torch.tensor([ids.shape[1]])
        level, own = model.head(states.mean(1)).softmax(-1), model(ids, lengths).softmax(-1)
        assert line["TVD, row that is read"] == pytest.approx(float((level - own).abs().sum() / 2), abs=1e-12)


def test_mean_attention_is_the_mean_over_the_other_inputs_place_by_place(ex):
    model, rows, states, answers = ex.subject.model, [], [], []
    for text in TEXTS:
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        states.append(model.lstm(model.embedding(ids))[0][0])
        answers.append(model(ids, torch.tensor([ids.shape[1]])).softmax(-1)[0])
        rows.append(probes.adversary(ex, text, steps=1, sets=1).lines[0]["own weights"])
    assert len({len(row) for row in rows}) > 1
    for i, line in enumerate(probes.uniform(ex, TEXTS).lines):
        mean = []
        for place in range(len(rows[i])):
            there = [row[place] for j, row in enumerate(rows) if j != i and len(row) > place]
            mean.append(sum(there) / len(there) if there else 0.0)
        weights = torch.tensor(mean, dtype=states[i].dtype) / sum(mean)
        moved = model.head(weights @ states[i]).softmax(-1) - answers[i]
        assert line[f"TVD, {MEAN}row that is read"] == pytest.approx(float(moved.abs().sum() / 2), abs=1e-9)


def test_all_scopes_reach_the_one_row_of_a_pooling_query(ex):
    scopes = ({}, {"scope": "S2"}, {"scope": "S3", "layer": 0}, {"scope": "S4"})
    found = [probes.permutation(ex, TEXTS, draws=4, **scope).column("median TVD") for scope in scopes]
    assert all(np.allclose(found[0], one, atol=1e-12) for one in found) and found[0].max() > 1e-5


def test_leaving_a_word_out_is_reading_the_text_without_it(ex):
    line = probes.correlation(ex, TEXTS[0]).lines[0]
    words = TEXTS[0].split()

    def answer(chosen):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in chosen]])
        return ex.subject.model(ids, torch.tensor([len(chosen)])).softmax(-1)

    gaps = [float((answer(words[:i] + words[i + 1 :]) - answer(words)).abs().mean()) for i in range(len(words))]
    own = probes.adversary(ex, TEXTS[0], steps=1, sets=1).lines[0]["own weights"]
    agree = [np.sign(gaps[i] - gaps[j]) * np.sign(own[i] - own[j]) for i in range(len(words)) for j in range(i)]
    assert line["τ(last row, left out (delete))"] == pytest.approx(np.mean(agree))
    with pytest.raises(InputError, match="nothing can be left out"):
        probes.correlation(ex, "w3")


def test_patched_to_uniform_is_a_model_whose_queries_are_zero():
    name = "textbook, learned positions"
    ex, level = custom_models.explainer(name), copy.deepcopy(custom_models.made(name))
    for block in level.blocks:
        for head in block.attn.heads:
            torch.nn.init.zeros_(head.q.weight)
    other = clearhead.load(level, custom_models.CASES[name].reader())
    moved = probes.uniform(ex, TEXTS).column("TVD, all layers")
    for text, gap in zip(TEXTS, moved, strict=True):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        own, flat = (one.subject.model(ids).softmax(-1) for one in (ex, other))
        assert gap == pytest.approx(float((own - flat).abs().sum() / 2), abs=1e-12)
    assert moved.min() > 1e-6
    short = probes.permutation(ex, TEXTS, draws=3)
    assert short.column("median TVD").max() > 0


def test_attention_that_is_only_handed_through_cannot_be_replaced():
    class Through(torch.nn.Module):
        def forward(self, attention, values):
            return attention @ values

    from clearhead.capture.sources.custom_modules import _attended

    with replacing(lambda attention: attention), pytest.raises(Refusal, match="does not compute it"):
        _attended(lambda module, a, v: (a @ v, a), Through(), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 3))


def test_the_next_word_of_a_prompt_is_probed(monkeypatch):
    torch.manual_seed(0)
    own = tokenizer("bytes")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(own), num_key_value_heads=2, initializer_range=0.3, **sizes)
    ex = clearhead.load((transformers.LlamaForCausalLM(config).double().eval(), own))
    prompts = ["I like the", "So", "She hates the book because"]
    before = of_model(ex.subject.model)
    short = probes.permutation(ex, prompts, draws=4)
    found = probes.correlation(ex, prompts[:1])
    assert of_model(ex.subject.model) == before and len(found.lines) == 1
    monkeypatch.setattr("clearhead.probes.permuted_attention.shortens", lambda probed: False)
    whole = probes.permutation(ex, prompts, draws=4)
    assert np.allclose(short.column("median TVD"), whole.column("median TVD"), atol=1e-6)
    assert whole.column("median TVD").max() > 1e-4
    assert short.lines[0]["prediction"] == ex.explain(prompts[0]).prediction["label"]


def test_the_original_setting_learns_its_sentences_and_resumes(tmp_path):
    good, bad = ["a good film", "good and funny", "so good a story"], ["a bad film", "bad and dull", "so bad a story"]
    kept = tmp_path / "model.safetensors"
    how = {"steps": 90, "batch": 6, "rate": 2e-2, "wide": 16, "checkpoint": kept, "progress": lambda name, share: None}
    ex = original(good * 2 + bad * 2, [1] * 6 + [0] * 6, ["bad", "good"], **how)
    assert isinstance(ex.subject.model, BiLSTM)
    assert [one.prediction["label"] for one in ex.explain(["good", "a bad story"])] == ["good", "bad"]
    again = original(good * 2 + bad * 2, [1] * 6 + [0] * 6, ["bad", "good"], **how)
    for one, other in zip(ex.subject.model.parameters(), again.subject.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "dull" in vocabulary(bad * 2) and "dull" not in vocabulary(bad)
