"""Each attention call is recorded separately: shared layers, self- and cross-attention."""

import copy

import pytest
import torch
import transformers

import clearhead
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import ModelSession
from tests.invariants import cases
from tests.models import inputs

REQUIREMENTS = ("attention", "attention_gradient", "input_gradient")


def test_shared_layer_is_recorded_once_per_call():
    tape = cases.explainer("albert/classify").record(inputs("albert/classify"), (*REQUIREMENTS, "block_input"))
    assert len({call.module for call in tape.calls}) == 1 and len(tape.calls) == 3
    for field in ("attention", "attention_gradient", "block_input"):
        first, second, third = (getattr(call, field) for call in tape.calls)
        assert not torch.equal(first, second) and not torch.equal(second, third)


def bart():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "num_labels": 3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    return transformers.BartModel(transformers.BartConfig(**sizes, **heads, init_std=0.3, max_position_embeddings=30))


def marian():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    options = {"pad_token_id": 0, "decoder_start_token_id": 0, "init_std": 0.3, "max_position_embeddings": 30}
    return transformers.MarianModel(transformers.MarianConfig(**sizes, **heads, **options))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5Model(transformers.T5Config(**sizes, initializer_factor=1.0, decoder_start_token_id=0))


def t5_uneven():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4}
    return transformers.T5Model(transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [bart, marian, t5, t5_uneven], ids=lambda make: make.__name__)
def test_encoder_decoder_calls_have_correct_kind_order_and_gradients(make):
    """Kinds and order are right; maps and gradients equal those that the model returns with eager attention."""
    torch.manual_seed(5)
    model = make().double().eval()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    batch = {
        "input_ids": torch.randint(4, 50, (2, 7)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(4, 50, (2, 4)),
    }

    def value(output):
        return output.last_hidden_state[:, -1, 3]

    tape = Recorder(ModelSession(model)).record(batch, value, REQUIREMENTS)
    eager_model = copy.deepcopy(model)
    eager_model.set_attn_implementation("eager")
    output = eager_model(**batch, output_attentions=True)
    decoder = [maps for pair in zip(output.decoder_attentions, output.cross_attentions, strict=True) for maps in pair]
    expected = [*output.encoder_attentions, *decoder]
    gradients = torch.autograd.grad(value(output).sum(), expected)
    encoders, pairs = len(output.encoder_attentions), len(output.cross_attentions)
    assert [call.kind for call in tape.calls] == ["self"] * encoders + ["self", "cross"] * pairs
    assert [call.layer for call in tape.calls] == list(range(encoders + 2 * pairs))
    assert len({call.module for call in tape.calls}) == len(expected)
    sides = [call.module.split(".")[0] for call in tape.calls]
    assert sides == ["encoder"] * encoders + ["decoder"] * 2 * pairs
    for call, attention, gradient in zip(tape.calls, expected, gradients, strict=True):
        assert (call.attention - attention).abs().max() <= 1e-12
        assert gradient.any(), "the reference gradient must not be zero"
        assert (call.attention_gradient - gradient).abs().max() <= 1e-12 * gradient.abs().max(), call.module


def test_encoder_decoder_classifier_raises_unsupported():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "num_labels": 3}
    config = transformers.BartConfig(**sizes, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48)
    with pytest.raises(clearhead.UnsupportedError, match="BartForSequenceClassification is an encoder–decoder"):
        clearhead.load(transformers.BartForSequenceClassification(config).eval())
