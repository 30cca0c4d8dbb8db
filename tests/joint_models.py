"""Tiny models that read a text and an image or its regions, built from configs, and inputs for them."""

from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import clearhead
from tests import models

TEXTS = ["I like the movie.", "She hates the book because it isn't good", "So boring!"]
_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.3}
_PICTURE = {"image_size": 32, "patch_size": 8}
FEATURES = 6


def make_text_settings(tokenizer: Any) -> dict[str, Any]:
    return {**_LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 40}


def build_model(cls: Any, config: Any, dtype: torch.dtype, spread: bool = False) -> Any:
    torch.manual_seed(7)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # without biases a norm after a linear map has no gradient along its input
                parameter += 0.1 * torch.randn(parameter.shape)
            elif spread and parameter.dim() == 2:  # the default weights are so small that attention is uniform
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def lxmert(
    cls: str = "LxmertForQuestionAnswering",
    dtype: torch.dtype = torch.float64,
    layers: tuple[int, int, int] = (2, 1, 2),
    **overrides: Any,
) -> Any:
    """`layers`: the number of text, region and cross-modal layers."""
    tokenizer = models.tokenizer("wordpiece")
    counts = dict(zip(("l_layers", "r_layers", "x_layers"), layers, strict=True))
    config = transformers.LxmertConfig(
        **make_text_settings(tokenizer), **counts, visual_feat_dim=FEATURES, num_qa_labels=4, **overrides
    )
    return build_model(getattr(transformers, cls), config, dtype), tokenizer


def visual_bert(
    cls: str = "VisualBertForQuestionAnswering", dtype: torch.dtype = torch.float64, **overrides: Any
) -> Any:
    tokenizer = models.tokenizer("wordpiece")
    settings = {"num_hidden_layers": 3, "visual_embedding_dim": FEATURES, "num_labels": 4, "pad_token_id": 0}
    config = transformers.VisualBertConfig(**{**make_text_settings(tokenizer), **settings, **overrides})
    return build_model(getattr(transformers, cls), config, dtype), tokenizer


def vilt(cls: str = "ViltForQuestionAnswering", dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    tokenizer = models.tokenizer("wordpiece")
    settings = {"num_hidden_layers": 3, "num_labels": 4, "pad_token_id": 0, "max_image_length": -1}
    config = transformers.ViltConfig(**{**make_text_settings(tokenizer), **_PICTURE, **settings, **overrides})
    model = build_model(getattr(transformers, cls), config, dtype)
    with torch.no_grad():  # zero by default, which would make patches differ by pixels only
        for parameter in (
            get_vilt_module(model).embeddings.position_embeddings,
            get_vilt_module(model).embeddings.cls_token,
        ):
            parameter.copy_(torch.linspace(-3, 3, parameter.numel()).sin().reshape(parameter.shape))
    image_processor = transformers.ViltImageProcessor(size={"shortest_edge": 32}, size_divisor=8)
    return model, transformers.ViltProcessor(image_processor, tokenizer)


def get_vilt_module(model: Any) -> Any:
    return getattr(model, "vilt", model)


def blip(cls: str = "BlipForImageTextRetrieval", dtype: torch.dtype = torch.float64) -> Any:
    tokenizer = models.tokenizer("wordpiece")
    ids = {"pad_token_id": 0, "bos_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    text = {**make_text_settings(tokenizer), **ids, "num_hidden_layers": 2, "encoder_hidden_size": 32}
    vision = {**_LAYERS, **_PICTURE, "num_hidden_layers": 2}
    config = transformers.BlipConfig(text_config=text, vision_config=vision, image_text_hidden_size=16)
    image_processor = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    return build_model(getattr(transformers, cls), config, dtype), transformers.BlipProcessor(
        image_processor, tokenizer
    )


def bridge_tower(cls: str = "BridgeTowerForImageAndTextRetrieval", dtype: torch.dtype = torch.float64) -> Any:
    tokenizer = models.tokenizer("bytes")
    wide = {"hidden_size": 64, "num_hidden_layers": 3}
    text = {**make_text_settings(tokenizer), **wide, "pad_token_id": tokenizer.pad_token_id}
    text.pop("initializer_range")
    config = transformers.BridgeTowerConfig(
        hidden_size=64,
        num_hidden_layers=2,
        text_config=text,
        vision_config={**wide, **_PICTURE},
        contrastive_hidden_size=8,
        logit_scale_init_value=1.0,
    )
    image_processor = transformers.BridgeTowerImageProcessor(
        size={"shortest_edge": 32}, crop_size={"shortest_edge": 32}, size_divisor=8
    )
    model = build_model(getattr(transformers, cls), config, dtype, spread=True)
    return model, transformers.BridgeTowerProcessor(image_processor, tokenizer)


MAKERS = {"lxmert": lxmert, "visual_bert": visual_bert, "vilt": vilt, "blip": blip, "bridge_tower": bridge_tower}
REGIONS = ("lxmert", "visual_bert")


@cache
def explainer(name: str) -> clearhead.Explainer:
    return clearhead.load(MAKERS[name]())


def make_image(seed: int = 0, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def regions(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random features, and boxes as fractions of the image."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.random((count, 2, 2)), axis=1)
    return rng.normal(size=(count, FEATURES)), corners.reshape(count, 4)


def inputs(name: str) -> list[dict[str, Any]]:
    """Three inputs for `explain`: texts of different lengths, with images or different numbers of regions."""
    if name in REGIONS:
        return [{"text": text, "regions": regions(count, count)} for text, count in zip(TEXTS, (4, 2, 3), strict=True)]
    return [{"text": text, "image": make_image(seed)} for seed, text in enumerate(TEXTS)]


def together(examples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [example[key] for example in examples] for key in examples[0]}


def model_inputs(name: str, given: dict[str, Any]) -> dict[str, Tensor]:
    """Convert one input to model inputs, without clearhead."""
    _, processor = MAKERS[name]()
    tokenizer = getattr(processor, "tokenizer", processor)
    encoding = dict(tokenizer(given["text"], return_tensors="pt"))
    if name in ("blip", "bridge_tower"):
        encoding.pop("token_type_ids", None)
    if name not in REGIONS:
        pixels = processor(images=given["image"], text="a", return_tensors="pt")["pixel_values"]
        return {**encoding, "pixel_values": pixels.double()}
    features, boxes = (torch.as_tensor(array)[None] for array in given["regions"])
    return {
        **encoding,
        **({"visual_feats": features, "visual_pos": boxes} if name == "lxmert" else {"visual_embeds": features}),
    }
