"""DETR as its authors publish it → DetrForObjectDetection, its ResNet as transformers has it (timm is not needed)."""

import re
from typing import Any

import transformers
from torch import Tensor

from clearhead.studies.checkpoints.reader import Converted, Settings, Weights, renamed

_HEADS = 8
_RESNET = "model.backbone.conv_encoder.model"
_ENCODER = {
    "self_attn.out_proj": "self_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
    "norm2": "final_layer_norm",
}
_DECODER = {
    "self_attn.out_proj": "self_attn.out_proj",
    "multihead_attn.out_proj": "encoder_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
    "norm2": "encoder_attn_layer_norm",
    "norm3": "final_layer_norm",
}
_AROUND = {
    "transformer.decoder.norm": "model.decoder.layernorm",
    "query_embed": "model.query_position_embeddings",
    "input_proj": "model.input_projection",
    "class_embed": "class_labels_classifier",
    **{f"bbox_embed.layers.{i}": f"bbox_predictor.layers.{i}" for i in range(3)},
}


def convert(weights: Weights, settings: Settings) -> Converted:
    weights.without_prefix("detr.")
    weights.leave_out(r"num_batches_tracked$")
    queries, width = weights.shape("query_embed.weight")
    heads = settings.head_count(width, each=width // _HEADS if width % _HEADS == 0 else None)
    sizes: dict[str, Any] = {"d_model": width, "num_queries": queries}
    for part in ("encoder", "decoder"):
        layers = rf"transformer\.{part}\.layers\.(\d+)\."
        sizes |= {
            f"{part}_layers": weights.count(layers),
            f"{part}_ffn_dim": weights.shape(f"transformer.{part}.layers.0.linear1.weight")[0],
            f"{part}_attention_heads": heads,
        }
    classes = weights.shape("class_embed.weight")[0] - 1  # the last one is no object
    backbone, found = _resnet(weights)
    found |= _layers(weights, "encoder", _ENCODER, {"self_attn": "self_attn"}, sizes["encoder_layers"])
    looks = {"self_attn": "self_attn", "multihead_attn": "encoder_attn"}
    found |= _layers(weights, "decoder", _DECODER, looks, sizes["decoder_layers"])
    found |= renamed(weights, _AROUND)
    own_resnet: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = transformers.DetrConfig(backbone_config=backbone, **own_resnet, **sizes, **settings.named(classes))
    processor = transformers.DetrImageProcessor()
    assumed = {"heads": heads, "dilation": False}
    return Converted("DetrForObjectDetection", config, found, processor, assumed=assumed)


def _layers(weights: Weights, part: str, names: dict[str, str], looks: dict[str, str], count: int) -> dict[str, Tensor]:
    old, new = f"transformer.{part}.layers.{{i}}", f"model.{part}.layers.{{i}}"
    found = renamed(weights, {f"{old}.{a}": f"{new}.{b}" for a, b in names.items()}, range(count))
    for i in range(count):
        for a, b in looks.items():
            fused = f"{old.format(i=i)}.{a}"
            parts = [f"{new.format(i=i)}.{b}.{letter}_proj" for letter in "qkv"]
            found |= weights.take_thirds(f"{fused}.in_proj_weight", f"{fused}.in_proj_bias", parts)
    return found


def _resnet(weights: Weights) -> tuple[Any, dict[str, Tensor]]:
    """torchvision's ResNet, whose size the shapes tell."""
    body = "backbone.0.body"
    depths = [weights.count(rf"{re.escape(body)}\.layer{stage}\.(\d+)\.") for stage in range(1, 5)]
    deep = f"{body}.layer1.0.conv3.weight" in weights
    last = 3 if deep else 2
    sizes: dict[str, Any] = {
        "embedding_size": weights.shape(f"{body}.conv1.weight")[0],
        "hidden_sizes": [weights.shape(f"{body}.layer{stage}.0.conv{last}.weight")[0] for stage in range(1, 5)],
        "depths": depths,
        "layer_type": "bottleneck" if deep else "basic",
        "out_features": ["stage4"],
    }
    found = _convolution(weights, f"{body}.conv1", f"{body}.bn1", f"{_RESNET}.embedder.embedder")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            old, new = f"{body}.layer{stage + 1}.{block}", f"{_RESNET}.encoder.stages.{stage}.layers.{block}"
            for k in range(last):
                found |= _convolution(weights, f"{old}.conv{k + 1}", f"{old}.bn{k + 1}", f"{new}.layer.{k}")
            if f"{old}.downsample.0.weight" in weights:
                found |= _convolution(weights, f"{old}.downsample.0", f"{old}.downsample.1", f"{new}.shortcut")
    return transformers.ResNetConfig(**sizes), found


def _convolution(weights: Weights, convolution: str, norm: str, to: str) -> dict[str, Tensor]:
    parts = ("weight", "bias", "running_mean", "running_var")
    return {
        f"{to}.convolution.weight": weights.take(f"{convolution}.weight"),
        **{f"{to}.normalization.{part}": weights.take(f"{norm}.{part}") for part in parts},
    }
