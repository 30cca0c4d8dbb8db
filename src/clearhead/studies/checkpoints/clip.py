"""Convert OpenAI's CLIP with a vision transformer to CLIPModel."""

from typing import Any

import transformers
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.studies.checkpoints.reader import (
    CheckpointTensors,
    ConversionSettings,
    ConvertedModel,
    pop_renamed_layers,
)

_LAYER_NAMES = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def convert_clip(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert CLIP with a ViT image encoder.

    Raises:
        UnsupportedError: The image encoder is a ResNet.
    """
    if "visual.layer1.0.conv1.weight" in weights:
        raise UnsupportedError(
            "this CLIP has a ResNet image encoder, which transformers does not support: use one with a ViT"
        )
    weights.skip(r"^(input_resolution|context_length|vocab_size)$")
    vision_config = _infer_vision_config(weights, settings)
    text_config = _infer_text_config(weights, settings)
    projection_dim = weights.get_shape("text_projection")[1]
    tensors = {
        "logit_scale": weights.pop("logit_scale"),
        "text_projection.weight": weights.pop("text_projection").T.contiguous(),
        "visual_projection.weight": weights.pop("visual.proj").T.contiguous(),
        "text_model.embeddings.token_embedding.weight": weights.pop("token_embedding.weight"),
        "text_model.embeddings.position_embedding.weight": weights.pop("positional_embedding"),
        "vision_model.embeddings.class_embedding": weights.pop("visual.class_embedding"),
        "vision_model.embeddings.patch_embedding.weight": weights.pop("visual.conv1.weight"),
        "vision_model.embeddings.position_embedding.weight": weights.pop("visual.positional_embedding"),
        **pop_renamed_layers(
            weights,
            {
                "ln_final": "text_model.final_layer_norm",
                "visual.ln_pre": "vision_model.pre_layrnorm",
                "visual.ln_post": "vision_model.post_layernorm",
            },
        ),
        **_convert_tower(weights, "transformer", "text_model", text_config["num_hidden_layers"]),
        **_convert_tower(weights, "visual.transformer", "vision_model", vision_config["num_hidden_layers"]),
    }
    config = transformers.CLIPConfig(
        text_config=text_config, vision_config=vision_config, projection_dim=projection_dim
    )
    size = vision_config["image_size"]
    image_processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, resample=3
    )
    heads = {"text": text_config["num_attention_heads"], "image": vision_config["num_attention_heads"]}
    return ConvertedModel(
        "CLIPModel", config, tensors, image_processor, reads_text=True, assumptions={"num_heads": heads}
    )


def _infer_vision_config(weights: CheckpointTensors, settings: ConversionSettings) -> dict[str, Any]:
    """Infer image size, patch size and channels of the image tower from tensor shapes."""
    width, num_channels, patch_size, _ = weights.get_shape("visual.conv1.weight")
    side = round((weights.get_shape("visual.positional_embedding")[0] - 1) ** 0.5)
    return {
        **_infer_tower_config(weights, settings, "visual.transformer", width),
        "image_size": side * patch_size,
        "patch_size": patch_size,
        "num_channels": num_channels,
    }


def _infer_text_config(weights: CheckpointTensors, settings: ConversionSettings) -> dict[str, Any]:
    """Infer vocabulary and length of the text tower from tensor shapes, and its begin and end tokens."""
    vocab_size, width = weights.get_shape("token_embedding.weight")
    # the last two ids of the vocabulary are the begin and end tokens
    return {
        **_infer_tower_config(weights, settings, "transformer", width),
        "vocab_size": vocab_size,
        "max_position_embeddings": weights.get_shape("positional_embedding")[0],
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": vocab_size - 1,
    }


def _infer_tower_config(
    weights: CheckpointTensors, settings: ConversionSettings, tower: str, width: int
) -> dict[str, Any]:
    """Infer depth, heads and sizes of one tower from tensor shapes; activation and ε are those of all CLIPs."""
    escaped = tower.replace(".", r"\.")
    return {
        "hidden_size": width,
        "num_hidden_layers": weights.count_layers(rf"{escaped}\.resblocks\.(\d+)\."),
        "num_attention_heads": settings.get_num_heads(width),
        "intermediate_size": weights.get_shape(f"{tower}.resblocks.0.mlp.c_fc.weight")[0],
        "projection_dim": weights.get_shape("text_projection")[1],
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }


def _convert_tower(weights: CheckpointTensors, tower: str, new_tower: str, num_layers: int) -> dict[str, Tensor]:
    """Convert the transformer layers of one tower."""
    tensors: dict[str, Tensor] = {}
    for layer_index in range(num_layers):
        old_name = f"{tower}.resblocks.{layer_index}.attn"
        new_name = f"{new_tower}.encoder.layers.{layer_index}.self_attn"
        projection_names = [f"{new_name}.{letter}_proj" for letter in "qkv"]
        tensors |= weights.pop_fused_qkv(f"{old_name}.in_proj_weight", f"{old_name}.in_proj_bias", projection_names)
    names = {
        f"{tower}.resblocks.{{i}}.{old}": f"{new_tower}.encoder.layers.{{i}}.{new}" for old, new in _LAYER_NAMES.items()
    }
    return tensors | pop_renamed_layers(weights, names, range(num_layers))
