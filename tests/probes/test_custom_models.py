"""Probes of custom models, whose attention comes from a registered function, and of the next token of a decoder."""

import copy

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import probes
from clearhead.capture.sources.custom_modules import replaced_custom_attention
from clearhead.errors import InputError, UnsupportedError
from clearhead.explanation.json_keys import to_snake_case, to_snake_case_keys
from clearhead.probes.uniform_attention import MEAN_ATTENTION_PREFIX
from clearhead.studies.bilstm import BiLSTM, build_vocabulary, train_bilstm
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
def test_every_probe_supports_a_recurrent_network_and_leaves_it_unchanged(ex, name):
    before = of_model(ex.adapter.model)
    once, rerun = (getattr(probes, f"run_{name}_probe")(ex, TEXTS, **PROBES[name]).to_dict() for _ in range(2))
    assert of_model(ex.adapter.model) == before and once == rerun
    single = getattr(probes, f"run_{name}_probe")(ex, TEXTS[:1], **PROBES[name])
    if name != "heads":
        figures = {key: value for key, value in once["records"][0].items() if isinstance(value, float)}
        figures = {
            key: value for key, value in figures.items() if to_snake_case(MEAN_ATTENTION_PREFIX) not in key
        }  # of the other inputs
        assert figures == pytest.approx(
            {key: to_snake_case_keys(single.records[0])[key] for key in figures}, abs=1e-9, nan_ok=True
        )


def test_uniform_attention_averages_the_states(ex):
    model = ex.adapter.model
    for text, line in zip(TEXTS, probes.run_uniform_probe(ex, TEXTS).records, strict=True):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        states, lengths = model.lstm(model.embedding(ids))[0], torch.tensor([ids.shape[1]])
        uniform, original = model.head(states.mean(1)).softmax(-1), model(ids, lengths).softmax(-1)
        assert line["TVD, read-out row"] == pytest.approx(float((uniform - original).abs().sum() / 2), abs=1e-12)


def test_mean_attention_averages_the_other_inputs_by_position(ex):
    model, rows, states, predictions = ex.adapter.model, [], [], []
    for text in TEXTS:
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        states.append(model.lstm(model.embedding(ids))[0][0])
        predictions.append(model(ids, torch.tensor([ids.shape[1]])).softmax(-1)[0])
        rows.append(probes.run_adversary_probe(ex, text, steps=1, sets=1).records[0]["own weights"])
    assert len({len(row) for row in rows}) > 1
    for i, line in enumerate(probes.run_uniform_probe(ex, TEXTS).records):
        mean = []
        for position in range(len(rows[i])):
            weights_at_position = [row[position] for j, row in enumerate(rows) if j != i and len(row) > position]
            mean.append(sum(weights_at_position) / len(weights_at_position) if weights_at_position else 0.0)
        weights = torch.tensor(mean, dtype=states[i].dtype) / sum(mean)
        difference = model.head(weights @ states[i]).softmax(-1) - predictions[i]
        assert line[f"TVD, {MEAN_ATTENTION_PREFIX}read-out row"] == pytest.approx(
            float(difference.abs().sum() / 2), abs=1e-9
        )


def test_all_scopes_cover_the_row_of_a_pooling_query(ex):
    scopes = ({}, {"scope": "S2"}, {"scope": "S3", "layer": 0}, {"scope": "S4"})
    columns = [probes.run_permutation_probe(ex, TEXTS, draws=4, **scope).get_column("median TVD") for scope in scopes]
    assert all(np.allclose(columns[0], column, atol=1e-12) for column in columns) and columns[0].max() > 1e-5


def test_leave_one_out_equals_the_text_without_the_word(ex):
    line = probes.run_correlation_probe(ex, TEXTS[0]).records[0]
    words = TEXTS[0].split()

    def predict(kept_words):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in kept_words]])
        return ex.adapter.model(ids, torch.tensor([len(kept_words)])).softmax(-1)

    gaps = [float((predict(words[:i] + words[i + 1 :]) - predict(words)).abs().mean()) for i in range(len(words))]
    weights = probes.run_adversary_probe(ex, TEXTS[0], steps=1, sets=1).records[0]["own weights"]
    agreements = [
        np.sign(gaps[i] - gaps[j]) * np.sign(weights[i] - weights[j]) for i in range(len(words)) for j in range(i)
    ]
    assert line["τ(last row, left out (delete))"] == pytest.approx(np.mean(agreements))
    with pytest.raises(InputError, match="cannot be probed by leave-one-out: use longer"):
        probes.run_correlation_probe(ex, "w3")


