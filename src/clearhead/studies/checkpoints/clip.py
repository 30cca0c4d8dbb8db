"""OpenAI's CLIP with a vision transformer → CLIPModel."""

from typing import Any

import transformers
from torch import Tensor

from clearhead.errors import Refusal
from clearhead.studies.checkpoints.reader import Converted, Settings, Weights, renamed

_NAMES = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def convert(weights: Weights, settings: Settings) -> Converted:
    if "visual.layer1.0.conv1.weight" in weights:
        raise Refusal("this CLIP sees with a ResNet, which transformers does not have: take one with a ViT")
    weights.leave_out(r"^(input_resolution|context_length|vocab_size)$")
    vision, text = _vision_sizes(weights, settings), _text_sizes(weights, settings)
    projected = weights.shape("text_projection")[1]
    found = {
        "logit_scale": weights.take("logit_scale"),
        "text_projection.weight": weights.take("text_projection").T.contiguous(),
        "visual_projection.weight": weights.take("visual.proj").T.contiguous(),
        "text_model.embeddings.token_embedding.weight": weights.take("token_embedding.weight"),
        "text_model.embeddings.position_embedding.weight": weights.take("positional_embedding"),
        "vision_model.embeddings.class_embedding": weights.take("visual.class_embedding"),
        "vision_model.embeddings.patch_embedding.weight": weights.take("visual.conv1.weight"),
        "vision_model.embeddings.position_embedding.weight": weights.take("visual.positional_embedding"),
        **renamed(
            weights,
            {
                "ln_final": "text_model.final_layer_norm",
                "visual.ln_pre": "vision_model.pre_layrnorm",
                "visual.ln_post": "vision_model.post_layernorm",
            },
        ),
        **_tower(weights, "transformer", "text_model", text["num_hidden_layers"]),
        **_tower(weights, "visual.transformer", "vision_model", vision["num_hidden_layers"]),
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=projected)
    size = vision["image_size"]
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, resample=3
    )
    heads = {"text": text["num_attention_heads"], "picture": vision["num_attention_heads"]}
    return Converted("CLIPModel", config, found, images, reads_text=True, assumed={"heads": heads})


def _vision_sizes(weights: Weights, settings: Settings) -> dict[str, Any]:
    width, channels, patch, _ = weights.shape("visual.conv1.weight")
    side = round((weights.shape("visual.positional_embedding")[0] - 1) ** 0.5)
    return {
        **_sizes(weights, settings, "visual.transformer", width),
        "image_size": side * patch,
        "patch_size": patch,
        "num_channels": channels,
    }


def _text_sizes(weights: Weights, settings: Settings) -> dict[str, Any]:
    words, width = weights.shape("token_embedding.weight")
    # The last two numbers of its vocabulary begin and end a text.
    return {
        **_sizes(weights, settings, "transformer", width),
        "vocab_size": words,
        "max_position_embeddings": weights.shape("positional_embedding")[0],
        "bos_token_id": words - 2,
        "eos_token_id": words - 1,
        "pad_token_id": words - 1,
    }


def _sizes(weights: Weights, settings: Settings, tower: str, width: int) -> dict[str, Any]:
    escaped = tower.replace(".", r"\.")
    return {
        "hidden_size": width,
        "num_hidden_layers": weights.count(rf"{escaped}\.resblocks\.(\d+)\."),
        "num_attention_heads": settings.head_count(width),
        "intermediate_size": weights.shape(f"{tower}.resblocks.0.mlp.c_fc.weight")[0],
        "projection_dim": weights.shape("text_projection")[1],
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }


def _tower(weights: Weights, tower: str, to: str, layers: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i in range(layers):
        old, new = f"{tower}.resblocks.{i}.attn", f"{to}.encoder.layers.{i}.self_attn"
        parts = [f"{new}.{part}_proj" for part in "qkv"]
        found |= weights.take_thirds(f"{old}.in_proj_weight", f"{old}.in_proj_bias", parts)
    names = {f"{tower}.resblocks.{{i}}.{old}": f"{to}.encoder.layers.{{i}}.{new}" for old, new in _NAMES.items()}
    return found | renamed(weights, names, range(layers))
