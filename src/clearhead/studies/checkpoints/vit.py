"""Convert vision transformers with timm's tensor names: timm's ViT, DeiT, DINO, MoCo v3 and MAE.

The model class of transformers depends on what the classifier reads:

    the class token                          ViTForImageClassification
    class and distillation token             DeiTForImageClassificationWithTeacher
    the mean of the patches (MAE)            BeitForImageClassification with absolute positions
    class token and mean (DINO)              Dinov2ForImageClassification with layer scales of one
    no classifier                            ViTModel
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from clearhead.errors import InputError
from clearhead.studies.checkpoints.reader import (
    CheckpointTensors,
    ConversionSettings,
    ConvertedModel,
    pop_renamed_layers,
)

_IMAGENET_NORMALISATION: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_HALF_NORMALISATION: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
#: Hidden sizes whose head size is not 64: ViT-H, and the small model of MoCo v3.
_HEADS_BY_FAMILY_AND_WIDTH = {"moco": {384: 12, 1280: 16}}
_HEADS_BY_WIDTH = {1280: 16, 1408: 16}


def convert_vit(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert timm's ViT and DeiT, distilled or not, and MAE fine-tuned with mean pooling."""
    weights.strip_prefixes("model.")
    return _convert_vision_transformer(weights, settings)


