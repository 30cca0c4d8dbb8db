"""The recorder tests itself on first use and raises an error that names model and layer if it is not exact."""

import functools
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import clearhead
from clearhead.capture.context import IMPLEMENTATION_NAME
from clearhead.capture.sources.attention_interface import register_functions
from tests.architectures.tiny_models import build
from tests.models import TEXTS, text_model

LAYER = "bert.encoder.layer.1"


def bert():
    """The modelling module of BERT, imported by the test that needs it."""
    return transformers.models.bert.modeling_bert


def unsupported_message(model, tokenizer, method="generic"):
    """The error message for an unsupported model; every public call raises it."""
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
    """A BERT whose second layer has the given attention class."""
    model, tokenizer = text_model("bert")
    model.bert.encoder.layer[1].attention.self.__class__ = cls
    return model, tokenizer


@pytest.fixture
def modelling_module():
    """A separate Python module for attention classes, like a modelling file."""
    name = "test_modelling"
    module = sys.modules[name] = types.ModuleType(name)
    yield module
    del sys.modules[name]


def test_supported_model_passes_self_test():
    ex = clearhead.load(text_model("bert"))
    e = ex.explain(TEXTS[0], method="generic")
    assert ex.recorder.self_test.capture_source.name == e.certificate["recorder"] == "interface"
    assert ex.recorder.self_test.num_calls == 3
    assert e.certificate["capture_error"] < 1e-12 and e.certificate["rebuild_error"] < 1e-12


def test_attention_that_drops_padding_mask_when_recorded_raises():
    """A common bug: masks are made for "eager" and "sdpa" by name. A batch of one text would not reveal it."""

    class IgnoresMask(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            known = self.config._attn_implementation in ("eager", "sdpa")
            return super().forward(hidden_states, attention_mask if known else None, **kwargs)

    text = unsupported_message(*with_attention(IgnoresMask))
    assert "BertForSequenceClassification" in text and LAYER in text and "padding" in text


def test_missing_mask_function_raises(monkeypatch):
    """Transformers silently drops the padding mask if no mask function is registered for our implementation name."""
    register_functions()
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, IMPLEMENTATION_NAME)
    text = unsupported_message(*text_model("bert"))
    assert "padding" in text and "bert.encoder.layer.0" in text


def test_returned_probabilities_that_were_not_used_raise(modelling_module):
    class WrongProbabilities(bert().BertSelfAttention):
        __module__ = modelling_module.__name__

    def eager_attention_forward(*args, **kwargs):
        output, attention = bert().eager_attention_forward(*args, **kwargs)
        return output, attention.roll(1, dims=-1)

    modelling_module.eager_attention_forward = eager_attention_forward
    model, tokenizer = with_attention(WrongProbabilities)
    model.set_attn_implementation("eager")
    text = unsupported_message(model, tokenizer)
    assert (
        "BertForSequenceClassification" in text
        and f"{LAYER}.attention.self" in text
        and "not the attention that it used" in text
    )


def test_eager_forward_without_probabilities_raises(modelling_module):
    class NoProbabilities(bert().BertSelfAttention):
        __module__ = modelling_module.__name__

    modelling_module.eager_attention_forward = lambda *a, **k: (bert().eager_attention_forward(*a, **k)[0], None)
    text = unsupported_message(*with_attention(NoProbabilities))
    assert "BertForSequenceClassification" in text and f"{LAYER}.attention.self" in text and "no probabilities" in text


