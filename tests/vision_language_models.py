"""Tiny image–text decoders made from configurations, their processors where they can be made, and inputs for them."""

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
#: What some processors put around a picture.
_AROUND = ("<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>")
_TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.3},
}
_TOWER = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    **{"image_size": 16, "patch_size": 4, "initializer_range": 0.3},
}
_ROWS = {
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
    made = copy.deepcopy(models.tokenizer("bytes"))
    made.add_special_tokens({"additional_special_tokens": [IMAGE, *_AROUND], "bos_token": "<s>", "eos_token": "</s>"})
    return made


def image_id() -> int:
    return int(tokenizer().convert_tokens_to_ids(IMAGE))


def _parts(kind: str) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The class, and the configurations of decoder, tower and whole."""
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
        "qwen2": ("Qwen2VL", {**_TEXT, **_ROPE}, {**_ROWS, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, {}),
        "qwen2.5": ("Qwen2_5_VL", {**_TEXT, **_ROPE}, {**_ROWS, "window_size": 16, "fullatt_block_indexes": [1]}, {}),
        "qwen3": (
            "Qwen3VL",
            {**_TEXT, **_ROPE},
            {**_ROWS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {},
        ),
        "glm4v": ("Glm4v", glm, _ROWS, {}),
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
        "glm46v": ("Glm46V", {"model_type": "glm4v_text", **glm}, {"model_type": "glm4v_vision", **_ROWS}, {}),
        "glm_ocr": ("GlmOcr", glm, _ROWS, {}),
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
ROWS = ("qwen2", "qwen2.5", "qwen3", "glm4v", "glm46v", "glm_ocr")


@cache
def model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    name, text, tower, whole = _parts(kind)
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    known = tokenizer()
    ids = {"pad_token_id": known.pad_token_id, "bos_token_id": known.bos_token_id, "eos_token_id": known.eos_token_id}
    special = {"image_token_id": image_id(), "image_token_index": image_id(), "video_token_id": len(known) + 1}
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, **ids, "vocab_size": len(known) + 4}, vision_config=tower, **special, **whole
    )
    torch.manual_seed(3)
    made = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in made.parameters():  # far from uniform attention, and no tower that is born blind
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
        # a model that knows what it does says no pictures; these shall not end after a word, either
        made.get_output_embeddings().weight[[image_id(), known.eos_token_id]] = 0
    return made.to(dtype).eval()


@cache
def explainer(kind: str) -> clearhead.Explainer:
    return clearhead.load(model(kind), tokenizer())


def pixels(kind: str, seed: int = 0) -> tuple[dict[str, Tensor], int]:
    """A picture as the model takes it (a batch of one), and how many tokens hold its place."""
    own = torch.Generator().manual_seed(seed)
    picture = torch.randn(1, 3, 16, 16, generator=own)
    match kind:
        case kind if kind in ROWS:
            return {"pixel_values": torch.randn(32, 96, generator=own), "image_grid_thw": torch.tensor([[1, 4, 8]])}, 8
        case "idefics3" | "smolvlm":
            return {"pixel_values": picture[:, None]}, 4
        case "idefics2":
            return {"pixel_values": picture[:, None]}, 5
        case "pixtral":
            return {"pixel_values": picture, "image_sizes": torch.tensor([[16, 12]])}, 12
        case "mistral3" | "lighton":
            return {"pixel_values": picture, "image_sizes": torch.tensor([[16, 8]])}, 2
        case "gemma3" | "internvl" | "aya" | "cohere2":
            return {"pixel_values": picture}, 4
        case _:
            return {"pixel_values": picture}, 17 if kind == "llava-full" else 16


BEFORE, AFTER = ("I like ", "", "She hates the"), (" the movie.", "So boring!", " book")


def inputs(kind: str, which: int = 0) -> dict[str, Tensor]:
    """Model inputs with a picture in a text, made by hand."""
    picture, count = pixels(kind, which)
    ids = [
        *tokenizer()(BEFORE[which], add_special_tokens=False)["input_ids"],
        *[image_id()] * count,
        *tokenizer()(AFTER[which], add_special_tokens=False)["input_ids"],
    ]
    row = torch.tensor([ids])
    types = {"paligemma": torch.zeros_like(row), "gemma3": (row == image_id()).long()}
    return {"input_ids": row, **({"token_type_ids": types[kind]} if kind in types else {}), **picture}


def called(kind: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs as the untouched model is called with."""
    exact = {name: part.double() if part.is_floating_point() else part for name, part in given.items()}
    if kind in ROWS:
        exact["mm_token_type_ids"] = (exact["input_ids"] == image_id()).int()
    return exact


def answered(kind: str, given: dict[str, Tensor], answer: Sequence[int]) -> dict[str, Tensor]:
    """The inputs with words after them, made without clearhead."""
    more = torch.tensor([list(answer)])
    grown = {"input_ids": torch.cat([given["input_ids"], more], 1)}
    if "token_type_ids" in given:
        grown["token_type_ids"] = torch.cat(
            [given["token_type_ids"], torch.full_like(more, int(kind == "paligemma"))], 1
        )
    return {**given, **grown}


def picture(seed: int = 0, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}{% if add_generation_prompt %}said:{% endif %}"
)


def _pictures(kind: str, **how: Any) -> Any:
    """An image processor that needs no torchvision: it has a name of its own since transformers' plain one does."""
    name = f"{kind}ImageProcessor"
    return getattr(transformers, f"{name}Pil", getattr(transformers, name))(**how)


@cache
def processor(kind: str) -> Any:
    if kind == "llava":
        pictures = _pictures("CLIP", size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        how = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(pictures, copy.deepcopy(tokenizer()), chat_template=TEMPLATE, **how)
    if kind == "paligemma":
        pictures = _pictures("Siglip", size={"height": 16, "width": 16})
        pictures.image_seq_length = 16
        return transformers.PaliGemmaProcessor(pictures, _knowing(image_token=IMAGE))
    if kind == "gemma3":
        pictures = _pictures("Gemma3", size={"height": 16, "width": 16})
        known = _knowing(image_token=IMAGE, boi_token="<boi>", eoi_token="<eoi>")
        return transformers.Gemma3Processor(pictures, known, image_seq_length=4)
    if kind == "idefics3":
        size = {"longest_edge": 16}
        pictures = _pictures("Idefics3", do_image_splitting=False, size=size, max_image_size=size)
        known = _knowing(image_token=IMAGE, fake_image_token=_AROUND[2], global_image_token=_AROUND[3])
        return transformers.Idefics3Processor(pictures, known, image_seq_len=4)
    return RowsProcessor()


def _knowing(**marks: str) -> Any:
    """A tokenizer that has names for the marks around a picture."""
    made = copy.deepcopy(tokenizer())
    for name, mark in marks.items():
        setattr(made, name, mark)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(mark))
    return made


class RowsProcessor:
    """Qwen2-VL's processor; transformers' own needs torchvision for films."""

    image_token = IMAGE

    def __init__(self) -> None:
        self.tokenizer = copy.deepcopy(tokenizer())
        self.image_processor = _pictures(
            "Qwen2VL",
            patch_size=4,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 64, "longest_edge": 4096},
        )

    def __call__(self, text: list[str], images: list[Any], return_tensors: str, **how: Any) -> dict[str, Any]:
        made = self.image_processor(images=images, return_tensors=return_tensors)
        count = int(made["image_grid_thw"][0].prod()) // 4
        whole = [one.replace(IMAGE, IMAGE * count) for one in text]
        return {**self.tokenizer(whole, return_tensors=return_tensors, **how), **made}
