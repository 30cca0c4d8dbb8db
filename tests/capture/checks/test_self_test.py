"""On first use the recorder tests itself, and refuses by name of model and layer if it is not exact."""

import functools
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import clearhead
from clearhead.capture.sources.attention_interface import IMPLEMENTATION_NAME, register_functions
from tests.architectures.tiny_models import build
from tests.models import TEXTS, text_model

LAYER = "bert.encoder.layer.1"


def bert():
    """The module of BERT's attention, imported by the test that needs it."""
    return transformers.models.bert.modeling_bert


def refusal(model, tokenizer, method="generic"):
    """What a refused model is told; every public call says the same."""
    ex = clearhead.load(model, tokenizer)
    with pytest.raises(clearhead.UnsupportedError) as refused:
        ex.explain(TEXTS, method=method)
    with pytest.raises(clearhead.UnsupportedError):
        ex.record(TEXTS[0], ("attention",))
    listed = ex.methods()
    assert not any(line.applies for line in listed)
    assert "BertForSequenceClassification" in listed[0].why_not
    return str(refused.value)


def with_attention(cls):
    """A BERT whose second layer has another class of attention."""
    model, tokenizer = text_model("bert")
    model.bert.encoder.layer[1].attention.self.__class__ = cls
    return model, tokenizer


@pytest.fixture
def own_module():
    """A Python module of its own for attention classes, as a modelling file is."""
    name = "careless_modelling"
    module = sys.modules[name] = types.ModuleType(name)
    yield module
    del sys.modules[name]


def test_a_sound_model_is_not_refused():
    ex = clearhead.load(text_model("bert"))
    e = ex.explain(TEXTS[0])
    assert ex.recorder.self_test.capture_source == e.certificate["recorder"] == "interface"
    assert ex.recorder.self_test.num_calls == 3
    assert e.certificate["capture_error"] < 1e-12 and e.certificate["rebuild_error"] < 1e-12


def test_attention_that_forgets_padding_when_recorded():
    """The usual accident: masks are made for "eager" and "sdpa" by name. One text alone would never show it."""

    class Forgetful(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            known = self.config._attn_implementation in ("eager", "sdpa")
            return super().forward(hidden_states, attention_mask if known else None, **kwargs)

    text = refusal(*with_attention(Forgetful))
    assert "BertForSequenceClassification" in text and LAYER in text and "padding" in text


def test_no_mask_function(monkeypatch):
    """Transformers drops the padding mask in silence where no mask function is registered under our name."""
    register_functions()
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, IMPLEMENTATION_NAME)
    text = refusal(*text_model("bert"))
    assert "padding" in text and "bert.encoder.layer.0" in text


def test_probabilities_that_were_not_used(own_module):
    class Careless(bert().BertSelfAttention):
        __module__ = own_module.__name__

    def eager_attention_forward(*args, **kwargs):
        output, attention = bert().eager_attention_forward(*args, **kwargs)
        return output, attention.roll(1, dims=-1)

    own_module.eager_attention_forward = eager_attention_forward
    model, tokenizer = with_attention(Careless)
    model.set_attn_implementation("eager")
    text = refusal(model, tokenizer)
    assert "BertForSequenceClassification" in text and f"{LAYER}.attention.self" in text and "not what it used" in text


def test_no_probabilities_at_all(own_module):
    class Silent(bert().BertSelfAttention):
        __module__ = own_module.__name__

    own_module.eager_attention_forward = lambda *a, **k: (bert().eager_attention_forward(*a, **k)[0], None)
    text = refusal(*with_attention(Silent))
    assert "BertForSequenceClassification" in text and f"{LAYER}.attention.self" in text and "no probabilities" in text


