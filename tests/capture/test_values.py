"""Recorded values and output projection rebuild the output of the attention block: A·V·W_oᵀ + b."""

import pytest
import torch
import transformers

from clearhead.capture.recorder import Recorder
from clearhead.capture.session import ModelSession
from tests.models import image_model, text_model

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 50, "num_labels": 3}


def build_model(cls, config):
    torch.manual_seed(3)
    return cls(config).double().eval()


def gpt2():
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 20, "num_labels": 3}
    config = transformers.GPT2Config(**sizes, pad_token_id=0, initializer_range=0.3)
    return build_model(transformers.GPT2ForSequenceClassification, config)


def llama():
    """Grouped queries: four heads share two sets of keys and values."""
    options = {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "initializer_range": 0.3}
    config = transformers.LlamaConfig(**SMALL, **options, attention_bias=True)
    return build_model(transformers.LlamaForSequenceClassification, config)


#: The factory of the model, the suffix of its output projection, and the tolerance.
MODELS = {
    "bert": (lambda: text_model("bert")[0], "attention.output.dense", 1e-12),
    "roberta": (lambda: text_model("roberta")[0], "attention.output.dense", 1e-12),
    "distilbert": (lambda: text_model("distilbert")[0], "attention.out_lin", 1e-12),
    "albert": (lambda: text_model("albert")[0], "attention.dense", 1e-12),
    "modernbert": (lambda: text_model("modernbert")[0], "attn.Wo", 1e-12),
    "vit": (lambda: image_model("vit")[0], ("attention.output.dense", "attention.o_proj"), 1e-12),
    "dinov2": (lambda: image_model("dinov2")[0], ("attention.output.dense", "attention.o_proj"), 1e-12),
    "swin": (lambda: image_model("swin")[0], ("attention.output.dense", "attention.o_proj"), 1e-12),
    "gpt2": (gpt2, "attn.c_proj", 1e-12),
    "llama": (llama, "self_attn.o_proj", 1e-12),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_values_and_projection_rebuild_block_output(name):
    make, ending, tolerance = MODELS[name]
    model = make()
    if name in ("vit", "dinov2", "swin"):
        batch, leaf = {"pixel_values": torch.rand(2, 3, 16, 16, dtype=torch.float64)}, "pixel_values"
    else:
        ids = torch.randint(5, 50, (2, 7))
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        batch, leaf = {"input_ids": ids, "attention_mask": mask}, "input_ids"
    projections = [module for path, module in model.named_modules() if path.endswith(ending)]
    outputs = []
    handles = [
        module.register_forward_hook(lambda module, args, output: outputs.append(output)) for module in projections
    ]
    recorder = Recorder(ModelSession(model))
    recorder.run_self_test(batch, (leaf,))
    outputs.clear()
    requirements = ("attention", "values", "output_projection")
    tape = recorder.record(batch, lambda output: output.logits[:, 0], requirements, leaves=(leaf,))
    for handle in handles:
        handle.remove()
    assert len(outputs) == len(tape.calls)
    for index, (call, expected) in enumerate(zip(tape.calls, outputs, strict=True)):
        assert call.values.shape[1] == call.attention.shape[1], "values are recorded for every head"
        bias = projections[index % len(projections)].bias
        heads = (call.attention @ call.values).transpose(1, 2).flatten(2)
        rebuilt = heads @ call.output_projection.T + (0 if bias is None else bias.detach())
        assert rebuilt.shape == expected.shape
        assert (rebuilt - expected).abs().max() <= tolerance * expected.abs().max()


def test_grouped_heads_share_values():
    model = llama()
    batch = {"input_ids": torch.randint(5, 50, (1, 6))}
    tape = Recorder(ModelSession(model)).record(batch, lambda output: output.logits[:, 0], ("values", "attention"))
    for call in tape.calls:
        assert torch.equal(call.values[:, 0], call.values[:, 1]) and torch.equal(call.values[:, 2], call.values[:, 3])
        assert not torch.equal(call.values[:, 1], call.values[:, 2])
        assert not call.attention.triu(1).any(), "decoder attention is causal"
