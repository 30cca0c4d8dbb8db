"""Tiny dual encoders of every family, built from configs, and inputs for them."""

from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

import clearhead
from tests import models

TEXTS = ["I like the movie.", "She hates the book because it isn't good", "So boring!"]
_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
_VISION = {**_LAYERS, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
#: Class, tokenizer, and additional settings of the text config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": ("CLIP", "wordpiece", {}),
    "metaclip_2": ("MetaClip2", "wordpiece", {}),
    "altclip": ("AltCLIP", "bytes", {"project_dim": 20, "type_vocab_size": 1}),
    "chinese_clip": ("ChineseCLIP", "wordpiece", {}),
    "siglip": ("Siglip", "bytes", {"max_position_embeddings": 24, "projection_size": 32}),
    "siglip2": ("Siglip2", "bytes", {"max_position_embeddings": 24, "projection_size": 32}),
}
NAMES = (*FAMILIES, "vision_text")


def text_config(kind: str, **overrides: Any) -> dict[str, Any]:
    tokenizer = models.tokenizer(kind)
    ids = {"pad": tokenizer.pad_token_id, "bos": tokenizer.cls_token_id, "eos": tokenizer.sep_token_id}
    shared = {**_LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 70}
    return {**shared, **{f"{name}_token_id": number for name, number in ids.items()}, **overrides}


def build_model(make: Any, *args: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(7)
    model = make(*args)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are zero by default
                parameter += 0.1 * torch.randn(parameter.shape)
            elif parameter.dim() > 1:  # the default weights are so small that attention is uniform
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def model(name: str, dtype: torch.dtype = torch.float64, text: dict[str, Any] | None = None) -> Any:
    """A tiny dual encoder."""
    if name == "vision_text":
        parts = transformers.ViTConfig(**_VISION), transformers.BertConfig(**text_config("wordpiece"))
        config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*parts, projection_dim=24)
        return build_model(transformers.VisionTextDualEncoderModel, config, dtype=dtype)
    family, tokenizer_kind, text_settings = FAMILIES[name]
    vision = {**_VISION, "num_patches": 16} if name == "siglip2" else _VISION
    texts = {**text_config(tokenizer_kind, **text_settings), **(text or {})}
    shared = {"text_config": texts, "vision_config": vision, "projection_dim": 24}
    config = getattr(transformers, f"{family}Config")(**shared)
    return build_model(getattr(transformers, f"{family}Model"), config, dtype=dtype)


def processor(name: str) -> Any:
    """Combine tokenizer and image processor, as in a model from the hub."""
    tokenizer = models.tokenizer("wordpiece" if name == "vision_text" else FAMILIES[name][1])
    if name == "siglip2":
        image_processor = transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=16)
        return transformers.Siglip2Processor(image_processor, tokenizer)
    image_processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    return transformers.VisionTextDualEncoderProcessor(image_processor, tokenizer)


@cache
def explainer(name: str) -> clearhead.Explainer:
    return clearhead.load(model(name), processor(name))


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, (20, 20, 3), dtype=np.uint8) for _ in TEXTS]


def clap() -> Any:
    """A text tower with an audio tower, which attends in shifted windows."""
    sizes = {"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4]}
    depth = {"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2}
    audio = {**sizes, **depth, "patch_embeds_hidden_size": 16, "hidden_size": 32, "projection_dim": 24}
    text = text_config("bytes", projection_dim=24)
    return build_model(
        transformers.ClapModel, transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=24)
    )
