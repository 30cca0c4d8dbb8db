"""Whole maps made in place on a CPU, against the formula and against the model's eager attention."""

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

import clearhead
from clearhead.recording import interface
from clearhead.recording.whole_maps import Memory, attend
from tests import models

METHODS = ["generic", "grad-sam", "attention", "rollout", "cat", "attcat", "attention-gradcam", "saliency", "tam"]


def parts(shared=2):
    torch.manual_seed(0)
    shapes = ((2, 7, 4, 8), (2, 9, shared, 8), (2, 9, shared, 5))
    made = [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    mask = torch.zeros(2, 1, 7, 9, dtype=torch.float64)
    mask[1, :, :, 6:] = -1e30
    return [part.requires_grad_() for part in made], mask


def formula(query, key, value, mask, scale):
    key, value = (part.repeat_interleave(4 // part.shape[1], 1) for part in (key, value))
    scores = query @ key.mT * scale
    attention = (scores if mask is None else scores + mask).softmax(-1)
    return (attention @ value).transpose(1, 2), attention


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_the_formula_and_its_gradients(shared, masked, seen):
    """What a hook sees of ∂y/∂A is right, and so is what comes of it, whether or not it is written over."""
    own, mask = parts(shared)
    mask = mask if masked else None
    memory, heard = Memory(seen=seen), []
    found, attention = attend(*own, mask, 0.3, memory)
    attention.register_hook(lambda slope: heard.append(slope.clone()))
    expected, maps = formula(*own, mask, 0.3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(attention, maps)
    slope = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, own, slope), torch.autograd.grad(expected, own, slope))
    torch.testing.assert_close(heard[0], slope.transpose(1, 2) @ own[2].repeat_interleave(4 // shared, 1).mT)
    assert len(memory.spare) == (1 if seen else 0)


def test_several_targets_at_once():
    own, mask = parts()
    slopes = torch.randn(3, 2, 7, 4, 5, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(output, [*own, attention], slopes, is_grads_batched=True)
        for output, attention in (attend(*own, mask, None, Memory()), formula(*own, mask, 8**-0.5))
    )
    torch.testing.assert_close(found, expected)


def bert():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=40, initializer_range=0.3))


def llama():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**shape, **more))


def modernbert():
    """Its attention is told, too, whether flash attention is to be deterministic."""
    models.skip_if_not_yet("modernbert")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")} | {"pad_token_id": 0}
    more = {"local_attention": 8, "global_attn_every_n_layers": 2, "vocab_size": 40, "initializer_range": 0.3}
    return ModernBertForSequenceClassification(ModernBertConfig(**shape, **tokens, **more))


def given():
    ids = torch.randint(5, 40, (3, 23))
    mask = torch.ones_like(ids)
    mask[1, 14:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def counted(monkeypatch):
    """How often attention was made in place."""
    calls = []

    def count(*args):
        calls.append(1)
        return attend(*args)

    monkeypatch.setattr(interface, "attend", count)
    return calls


@pytest.mark.parametrize("model", [bert, llama, modernbert])
def test_explanations_are_those_of_eager_attention(model, counted, monkeypatch):
    """Batched, padded, in tiles that a cache would hold: every method that folds maps."""
    monkeypatch.setattr("clearhead.plan.CACHED", 600)
    monkeypatch.setattr("clearhead.plan.LEAST_ROWS", 4)
    torch.manual_seed(0)
    own = model().eval()
    inputs = given()
    own.set_attn_implementation("eager")
    expected = clearhead.load(own).explain(inputs, METHODS)
    assert not counted
    own.set_attn_implementation("sdpa")
    found = clearhead.load(own).explain(inputs, METHODS)
    assert counted
    for name in METHODS:
        size = max(abs(other.scores).max() for other in expected[name])
        assert size > 0, name
        for e, other in zip(found[name], expected[name], strict=True):
            assert abs(e.scores - other.scores).max() <= 2e-5 * size, name


def test_a_tape_keeps_its_gradients(counted):
    torch.manual_seed(0)
    own, inputs = bert().eval(), given()
    found = clearhead.load(own).record(inputs, ("attention_gradient", "input_gradient"))
    assert counted
    own.set_attn_implementation("eager")
    expected = clearhead.load(own).record(inputs, ("attention_gradient", "input_gradient"))
    for call, other in zip(found.calls, expected.calls, strict=True):
        assert other.attention_gradient.any()
        torch.testing.assert_close(call.attention_gradient, other.attention_gradient)
    torch.testing.assert_close(found.input_gradient["text"], expected.input_gradient["text"])


def test_rules_see_the_steps_of_attention(counted):
    """Relevance by rules goes through the model's own operations."""
    ex = clearhead.load(bert().eval())
    ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    before = len(counted)
    with BaseTorchFunctionMode():
        ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    assert len(counted) == before > 0
