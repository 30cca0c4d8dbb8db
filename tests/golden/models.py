"""Tiny models with golden scores, and the inputs of each.

Weights are drawn with numpy from the name of each parameter: they depend neither on the initialisation of transformers
nor on the random numbers of torch.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import clearhead
from tests import custom_models, dual_models, joint_models, models, vision_language_models

#: Relative to the largest score. Some models compute their softmax or their norms in float32, whatever their dtype;
#: ViT, Swin and CLIP do so in their eager attention.
FLOAT64 = 1e-9
FLOAT32_INSIDE = 1e-6

#: With this seed almost no method with a clamp has scores that are all zero.
_SEED = 4
_TEXTS = ["She hates the book because it isn't good", "So boring!"]
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_TOKEN_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class GoldenModel:
    """A model with its inputs: `build` returns the arguments of `clearhead.load`, `arguments` those of `explain`."""

    build: Callable[[], tuple[Any, ...]]
    arguments: Callable[[], dict[str, Any]]
    tolerance: float = FLOAT64
    readout: str | None = None


def build_model(name: str) -> tuple[Any, ...]:
    """Build a golden model with its golden weights; return it and its processor, if it has one."""
    model, *processor = GOLDEN_MODELS[name].build()
    fill_weights(model)
    return model, *processor


def load_explainer(name: str, model: Any, *processor: Any) -> clearhead.Explainer:
    """Load a golden model that `build_model` returned."""
    readout = GOLDEN_MODELS[name].readout
    return clearhead.load(model, *processor, **({"readout": readout} if readout else {}))


@cache
def get_explainer(name: str) -> clearhead.Explainer:
    """Return the cached explainer of a golden model."""
    return load_explainer(name, *build_model(name))


def fill_weights(model: nn.Module) -> None:
    """Replace every parameter by random numbers that depend only on its name and shape.

    Args:
        model: Its weight matrices get a gain of 1.5 and at most a standard deviation of 0.3, so that attention is far
            from uniform; the weights of norms are near one; scalars stay as configured.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                continue
            generator = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
            noise = generator.standard_normal(tuple(parameter.shape))
            if parameter.dim() > 1:
                values = min(0.3, 1.5 / (parameter.numel() / len(parameter)) ** 0.5) * noise
            else:
                values = 0.1 * noise + float(name.endswith("weight"))
            parameter.copy_(torch.from_numpy(values))
    model.double().eval()


def _build_text_model(name: str, head: str, **settings: Any) -> tuple[Any, ...]:
    return models.text_model(name, head, **settings)


def _build_decoder(class_name: str, **settings: Any) -> tuple[Any, ...]:
    model_class = getattr(transformers, class_name)
    tokenizer = models.tokenizer("bytes")
    config = model_class.config_class(**_TOKEN_IDS, vocab_size=len(tokenizer), **settings)
    return model_class(config), tokenizer


def _build_gpt2() -> tuple[Any, ...]:
    return _build_decoder("GPT2LMHeadModel", n_embd=32, n_layer=3, n_head=4, n_positions=70)


def _build_llama() -> tuple[Any, ...]:
    sizes = {**_LAYERS, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 70}
    return _build_decoder("LlamaForCausalLM", **sizes)


def _build_bart() -> tuple[Any, ...]:
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_start_token_id": 2}
    return _build_decoder("BartForConditionalGeneration", **encoder, **decoder, d_model=32, max_position_embeddings=70)


def _build_detr() -> tuple[Any, ...]:
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    config = transformers.DetrConfig(
        backbone_config=transformers.ResNetConfig(**stages, out_features=["stage4"]),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        id2label={0: "circle", 1: "square", 2: "star"},
    )
    return (transformers.DetrForObjectDetection(config),)


def _build_audio_model() -> tuple[Any, ...]:
    patches = {"patch_size": 4, "frequency_stride": 3, "time_stride": 3, "max_length": 18, "num_mel_bins": 11}
    config = transformers.ASTConfig(
        **{**_LAYERS, "num_hidden_layers": 2}, intermediate_size=32, **patches, num_labels=3
    )
    return (transformers.ASTForAudioClassification(config),)


def _build_deep_image_model(name: str) -> tuple[Any, ...]:
    return models.image_model(name, num_hidden_layers=12)