def test_a_model_that_computes_something_else_when_recorded():
    class TwoFaced(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            recorded = self.config._attn_implementation == IMPLEMENTATION_NAME
            return super().forward(hidden_states * (2 if recorded else 1), attention_mask, **kwargs)

    text = refusal(*with_attention(TwoFaced))
    assert "logits change" in text and text.endswith(LAYER)


@pytest.mark.parametrize("layer", [0, 2])
def test_weights_that_are_no_numbers(layer):
    model, tokenizer = text_model("bert")
    weight = f"bert.encoder.layer.{layer}.attention.self.key.weight"
    model.get_parameter(weight).data[0, 0] = torch.nan
    assert refusal(model, tokenizer).endswith(f"NaN or infinite, so that it has no valid output: {weight}")


def test_an_answer_that_is_no_number():
    model, tokenizer = text_model("bert")
    model.classifier.register_forward_hook(lambda module, args, output: output * torch.inf)
    assert "itself outputs NaN or infinity in torch.float64" in refusal(model, tokenizer)


def test_a_layer_that_does_not_ask_the_interface():
    class ByHand(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            value = self.value(hidden_states)
            return value.mean(1, keepdim=True).expand_as(value), None

    text = refusal(*with_attention(ByHand))
    assert "3 attention layers but 2 calls" in text
    assert "bert.encoder.layer.0" in text and "bert.encoder.layer.2" in text and LAYER not in text


def test_fewer_layers_than_the_configuration_says():
    model, tokenizer = text_model("bert")
    model.bert.encoder.layer = model.bert.encoder.layer[:2]
    assert "3 attention layers but 2 calls" in refusal(model, tokenizer)


class Lonely(nn.Module):
    """An attention beside which no eager function stands."""

    is_causal = False

    def __init__(self, like):
        super().__init__()
        self.config, self.scaling, self.heads = like.config, like.scaling, like.num_attention_heads
        self.query, self.key, self.value = like.query, like.key, like.value

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        parts = [
            part(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, attention = attend(self, *parts, attention_mask, dropout=0.0, scaling=self.scaling)
        return output.flatten(2), attention


def test_no_eager_function_beside_the_class():
    model, tokenizer = text_model("bert")
    layer = model.bert.encoder.layer[1].attention
    layer.self = Lonely(layer.self)
    text = refusal(model, tokenizer)
    assert "BertForSequenceClassification" in text and f"{LAYER}.attention.self" in text
    assert "no eager_attention_forward" in text and "Lonely" in text


def test_a_model_without_attention():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, image_size=16)
    ex = clearhead.load(transformers.ConvNextForImageClassification(config).eval())
    with pytest.raises(clearhead.UnsupportedError, match=r"ConvNextForImageClassification .* without attention"):
        ex.explain({"pixel_values": torch.rand(1, 3, 16, 16)}, method="generic")


def test_a_refused_model_can_be_put_right():
    """Nothing is remembered of a failed test."""
    model, tokenizer = text_model("bert")
    ex = clearhead.load(model, tokenizer)
    model.config.num_hidden_layers = 7
    with pytest.raises(clearhead.UnsupportedError, match="7 attention layers"):
        ex.explain(TEXTS[0])
    model.config.num_hidden_layers = 3
    assert ex.explain(TEXTS[0]).scores.any()


def test_layers_that_hand_on_several_vectors_for_each_unit():
    """As hyper-connections do: methods that read what goes into layers are refused, those that read maps are not."""
    model, tokenizer = text_model("bert")

    class Doubled(nn.Module):
        def __init__(self, layer, last):
            super().__init__()
            self.layer, self.last = layer, last

        def forward(self, hidden, *args, **kwargs):
            output = self.layer(hidden if hidden.dim() == 3 else hidden.mean(2), *args, **kwargs)
            return output if self.last else torch.stack([output, output], dim=2)

    layers = model.bert.encoder.layer
    model.bert.encoder.layer = nn.ModuleList(Doubled(layer, layer is layers[-1]) for layer in layers)
    lines = {line.name: line for line in clearhead.load(model, tokenizer).methods()}
    assert lines["generic"].applies and lines["rollout"].applies
    assert "one vector for each unit" in lines["attcat"].why_not and "one vector for each unit" in lines["cat"].why_not


def test_a_look_up_of_other_words_than_those_given():
    """A second table of words that is asked first would be taken for the input."""
    model, tokenizer = text_model("bert")
    table = model.get_input_embeddings()

    def first_ask_for_one(module, args):
        table(torch.zeros(1, 1, dtype=torch.long))

    model.bert.embeddings.register_forward_pre_hook(first_ask_for_one)
    with pytest.raises(
        clearhead.UnsupportedError, match=r"input_ids has .* tokens, but the model looked up 1 embeddings"
    ):
        clearhead.load(model, tokenizer).explain(TEXTS[0])


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (lambda maps: 3 * maps, "not a probability distribution"),
        (lambda maps: maps.clone(), "does not depend on the attention"),
    ],
    ids=["other numbers", "a copy"],
)
def test_modules_that_return_what_they_did_not_attend_with(returns, said):
    """DeBERTa ignores the interface, so what its modules return is all that is known of its attention."""
    model, tokenizer = text_model("deberta")

    attention = transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention

    class Careless(attention):
        @functools.wraps(attention.forward)
        def forward(self, *args, **kwargs):
            output, maps = super().forward(*args, **kwargs)
            return output, None if maps is None else returns(maps)

    for layer in model.deberta.encoder.layer:
        layer.attention.self.__class__ = Careless
    with pytest.raises(clearhead.UnsupportedError, match=said):
        clearhead.load(model, tokenizer).explain(TEXTS[0])


@pytest.mark.skipif("MiniMaxForCausalLM" not in transformers.__all__, reason="this transformers has no MiniMax")
def test_the_state_of_a_linear_attention_is_no_map():
    """MiniMax returns it where others return their probabilities; its own softmax layers are heard."""
    ex = clearhead.load(build("MiniMaxForCausalLM"))
    lines = {line.name: line for line in ex.methods()}
    assert [place.module for place in ex.recorder.self_test.call_sites] == ["model.layers.0.self_attn"]
    assert lines["saliency"].applies and "past the attention" in lines["generic"].why_not
