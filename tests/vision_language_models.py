"""Tiny image–text decoders built from configs, their processors where possible, and inputs for them."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import clearhead
from tests import models

IMAGE = "<image>"
#: Tokens that some processors put around an image.
_IMAGE_MARKERS = ("<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>")
_TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.3},
}
_TOWER = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    **{"image_size": 16, "patch_size": 4, "initializer_range": 0.3},
}
_PATCH_ROWS = {
    **{"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 2},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 16},
}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_PERCEIVER = {
    **{"hidden_size": 32, "resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 2},
    **{"resampler_head_dim": 8, "num_key_value_heads": 1},
}


@cache
def tokenizer() -> Any:
    result = copy.deepcopy(models.tokenizer("bytes"))
    result.add_special_tokens(
        {"additional_special_tokens": [IMAGE, *_IMAGE_MARKERS], "bos_token": "<s>", "eos_token": "</s>"}
    )
    return result


def get_image_token_id() -> int:
    return int(tokenizer().convert_tokens_to_ids(IMAGE))


def get_class_and_configs(kind: str) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the class and the config arguments of decoder, vision tower and model."""
    clip, siglip, pixtral = (
        {**_TOWER, "model_type": f"{tower}"} for tower in ("clip_vision_model", "siglip_vision_model", "pixtral")
    )
    llama, mistral = ({**_TEXT, "model_type": name} for name in ("llama", "mistral"))
    glm = {**_TEXT, "rope_parameters": {**_ROPE["rope_parameters"], "mrope_section": [2, 1, 1]}}
    table: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "llava": ("Llava", llama, clip, {}),
        "llava-full": ("Llava", llama, clip, {"vision_feature_select_strategy": "full"}),
        "pixtral": (
            "Llava",
            mistral,
            {**pixtral, "head_dim": 8},
            {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        ),
        "vipllava": ("VipLlava", llama, clip, {"vision_feature_layers": [-2, -1]}),
        "paligemma": ("PaliGemma", {**_TEXT, "model_type": "gemma"}, siglip, {"projection_dim": 32}),
        "gemma3": ("Gemma3", {**_TEXT, "sliding_window": 8}, siglip, {"mm_tokens_per_image": 4}),
        "qwen2": (
            "Qwen2VL",
            {**_TEXT, **_ROPE},
            {**_PATCH_ROWS, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            {},
        ),
        "qwen2.5": (
            "Qwen2_5_VL",
            {**_TEXT, **_ROPE},
            {**_PATCH_ROWS, "window_size": 16, "fullatt_block_indexes": [1]},
            {},
        ),
        "qwen3": (
            "Qwen3VL",
            {**_TEXT, **_ROPE},
            {**_PATCH_ROWS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {},
        ),
        "glm4v": ("Glm4v", glm, _PATCH_ROWS, {}),
        "idefics3": ("Idefics3", llama, _TOWER, {"scale_factor": 2}),
        "smolvlm": ("SmolVLM", llama, _TOWER, {"scale_factor": 2}),
        "idefics2": ("Idefics2", mistral, _TOWER, {"perceiver_config": _PERCEIVER}),
        "internvl": (
            "InternVL",
            {**_TEXT, "model_type": "qwen2"},
            {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            {"downsample_ratio": 0.5},
        ),
        "mistral3": ("Mistral3", mistral, {**pixtral, "head_dim": 8}, {"spatial_merge_size": 2}),
        "lighton": (
            "LightOnOcr",
            {**_TEXT, "model_type": "qwen3"},
            {**pixtral, "head_dim": 8},
            {"spatial_merge_size": 2},
        ),
        "deepseek": ("DeepseekVL", llama, siglip, {}),
        "glm46v": ("Glm46V", {"model_type": "glm4v_text", **glm}, {"model_type": "glm4v_vision", **_PATCH_ROWS}, {}),
        "glm_ocr": ("GlmOcr", glm, _PATCH_ROWS, {}),
        "aya": ("AyaVision", {**_TEXT, "model_type": "cohere2"}, siglip, {"downsample_factor": 2}),
        "cohere2": (
            "Cohere2Vision",
            {**_TEXT, "model_type": "cohere2"},
            siglip,
            {"downsample_factor": 2, "alignment_intermediate_size": 24},
        ),
    }
    return table[kind]


KINDS = (
    *("llava", "llava-full", "pixtral", "vipllava", "paligemma", "gemma3", "qwen2", "qwen2.5", "qwen3", "glm4v"),
    *("idefics3", "smolvlm", "idefics2", "internvl", "mistral3", "aya", "cohere2"),
    *("lighton", "deepseek", "glm46v", "glm_ocr"),
)
PATCH_ROW_KINDS = ("qwen2", "qwen2.5", "qwen3", "glm4v", "glm46v", "glm_ocr")


@cache
def model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    name, text, tower, settings = get_class_and_configs(kind)
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    known = tokenizer()
    ids = {"pad_token_id": known.pad_token_id, "bos_token_id": known.bos_token_id, "eos_token_id": known.eos_token_id}
    special = {
        "image_token_id": get_image_token_id(),
        "image_token_index": get_image_token_id(),
        "video_token_id": len(known) + 1,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, **ids, "vocab_size": len(known) + 4}, vision_config=tower, **special, **settings
    )
    torch.manual_seed(3)
    decoder = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in decoder.parameters():  # large weights: attention is not uniform and no tower is constant
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
        # never generate an image token or an early end
        decoder.get_output_embeddings().weight[[get_image_token_id(), known.eos_token_id]] = 0
    return decoder.to(dtype).eval()


@cache
def explainer(kind: str) -> clearhead.Explainer:
    return clearhead.load(model(kind), tokenizer())


def make_pixel_inputs(kind: str, seed: int = 0) -> tuple[dict[str, Tensor], int]:
    """Return an image as model inputs (a batch of one), and the number of its image tokens."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, 16, 16, generator=generator)
    match kind:
        case kind if kind in PATCH_ROW_KINDS:
            return {
                "pixel_values": torch.randn(32, 96, generator=generator),
                "image_grid_thw": torch.tensor([[1, 4, 8]]),
            }, 8
        case "idefics3" | "smolvlm":
            return {"pixel_values": image[:, None]}, 4
        case "idefics2":
            return {"pixel_values": image[:, None]}, 5
        case "pixtral":
            return {"pixel_values": image, "image_sizes": torch.tensor([[16, 12]])}, 12
        case "mistral3" | "lighton":
            return {"pixel_values": image, "image_sizes": torch.tensor([[16, 8]])}, 2
        case "gemma3" | "internvl" | "aya" | "cohere2":
            return {"pixel_values": image}, 4
        case _:
            return {"pixel_values": image}, 17 if kind == "llava-full" else 16


TEXT_BEFORE, TEXT_AFTER = ("I like ", "", "She hates the"), (" the movie.", "So boring!", " book")


def inputs(kind: str, which: int = 0) -> dict[str, Tensor]:
    """Build the model inputs of a text with an image, without a processor."""
    pixel_inputs, count = make_pixel_inputs(kind, which)
    ids = [
        *tokenizer()(TEXT_BEFORE[which], add_special_tokens=False)["input_ids"],
        *[get_image_token_id()] * count,
        *tokenizer()(TEXT_AFTER[which], add_special_tokens=False)["input_ids"],
    ]
    row = torch.tensor([ids])
    types = {"paligemma": torch.zeros_like(row), "gemma3": (row == get_image_token_id()).long()}
    return {"input_ids": row, **({"token_type_ids": types[kind]} if kind in types else {}), **pixel_inputs}


def prepare_model_inputs(kind: str, model_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert inputs to those of the model's own forward pass."""
    result = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in model_inputs.items()}
    if kind in PATCH_ROW_KINDS:
        result["mm_token_type_ids"] = (result["input_ids"] == get_image_token_id()).int()
    return result


def append_tokens(kind: str, model_inputs: dict[str, Tensor], token_ids: Sequence[int]) -> dict[str, Tensor]:
    """Append tokens to the inputs, without clearhead."""
    appended = torch.tensor([list(token_ids)])
    extended = {"input_ids": torch.cat([model_inputs["input_ids"], appended], 1)}
    if "token_type_ids" in model_inputs:
        extended["token_type_ids"] = torch.cat(
            [model_inputs["token_type_ids"], torch.full_like(appended, int(kind == "paligemma"))], 1
        )
    return {**model_inputs, **extended}


def make_image(seed: int = 0, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}{% if add_generation_prompt %}said:{% endif %}"
)


