"""Convert the authors' DETR to DetrForObjectDetection, with the ResNet of transformers (timm is not needed)."""

import re
from typing import Any

import transformers
from torch import Tensor

from clearhead.studies.checkpoints.reader import (
    CheckpointTensors,
    ConversionSettings,
    ConvertedModel,
    pop_renamed_layers,
)

_NUM_HEADS = 8
_RESNET_PREFIX = "model.backbone.conv_encoder.model"
_ENCODER_NAMES = {
    "self_attn.out_proj": "self_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
    "norm2": "final_layer_norm",
}
_DECODER_NAMES = {
    "self_attn.out_proj": "self_attn.out_proj",
    "multihead_attn.out_proj": "encoder_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
    "norm2": "encoder_attn_layer_norm",
    "norm3": "final_layer_norm",
}
_OUTER_NAMES = {
    "transformer.decoder.norm": "model.decoder.layernorm",
    "query_embed": "model.query_position_embeddings",
    "input_proj": "model.input_projection",
    "class_embed": "class_labels_classifier",
    **{f"bbox_embed.layers.{i}": f"bbox_predictor.layers.{i}" for i in range(3)},
}


def convert_detr(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert DETR with a ResNet backbone."""
    weights.strip_prefixes("detr.")
    weights.skip(r"num_batches_tracked$")
    num_queries, width = weights.get_shape("query_embed.weight")
    heads = settings.get_num_heads(width, head_size=width // _NUM_HEADS if width % _NUM_HEADS == 0 else None)
    config_options: dict[str, Any] = {"d_model": width, "num_queries": num_queries}
    for stack in ("encoder", "decoder"):
        config_options |= {
            f"{stack}_layers": weights.count_layers(rf"transformer\.{stack}\.layers\.(\d+)\."),
            f"{stack}_ffn_dim": weights.get_shape(f"transformer.{stack}.layers.0.linear1.weight")[0],
            f"{stack}_attention_heads": heads,
        }
    num_classes = weights.get_shape("class_embed.weight")[0] - 1  # the last class is "no object"
    backbone_config, tensors = _convert_resnet(weights)
    tensors |= _convert_layers(
        weights, "encoder", _ENCODER_NAMES, {"self_attn": "self_attn"}, config_options["encoder_layers"]
    )
    tensors |= _convert_layers(
        weights,
        "decoder",
        _DECODER_NAMES,
        {"self_attn": "self_attn", "multihead_attn": "encoder_attn"},
        config_options["decoder_layers"],
    )
    tensors |= pop_renamed_layers(weights, _OUTER_NAMES)
    backbone_options: dict[str, Any] = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone_config,
    }
    config = transformers.DetrConfig(**backbone_options, **config_options, **settings.build_label_config(num_classes))
    return ConvertedModel(
        "DetrForObjectDetection",
        config,
        tensors,
        transformers.DetrImageProcessor(),
        assumptions={"num_heads": heads, "dilation": False},
    )


def _convert_layers(
    weights: CheckpointTensors, stack: str, names: dict[str, str], attention_names: dict[str, str], num_layers: int
) -> dict[str, Tensor]:
    """Convert the layers of the encoder or decoder; attention has fused query, key and value projections."""
    old_layer = f"transformer.{stack}.layers.{{i}}"
    new_layer = f"model.{stack}.layers.{{i}}"
    layer_names = {f"{old_layer}.{old}": f"{new_layer}.{new}" for old, new in names.items()}
    tensors = pop_renamed_layers(weights, layer_names, range(num_layers))
    for layer_index in range(num_layers):
        for old, new in attention_names.items():
            fused = f"{old_layer.format(i=layer_index)}.{old}"
            projection_names = [f"{new_layer.format(i=layer_index)}.{new}.{letter}_proj" for letter in "qkv"]
            tensors |= weights.pop_fused_qkv(f"{fused}.in_proj_weight", f"{fused}.in_proj_bias", projection_names)
    return tensors


def _convert_resnet(weights: CheckpointTensors) -> tuple[Any, dict[str, Tensor]]:
    """Convert torchvision's ResNet, its size inferred from the tensor shapes."""
    body = "backbone.0.body"
    depths = [weights.count_layers(rf"{re.escape(body)}\.layer{stage}\.(\d+)\.") for stage in range(1, 5)]
    layer_type = "basic"
    num_convolutions = 2
    if f"{body}.layer1.0.conv3.weight" in weights:
        layer_type = "bottleneck"
        num_convolutions = 3
    last_convolutions = [f"{body}.layer{stage}.0.conv{num_convolutions}.weight" for stage in range(1, 5)]
    config_options: dict[str, Any] = {
        "embedding_size": weights.get_shape(f"{body}.conv1.weight")[0],
        "hidden_sizes": [weights.get_shape(name)[0] for name in last_convolutions],
        "depths": depths,
        "layer_type": layer_type,
        "out_features": ["stage4"],
    }
    tensors = _convert_convolution(weights, f"{body}.conv1", f"{body}.bn1", f"{_RESNET_PREFIX}.embedder.embedder")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            old = f"{body}.layer{stage + 1}.{block}"
            new = f"{_RESNET_PREFIX}.encoder.stages.{stage}.layers.{block}"
            for index in range(num_convolutions):
                tensors |= _convert_convolution(
                    weights, f"{old}.conv{index + 1}", f"{old}.bn{index + 1}", f"{new}.layer.{index}"
                )
            if f"{old}.downsample.0.weight" in weights:
                tensors |= _convert_convolution(
                    weights, f"{old}.downsample.0", f"{old}.downsample.1", f"{new}.shortcut"
                )
    return transformers.ResNetConfig(**config_options), tensors


def _convert_convolution(weights: CheckpointTensors, convolution: str, norm: str, new_name: str) -> dict[str, Tensor]:
    """Rename a convolution and its batch norm."""
    tensors = {f"{new_name}.convolution.weight": weights.pop(f"{convolution}.weight")}
    for field in ("weight", "bias", "running_mean", "running_var"):
        tensors[f"{new_name}.normalization.{field}"] = weights.pop(f"{norm}.{field}")
    return tensors
