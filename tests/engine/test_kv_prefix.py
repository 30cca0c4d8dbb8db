"""KV cache of the common prefix: altered decoder inputs share keys and values before their first change, exactly."""

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
    "sliding window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=4)),
}
METHODS = ["occlusion", clearhead.Method("shap", evaluations=40), clearhead.Method("kernel-shap", evaluations=60)]
METHODS += [clearhead.Method("calibrated", evaluations=30)]


def make_model(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 40, (1, 14))}


def count_tokens(model):
    """Record the number of tokens of each forward pass."""
    token_counts = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: token_counts.append(args[0].numel())
    )
    return token_counts


def disable_sharing(monkeypatch):
    """Disable the sharing of prefixes."""
    monkeypatch.setattr(kv_prefix.KVPrefix, "find_common_length", lambda self, other: 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_shared_prefix_scores_equal_unshared(name, method, inputs, monkeypatch):
    shared = clearhead.load(make_model(name)).explain(inputs, method)
    disable_sharing(monkeypatch)
    unshared = clearhead.load(make_model(name)).explain(inputs, method)
    assert abs(unshared.scores).max() > 1e-3
    assert abs(shared.scores - unshared.scores).max() <= 1e-6 * abs(unshared.scores).max()
    assert shared.certificate["checks"]["evaluations"] == unshared.certificate["checks"]["evaluations"]


def test_common_prefix_runs_once(inputs, monkeypatch):
    """Each of 14 tokens is masked in turn. The input itself and the last seven of these share a prefix of seven tokens,
    the next four share three, two more share one, and the first shares none."""
    model = make_model("llama")
    ex = clearhead.load(model)
    ex.explain(inputs, "occlusion")  # runs the self-test and the check of the cache
    token_counts = count_tokens(model)
    ex.explain(inputs, "occlusion")
    assert sorted(token_counts) == sorted([14, 7, 8 * (14 - 7), 4 * (14 - 3), 2 * (14 - 1), 14])
    token_counts.clear()
    disable_sharing(monkeypatch)
    ex.explain(inputs, "occlusion")
    assert sum(token_counts) == 14 + 15 * 14


def test_sliding_window_model_shares_prefix(inputs):
    """The cache passed to the model keeps every key, and the model's mask applies the window."""
    model = make_model("sliding window")
    ex = clearhead.load(model)
    ex.explain(inputs, "occlusion")
    assert ex.capabilities.has_exact_kv_cache is True


@pytest.fixture
def two_inputs():
    """Two inputs: the result of the cache check on the first is known before the second."""
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 40, (2, 14))}


def test_cache_layer_of_other_type_is_not_used(inputs, monkeypatch):
    """A cache layer of another type (a window, a recurrent state) does not keep every key."""
    monkeypatch.setattr(kv_prefix, "DynamicLayer", type("Another", (), {}))
    ex = clearhead.load(make_model("llama"))
    ex.explain(inputs, "occlusion")
    assert ex.capabilities.has_exact_kv_cache is False


def test_inexact_cache_is_not_used(two_inputs, monkeypatch):
    """If outputs with the cache differ from those without it, the cache is not used."""
    expected = clearhead.load(make_model("llama")).explain(two_inputs, "occlusion")
    original = kv_prefix.KVPrefix._repeat_cache

    def corrupt_cache(self, count, length):
        cache = original(self, count, length)
        cache.layers[0].values *= 3
        return cache

    monkeypatch.setattr(kv_prefix.KVPrefix, "_repeat_cache", corrupt_cache)
    ex = clearhead.load(make_model("llama"))
    for actual, reference in zip(ex.explain(two_inputs, "occlusion"), expected, strict=True):
        assert abs(actual.scores - reference.scores).max() <= 1e-9
    assert ex.capabilities.has_exact_kv_cache is False


def test_recurrent_state_is_not_shared(two_inputs, monkeypatch):
    """LFM2's short convolutions keep a state, not keys."""
    shape = {**SHAPE, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**shape)).double().eval()
    ex = clearhead.load(model)
    shared = ex.explain(two_inputs, "occlusion")
    assert ex.capabilities.has_exact_kv_cache is False
    disable_sharing(monkeypatch)
    for actual, expected in zip(shared, clearhead.load(model).explain(two_inputs, "occlusion"), strict=True):
        assert abs(actual.scores - expected.scores).max() <= 1e-9