def test_uniform_patch_equals_a_model_with_zero_queries():
    name = "textbook, learned positions"
    ex, uniform_model = custom_models.explainer(name), copy.deepcopy(custom_models.made(name))
    for block in uniform_model.blocks:
        for head in block.attn.heads:
            torch.nn.init.zeros_(head.q.weight)
    uniform_explainer = clearhead.load(uniform_model, custom_models.CASES[name].reader())
    distances = probes.run_uniform_probe(ex, TEXTS).get_column("TVD, all layers")
    for text, gap in zip(TEXTS, distances, strict=True):
        ids = torch.tensor([[custom_models.VOCABULARY.index(word) for word in text.split()]])
        original, uniform = (explainer.adapter.model(ids).softmax(-1) for explainer in (ex, uniform_explainer))
        assert gap == pytest.approx(float((original - uniform).abs().sum() / 2), abs=1e-12)
    assert distances.min() > 1e-6
    permutation = probes.run_permutation_probe(ex, TEXTS, draws=3)
    assert permutation.get_column("median TVD").max() > 0


def test_attention_that_the_module_does_not_compute_cannot_be_replaced():
    class GivenAttention(torch.nn.Module):
        def forward(self, attention, values):
            return attention @ values

    from clearhead.capture.sources.custom_modules import _compute_custom_attention

    with (
        replaced_custom_attention(lambda attention: attention),
        pytest.raises(UnsupportedError, match="does not compute it"),
    ):
        _compute_custom_attention(
            lambda module, a, v: (a @ v, a), GivenAttention(), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 3)
        )


def test_next_token_of_a_prompt_is_probed(monkeypatch):
    torch.manual_seed(0)
    byte_tokenizer = tokenizer("bytes")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(byte_tokenizer), num_key_value_heads=2, initializer_range=0.3, **sizes
    )
    ex = clearhead.load((transformers.LlamaForCausalLM(config).double().eval(), byte_tokenizer))
    prompts = ["I like the", "So", "She hates the book because"]
    before = of_model(ex.adapter.model)
    shortcut = probes.run_permutation_probe(ex, prompts, draws=4)
    result = probes.run_correlation_probe(ex, prompts[:1])
    assert of_model(ex.adapter.model) == before and len(result.records) == 1
    monkeypatch.setattr("clearhead.probes.permuted_attention.has_last_row_shortcut", lambda probed: False)
    full = probes.run_permutation_probe(ex, prompts, draws=4)
    assert np.allclose(shortcut.get_column("median TVD"), full.get_column("median TVD"), atol=1e-6)
    assert full.get_column("median TVD").max() > 1e-4
    assert shortcut.records[0]["prediction"] == ex.explain(prompts[0], method="generic").prediction["label"]


def test_bilstm_learns_its_sentences_and_resumes(tmp_path):
    positive, negative = (
        ["a good film", "good and funny", "so good a story"],
        ["a bad film", "bad and dull", "so bad a story"],
    )
    checkpoint_file = tmp_path / "model.safetensors"
    settings = {
        "steps": 90,
        "batch_size": 6,
        "learning_rate": 2e-2,
        "hidden_size": 16,
        "checkpoint": checkpoint_file,
        "progress": lambda name, fraction: None,
    }
    ex = train_bilstm(positive * 2 + negative * 2, [1] * 6 + [0] * 6, ["bad", "good"], **settings)
    assert isinstance(ex.adapter.model, BiLSTM)
    assert [e.prediction["label"] for e in ex.explain(["good", "a bad story"], method="generic")] == ["good", "bad"]
    rerun = train_bilstm(positive * 2 + negative * 2, [1] * 6 + [0] * 6, ["bad", "good"], **settings)
    for parameter, repeated in zip(ex.adapter.model.parameters(), rerun.adapter.model.parameters(), strict=True):
        assert torch.equal(parameter, repeated)
    assert "dull" in build_vocabulary(negative * 2) and "dull" not in build_vocabulary(negative)