def test_model_with_other_logits_when_recorded_raises():
    class ChangedWhenRecorded(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            recorded = self.config._attn_implementation == IMPLEMENTATION_NAME
            return super().forward(hidden_states * (2 if recorded else 1), attention_mask, **kwargs)

    text = unsupported_message(*with_attention(ChangedWhenRecorded))
    assert "logits change" in text and text.endswith(LAYER)


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_weights_raise_and_name_the_parameter(layer):
    model, tokenizer = text_model("bert")
    weight = f"bert.encoder.layer.{layer}.attention.self.key.weight"
    model.get_parameter(weight).data[0, 0] = torch.nan
    assert unsupported_message(model, tokenizer).endswith(f"NaN or infinite, so that it has no valid output: {weight}")


def test_infinite_output_raises():
    model, tokenizer = text_model("bert")
    model.classifier.register_forward_hook(lambda module, args, output: output * torch.inf)
    assert "itself outputs NaN or infinity in torch.float64" in unsupported_message(model, tokenizer)


def test_layer_that_bypasses_attention_interface_raises():
    class ByHand(bert().BertSelfAttention):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            value = self.value(hidden_states)
            return value.mean(1, keepdim=True).expand_as(value), None

    text = unsupported_message(*with_attention(ByHand))
    assert "3 attention layers but 2 calls" in text
    assert "bert.encoder.layer.0" in text and "bert.encoder.layer.2" in text and LAYER not in text


def test_fewer_layers_than_in_config_raises():
    model, tokenizer = text_model("bert")
    model.bert.encoder.layer = model.bert.encoder.layer[:2]
    assert "3 attention layers but 2 calls" in unsupported_message(model, tokenizer)


class WithoutEagerFunction(nn.Module):
    """An attention class in whose module there is no eager_attention_forward."""

    is_causal = False

    def __init__(self, original):
        super().__init__()
        self.config, self.scaling, self.heads = original.config, original.scaling, original.num_attention_heads
        self.query, self.key, self.value = original.query, original.key, original.value

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        qkv = [
            projection(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, attention = attend(self, *qkv, attention_mask, dropout=0.0, scaling=self.scaling)
        return output.flatten(2), attention


def test_attention_class_without_eager_function_raises():
    model, tokenizer = text_model("bert")
    layer = model.bert.encoder.layer[1].attention
    layer.self = WithoutEagerFunction(layer.self)
    text = unsupported_message(model, tokenizer)
    assert "BertForSequenceClassification" in text and f"{LAYER}.attention.self" in text
    assert "no eager_attention_forward" in text and "WithoutEagerFunction" in text


def test_model_without_attention_raises():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, image_size=16)
    ex = clearhead.load(transformers.ConvNextForImageClassification(config).eval())
    with pytest.raises(clearhead.UnsupportedError, match=r"ConvNextForImageClassification .* without attention"):
        ex.explain({"pixel_values": torch.rand(1, 3, 16, 16)}, method="generic")


def test_failed_self_test_is_not_cached():
    """A failed self-test is not cached."""
    model, tokenizer = text_model("bert")
    ex = clearhead.load(model, tokenizer)
    model.config.num_hidden_layers = 7
    with pytest.raises(clearhead.UnsupportedError, match="7 attention layers"):
        ex.explain(TEXTS[0], method="generic")
    model.config.num_hidden_layers = 3
    assert ex.explain(TEXTS[0], method="generic").scores.any()


def test_layers_with_several_vectors_per_unit_support_only_map_methods():
    """As with hyper-connections: methods that use layer inputs are unsupported, those that use maps are supported."""
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
    assert "one vector per unit" in lines["attcat"].why_not and "one vector per unit" in lines["cat"].why_not


def test_other_embedding_lookup_before_input_raises():
    """An earlier embedding lookup would be taken for the one of the input."""
    model, tokenizer = text_model("bert")
    table = model.get_input_embeddings()

    def look_up_one_embedding(module, args):
        table(torch.zeros(1, 1, dtype=torch.long))

    model.bert.embeddings.register_forward_pre_hook(look_up_one_embedding)
    with pytest.raises(
        clearhead.UnsupportedError, match=r"input_ids has .* tokens, but the model looked up 1 embeddings"
    ):
        clearhead.load(model, tokenizer).explain(TEXTS[0], method="generic")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda maps: 3 * maps, "not a probability distribution"),
        (lambda maps: maps.clone(), "does not depend on the attention"),
    ],
    ids=["other numbers", "a copy"],
)
def test_modules_that_return_unused_maps_raise(change, message):
    """DeBERTa ignores the attention interface, so only the maps that its modules return are available."""
    model, tokenizer = text_model("deberta")

    attention = transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention

    class WrongProbabilities(attention):
        @functools.wraps(attention.forward)
        def forward(self, *args, **kwargs):
            output, maps = super().forward(*args, **kwargs)
            return output, None if maps is None else change(maps)

    for layer in model.deberta.encoder.layer:
        layer.attention.self.__class__ = WrongProbabilities
    with pytest.raises(clearhead.UnsupportedError, match=message):
        clearhead.load(model, tokenizer).explain(TEXTS[0], method="generic")


@pytest.mark.skipif("MiniMaxForCausalLM" not in transformers.__all__, reason="this transformers has no MiniMax")
def test_linear_attention_state_is_not_recorded_as_attention():
    """MiniMax returns the state in place of attention probabilities; its softmax layers are captured."""
    ex = clearhead.load(build("MiniMaxForCausalLM"))
    lines = {line.name: line for line in ex.methods()}
    assert [site.module for site in ex.recorder.self_test.call_sites] == ["model.layers.0.self_attn"]
    assert lines["saliency"].applies and "outside attention" in lines["generic"].why_not
