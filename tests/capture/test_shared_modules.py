"""A call is one computation, not one module: shared layers, self- and cross-attention, each has its own record."""

import copy

import pytest
import torch
import transformers

import clearhead
from clearhead.capture.recorder import Recorder
from tests.invariants import cases
from tests.models import inputs

ASKS = ("attention", "attention_gradient", "input_gradient")


def test_a_layer_that_is_called_three_times():
    tape = cases.explainer("albert/classify").record(inputs("albert/classify"), (*ASKS, "block_input"))
    assert len({call.module for call in tape.calls}) == 1 and len(tape.calls) == 3
    for part in ("attention", "attention_gradient", "block_input"):
        one, two, three = (getattr(call, part) for call in tape.calls)
        assert not torch.equal(one, two) and not torch.equal(two, three)


def bart():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "num_labels": 3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    return transformers.BartModel(transformers.BartConfig(**sizes, **heads, init_std=0.3, max_position_embeddings=30))


def marian():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    own = {"pad_token_id": 0, "decoder_start_token_id": 0, "init_std": 0.3, "max_position_embeddings": 30}
    return transformers.MarianModel(transformers.MarianConfig(**sizes, **heads, **own))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5Model(transformers.T5Config(**sizes, initializer_factor=1.0, decoder_start_token_id=0))


def t5_uneven():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4}
    return transformers.T5Model(transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [bart, marian, t5, t5_uneven], ids=lambda make: make.__name__)
def test_self_and_cross_attention(make):
    """Kinds and order are right, and maps and gradients are those that the model itself returns under eager."""
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

    tape = Recorder(model).record(batch, value, ASKS)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    output = twin(**batch, output_attentions=True)
    decoder = [part for pair in zip(output.decoder_attentions, output.cross_attentions, strict=True) for part in pair]
    real = [*output.encoder_attentions, *decoder]
    gradients = torch.autograd.grad(value(output).sum(), real)
    encoders, pairs = len(output.encoder_attentions), len(output.cross_attentions)
    assert [call.kind for call in tape.calls] == ["self"] * encoders + ["self", "cross"] * pairs
    assert [call.layer for call in tape.calls] == list(range(encoders + 2 * pairs))
    assert len({call.module for call in tape.calls}) == len(real)
    sides = [call.module.split(".")[0] for call in tape.calls]
    assert sides == ["encoder"] * encoders + ["decoder"] * 2 * pairs
    for call, attention, gradient in zip(tape.calls, real, gradients, strict=True):
        assert (call.attention - attention).abs().max() <= 1e-12
        assert gradient.any(), "the reference itself must say something"
        assert (call.attention_gradient - gradient).abs().max() <= 1e-12 * gradient.abs().max(), call.module


def test_an_encoder_decoder_is_not_explained_as_if_it_were_an_encoder():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "num_labels": 3}
    config = transformers.BartConfig(**sizes, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48)
    with pytest.raises(clearhead.UnsupportedError, match="BartForSequenceClassification is an encoder–decoder"):
        clearhead.load(transformers.BartForSequenceClassification(config).eval())
