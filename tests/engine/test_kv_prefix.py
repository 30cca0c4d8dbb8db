"""Altered inputs of a decoder share the keys and values of the words before their first change, exactly."""

import pytest
import torch
import transformers

import clearhead
from clearhead.engine import kv_prefix

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.3}
GPT2 = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "vocab_size": 40,
    "n_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, initializer_range=0.3)),
    "windows": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=4)),
}
METHODS = ["occlusion", clearhead.Method("shap", evaluations=40), clearhead.Method("kernel-shap", evaluations=60)]


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


@pytest.fixture
def given():
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 40, (1, 14))}


def counted(model):
    """How many words go through the model."""
    words = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: words.append(args[0].numel()))
    return words


def apart(monkeypatch):
    """Nothing is shared."""
    monkeypatch.setattr(kv_prefix.KVPrefix, "find_common_length", lambda self, other: 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_same_numbers_as_apart(name, method, given, monkeypatch):
    shared = clearhead.load(made(name)).explain(given, method)
    apart(monkeypatch)
    alone = clearhead.load(made(name)).explain(given, method)
    assert abs(alone.scores).max() > 1e-3
    assert abs(shared.scores - alone.scores).max() <= 1e-6 * abs(alone.scores).max()
    assert shared.certificate["checks"]["evaluations"] == alone.certificate["checks"]["evaluations"]


def test_words_in_common_go_through_once(given, monkeypatch):
    """Each of 14 words is hidden in turn. The input itself and the last seven of these have seven words in common, the
    next four three of these, two more one, and the first none."""
    model = made("llama")
    ex = clearhead.load(model)
    ex.explain(given, "occlusion")  # tests itself, and that the cache is exact
    words = counted(model)
    ex.explain(given, "occlusion")
    assert sorted(words) == sorted([14, 7, 8 * (14 - 7), 4 * (14 - 3), 2 * (14 - 1), 14])
    words.clear()
    apart(monkeypatch)
    ex.explain(given, "occlusion")
    assert sum(words) == 14 + 15 * 14


def test_windows_share_too(given):
    """The cache that is handed to the model keeps every key, and the model's mask does the rest."""
    model = made("windows")
    ex = clearhead.load(model)
    ex.explain(given, "occlusion")
    assert kv_prefix._exact_cache_by_recorder[ex.recorder] is True


@pytest.fixture
def several():
    """Two inputs: what the first shows of a cache is known before the second is asked."""
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 40, (2, 14))}


def test_a_cache_that_forgets_is_not_used(given, monkeypatch):
    """A layer of another kind (a window, a recurrent state) does not keep every key."""
    monkeypatch.setattr(kv_prefix, "DynamicLayer", type("Another", (), {}))
    ex = clearhead.load(made("llama"))
    ex.explain(given, "occlusion")
    assert kv_prefix._exact_cache_by_recorder[ex.recorder] is False


def test_a_cache_that_is_wrong_is_not_used(several, monkeypatch):
    """Whatever a model does with its cache: numbers that come out otherwise are not used."""
    expected = clearhead.load(made("llama")).explain(several, "occlusion")
    real = kv_prefix.KVPrefix._repeat_cache

    def spoilt(self, count, length):
        cache = real(self, count, length)
        cache.layers[0].values *= 3
        return cache

    monkeypatch.setattr(kv_prefix.KVPrefix, "_repeat_cache", spoilt)
    ex = clearhead.load(made("llama"))
    for found, real in zip(ex.explain(several, "occlusion"), expected, strict=True):
        assert abs(found.scores - real.scores).max() <= 1e-9
    assert kv_prefix._exact_cache_by_recorder[ex.recorder] is False


def test_recurrent_states_are_not_shared(several, monkeypatch):
    """Its short convolutions keep a state, not keys."""
    shape = {**SHAPE, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**shape)).double().eval()
    ex = clearhead.load(model)
    shared = ex.explain(several, "occlusion")
    assert kv_prefix._exact_cache_by_recorder[ex.recorder] is False
    apart(monkeypatch)
    for found, real in zip(shared, clearhead.load(model).explain(several, "occlusion"), strict=True):
        assert abs(found.scores - real.scores).max() <= 1e-9