def make_image_processor(kind: str, **arguments: Any) -> Any:
    """Build an image processor that needs no torchvision; newer transformers call it …Pil."""
    name = f"{kind}ImageProcessor"
    return getattr(transformers, f"{name}Pil", getattr(transformers, name))(**arguments)


@cache
def processor(kind: str) -> Any:
    if kind == "llava":
        image_processor = make_image_processor(
            "CLIP", size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        )
        settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(
            image_processor, copy.deepcopy(tokenizer()), chat_template=TEMPLATE, **settings
        )
    if kind == "paligemma":
        image_processor = make_image_processor("Siglip", size={"height": 16, "width": 16})
        image_processor.image_seq_length = 16
        return transformers.PaliGemmaProcessor(image_processor, make_tokenizer_with(image_token=IMAGE))
    if kind == "gemma3":
        image_processor = make_image_processor("Gemma3", size={"height": 16, "width": 16})
        extended_tokenizer = make_tokenizer_with(image_token=IMAGE, boi_token="<boi>", eoi_token="<eoi>")
        return transformers.Gemma3Processor(image_processor, extended_tokenizer, image_seq_length=4)
    if kind == "idefics3":
        size = {"longest_edge": 16}
        image_processor = make_image_processor("Idefics3", do_image_splitting=False, size=size, max_image_size=size)
        extended_tokenizer = make_tokenizer_with(
            image_token=IMAGE, fake_image_token=_IMAGE_MARKERS[2], global_image_token=_IMAGE_MARKERS[3]
        )
        return transformers.Idefics3Processor(image_processor, extended_tokenizer, image_seq_len=4)
    return RowsProcessor()


def make_tokenizer_with(**tokens: str) -> Any:
    """Return a tokenizer with attributes for the tokens around an image."""
    result = copy.deepcopy(tokenizer())
    for name, token in tokens.items():
        setattr(result, name, token)
        setattr(result, f"{name}_id", result.convert_tokens_to_ids(token))
    return result


class RowsProcessor:
    """A replacement for the Qwen2-VL processor of transformers, which needs torchvision for videos."""

    image_token = IMAGE

    def __init__(self) -> None:
        self.tokenizer = copy.deepcopy(tokenizer())
        self.image_processor = make_image_processor(
            "Qwen2VL",
            patch_size=4,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 64, "longest_edge": 4096},
        )

    def __call__(self, text: list[str], images: list[Any], return_tensors: str, **kwargs: Any) -> dict[str, Any]:
        features = self.image_processor(images=images, return_tensors=return_tensors)
        count = int(features["image_grid_thw"][0].prod()) // 4
        expanded = [t.replace(IMAGE, IMAGE * count) for t in text]
        return {**self.tokenizer(expanded, return_tensors=return_tensors, **kwargs), **features}