def convert_dino(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert the backbone of DINO, with or without its linear classifier from a second file."""
    weights.strip_prefixes("backbone.")
    weights.skip(r"^head\.(mlp|last_layer)")
    return _convert_vision_transformer(weights, settings)


def convert_moco(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert the encoder of MoCo v3, or a linear classifier trained on top of it."""
    weights.skip(r"^(momentum_encoder|predictor)\.")
    weights.strip_prefixes("base_encoder.")
    weights.skip(r"^head\.\d+\.")  # the projector of the contrastive loss, not a classifier
    return _convert_vision_transformer(weights, settings)


def convert_mae(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert the encoder of a pretrained MAE, or a fine-tuned classifier."""
    weights.skip(r"^(decoder_|mask_token)")
    return _convert_vision_transformer(weights, settings)


VIT_CONVERTERS: dict[str, Callable[[CheckpointTensors, ConversionSettings], ConvertedModel]] = {
    **{"vit": convert_vit, "deit": convert_vit, "dino": convert_dino, "moco": convert_moco, "mae": convert_mae}
}


def _convert_vision_transformer(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert after the family's own prefixes and heads are removed."""
    config_options = _infer_config(weights, settings)
    classifier = _pop_classifier(weights, settings)
    input_multiple = 1 if classifier is None else classifier[0].shape[1] / config_options["hidden_size"]
    if input_multiple != 1 and (input_multiple != 2 or settings.family != "dino"):
        raise InputError(
            f"the classifier's input is {input_multiple:g} times the width of a token, so clearhead cannot determine "
            "which tokens it reads"
        )
    if "dist_token" in weights:
        build = _build_deit
    elif "fc_norm.weight" in weights:
        build = _build_beit
    elif input_multiple == 1:
        build = _build_vit
    else:
        build = _build_dinov2
    model = build(weights, settings, config_options, classifier)
    model.processor = _make_processor(settings.family, config_options["image_size"])
    model.assumptions = {"num_heads": config_options["num_attention_heads"]}
    return model


def _infer_config(weights: CheckpointTensors, settings: ConversionSettings) -> dict[str, Any]:
    """Infer the configuration from the tensor shapes."""
    width, num_channels, patch_height, patch_width = weights.get_shape("patch_embed.proj.weight")
    num_patches = weights.get_shape("pos_embed")[1] - ("cls_token" in weights) - ("dist_token" in weights)
    side = round(num_patches**0.5)
    if side * side != num_patches or patch_height != patch_width:
        raise InputError(
            f"{num_patches} patches of {patch_height} × {patch_width} pixels do not form a square image, which the "
            "model needs"
        )
    heads_by_width = _HEADS_BY_FAMILY_AND_WIDTH.get(settings.family, _HEADS_BY_WIDTH)
    return {
        "hidden_size": width,
        "num_hidden_layers": weights.count_layers(r"blocks\.(\d+)\."),
        "num_attention_heads": settings.get_num_heads(width, heads_by_width),
        "intermediate_size": weights.get_shape("blocks.0.mlp.fc1.weight")[0],
        "image_size": side * patch_height,
        "patch_size": patch_height,
        "num_channels": num_channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _pop_classifier(weights: CheckpointTensors, settings: ConversionSettings) -> tuple[Tensor, Tensor] | None:
    """Remove and return weight and bias of the classifier, from the second file or the first; None without one."""
    for source in (settings.head_tensors, weights):
        for name in ("linear", "head", "fc", "classifier", ""):
            prefix = f"{name}." if name else ""
            if source is not None and f"{prefix}weight" in source and (name or source is not weights):
                return source.pop(f"{prefix}weight"), source.pop(f"{prefix}bias")
    if settings.class_names is not None:
        raise InputError(
            "class names were given, but the file has no classifier: if it is in a second file, pass head_file= "
            "(--head-file)"
        )
    return None


def _convert_encoder(
    weights: CheckpointTensors, config_options: dict[str, Any], new_prefix: str, names: dict[str, str]
) -> dict[str, Tensor]:
    """Convert embeddings and layers, with the names of most vision transformers of transformers."""
    layer_indices = range(config_options["num_hidden_layers"])
    tensors = {
        f"{new_prefix}embeddings.cls_token": weights.pop("cls_token"),
        f"{new_prefix}embeddings.position_embeddings": weights.pop("pos_embed"),
        **weights.pop_layer("patch_embed.proj", f"{new_prefix}embeddings.patch_embeddings.projection"),
    }
    for index in layer_indices:
        attention = f"{new_prefix}encoder.layer.{index}.attention.attention"
        projection_names = [f"{attention}.{name}" for name in ("query", "key", "value")]
        tensors |= weights.pop_fused_qkv(
            f"blocks.{index}.attn.qkv.weight", f"blocks.{index}.attn.qkv.bias", projection_names
        )
    layer_names = {f"blocks.{{i}}.{old}": f"{new_prefix}encoder.layer.{{i}}.{new}" for old, new in names.items()}
    return tensors | pop_renamed_layers(weights, layer_names, layer_indices)


_LAYER_NAMES = {
    "attn.proj": "attention.output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _build_vit(
    weights: CheckpointTensors,
    settings: ConversionSettings,
    config_options: dict[str, Any],
    classifier: tuple[Tensor, Tensor] | None,
) -> ConvertedModel:
    """Convert to `ViTForImageClassification`, or to `ViTModel` without a classifier."""
    new_prefix = "" if classifier is None else "vit."
    tensors = _convert_encoder(weights, config_options, new_prefix, _LAYER_NAMES)
    tensors |= weights.pop_layer("norm", f"{new_prefix}layernorm")
    if classifier is None:
        return ConvertedModel("ViTModel", transformers.ViTConfig(**config_options), tensors)
    config = transformers.ViTConfig(**config_options, **settings.build_label_config(len(classifier[0])))
    tensors |= _name_classifier_tensors("classifier", *classifier)
    return ConvertedModel("ViTForImageClassification", config, tensors)


def _build_deit(
    weights: CheckpointTensors,
    settings: ConversionSettings,
    config_options: dict[str, Any],
    classifier: tuple[Tensor, Tensor] | None,
) -> ConvertedModel:
    """Convert a DeiT with distillation token and two classifiers; one without classifiers is refused."""
    if classifier is None:
        raise InputError("the file has a distillation token but no classifier, which is not supported")
    tensors = _convert_encoder(weights, config_options, "deit.", _LAYER_NAMES)
    tensors |= weights.pop_layer("norm", "deit.layernorm")
    tensors["deit.embeddings.distillation_token"] = weights.pop("dist_token")
    tensors |= _name_classifier_tensors("cls_classifier", *classifier)
    tensors |= weights.pop_layer("head_dist", "distillation_classifier")
    config = transformers.DeiTConfig(**config_options, **settings.build_label_config(len(classifier[0])))
    return ConvertedModel("DeiTForImageClassificationWithTeacher", config, tensors)


def _build_beit(
    weights: CheckpointTensors,
    settings: ConversionSettings,
    config_options: dict[str, Any],
    classifier: tuple[Tensor, Tensor] | None,
) -> ConvertedModel:
    """Build BEiT, which pools over patches.

    Keys of BEiT have no bias. A key bias adds the same value to the scores of all keys of a query, so the softmax
    cancels it.
    """
    if classifier is None:
        raise InputError("the file has a norm after pooling (fc_norm) but no classifier, which is not supported")
    tensors = _convert_encoder(weights, config_options, "beit.", _LAYER_NAMES)
    tensors |= weights.pop_layer("fc_norm", "beit.pooler.layernorm")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("attention.key.bias")}
    if not config_options.pop("qkv_bias"):
        raise InputError("the file has no biases of queries and values, which BEiT with the same pooling requires")
    config = transformers.BeitConfig(
        **config_options,
        **settings.build_label_config(len(classifier[0])),
        use_mean_pooling=True,
        use_absolute_position_embeddings=True,
        use_relative_position_bias=False,
        use_shared_relative_position_bias=False,
        layer_scale_init_value=0.0,
        drop_path_rate=0.0,
    )
    tensors |= _name_classifier_tensors("classifier", *classifier)
    return ConvertedModel("BeitForImageClassification", config, tensors)


def _build_dinov2(
    weights: CheckpointTensors,
    settings: ConversionSettings,
    config_options: dict[str, Any],
    classifier: tuple[Tensor, Tensor] | None,
) -> ConvertedModel:
    """Build DINOv2. DINO's classifier interleaves the features of class token and mean; DINOv2 concatenates them."""
    assert classifier is not None  # without a classifier, `_build_vit` is used
    names = {
        "norm1": "norm1",
        "norm2": "norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "attn.proj": "attention.output.dense",
    }
    tensors = _convert_encoder(weights, config_options, "dinov2.", names)
    tensors |= weights.pop_layer("norm", "dinov2.layernorm")
    width = config_options["hidden_size"]
    mlp_width = config_options.pop("intermediate_size")
    if mlp_width % width:
        raise InputError(f"the MLP width {mlp_width} is not a multiple of the hidden size {width}, as DINOv2 requires")
    tensors["dinov2.embeddings.mask_token"] = torch.zeros(1, width)
    for index in range(config_options["num_hidden_layers"]):
        for scale in ("layer_scale1", "layer_scale2"):
            tensors[f"dinov2.encoder.layer.{index}.{scale}.lambda1"] = torch.ones(width)
    interleaved, bias = classifier
    weight = torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=1)
    config = transformers.Dinov2Config(
        **config_options,
        **settings.build_label_config(len(weight)),
        mlp_ratio=mlp_width // width,
        layerscale_value=1.0,
        drop_path_rate=0.0,
    )
    tensors |= _name_classifier_tensors("classifier", weight, bias)
    return ConvertedModel("Dinov2ForImageClassification", config, tensors)


def _name_classifier_tensors(name: str, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return weight and bias of a classifier under transformers' names."""
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _make_processor(family: str, size: int) -> Any:
    """Make the image processor of the family's authors: timm's ViTs resize only, the others resize and crop."""
    square = {"height": size, "width": size}
    if family == "vit":
        return transformers.ViTImageProcessor(size=square, resample=3, **_HALF_NORMALISATION)
    shortest_edge = {"shortest_edge": round(size * 256 / 224)}
    return transformers.CLIPImageProcessor(size=shortest_edge, crop_size=square, resample=3, **_IMAGENET_NORMALISATION)