def _build_own_model(name: str) -> tuple[Any, ...]:
    return custom_models.made(name), custom_models.CASES[name].reader()


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def _draw_images(count: int, size: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8) for seed in range(count)]


def _draw_one_image() -> dict[str, Any]:
    return {"inputs": _draw_images(1, 16)}


GOLDEN_MODELS: dict[str, GoldenModel] = {
    "bert-classifier": GoldenModel(
        lambda: _build_text_model("bert", "ForSequenceClassification"), lambda: {"inputs": _TEXTS}
    ),
    "deberta-classifier": GoldenModel(
        lambda: _build_text_model("deberta", "ForSequenceClassification"), lambda: {"inputs": _TEXTS}
    ),
    "bert-masked-lm": GoldenModel(
        lambda: _build_text_model("bert", "ForMaskedLM"),
        lambda: {"inputs": ["She [MASK] the book because it isn't good", "So [MASK]!"]},
    ),
    "bert-token-labels": GoldenModel(
        lambda: _build_text_model("bert", "ForTokenClassification"), lambda: {"inputs": ["I like the movie."]}
    ),
    "bert-question-answering": GoldenModel(
        lambda: _build_text_model("bert", "ForQuestionAnswering", num_labels=2),
        lambda: {"inputs": [("What is boring?", "She hates the book because it is so long")]},
    ),
    "vit-classifier": GoldenModel(
        lambda: models.image_model("vit"), lambda: {"inputs": _draw_images(2, 16)}, FLOAT32_INSIDE
    ),
    "vit-12-layers": GoldenModel(lambda: _build_deep_image_model("vit"), _draw_one_image, FLOAT32_INSIDE),
    "beit-12-layers": GoldenModel(lambda: _build_deep_image_model("beit"), _draw_one_image, FLOAT32_INSIDE),
    "dinov2-12-layers": GoldenModel(lambda: _build_deep_image_model("dinov2"), _draw_one_image, FLOAT32_INSIDE),
    "swin-classifier": GoldenModel(
        lambda: models.image_model("swin"), lambda: {"inputs": _draw_images(2, 16)}, FLOAT32_INSIDE
    ),
    "audio-classifier": GoldenModel(
        _build_audio_model, lambda: {"inputs": {"input_values": _draw(1, 18, 11)}}, FLOAT32_INSIDE
    ),
    "gpt2": GoldenModel(
        _build_gpt2,
        lambda: {"inputs": ["She hates the book because", "So"], "answer": [" it is long", " boring!"]},
    ),
    "llama": GoldenModel(_build_llama, lambda: {"inputs": _TEXTS}, FLOAT32_INSIDE),
    "bart": GoldenModel(
        _build_bart, lambda: {"inputs": ["I like the movie", "So"], "answer": ["and the book", "boring!"]}
    ),
    "clip": GoldenModel(
        lambda: (dual_models.model("clip"), dual_models.processor("clip")),
        lambda: {"text": _TEXTS, "image": _draw_images(2, 16)},
        FLOAT32_INSIDE,
    ),
    "lxmert": GoldenModel(joint_models.lxmert, lambda: joint_models.together(joint_models.inputs("lxmert")[:2])),
    "visual-bert": GoldenModel(
        joint_models.visual_bert, lambda: joint_models.together(joint_models.inputs("visual_bert")[:2])
    ),
    "vilt": GoldenModel(joint_models.vilt, lambda: joint_models.together(joint_models.inputs("vilt")[:2])),
    "detr": GoldenModel(_build_detr, lambda: {"inputs": {"pixel_values": _draw(1, 3, 96, 128)}}),
    "llava": GoldenModel(
        lambda: (vision_language_models.model("llava"), vision_language_models.tokenizer()),
        lambda: {"inputs": {**vision_language_models.inputs("llava"), "pixel_values": _draw(1, 3, 16, 16)}},
        FLOAT32_INSIDE,
    ),
    "own-vit": GoldenModel(
        lambda: _build_own_model("vit, class token"), lambda: {"inputs": [_draw(3, 16, 12, seed=s) for s in range(2)]}
    ),
    "own-encoder": GoldenModel(
        lambda: _build_own_model("nn.TransformerEncoder"), lambda: {"inputs": custom_models.TEXTS}, readout="mean"
    ),
}
