"""Vision transformers with the names that timm gave them: timm's and DeiT's own, DINO, MoCo v3, MAE.

Which model of transformers they become depends on how their classifier reads them:

    the class token                          ViTForImageClassification
    class and distillation token             DeiTForImageClassificationWithTeacher
    the mean of the patches (MAE)            BeitForImageClassification, its positions absolute
    class token beside the mean (DINO)       Dinov2ForImageClassification, its scales all one
    there is none                            ViTModel
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from clearhead.errors import InputError
from clearhead.studies.checkpoints.reader import Converted, Settings, Weights, renamed

_IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
#: Widths whose heads are not 64 wide: ViT-H, and MoCo v3's small model.
_HEADS = {"moco": {384: 12, 1280: 16}}
_WIDE_HEADS = {1280: 16, 1408: 16}


def vit(weights: Weights, settings: Settings) -> Converted:
    """timm's ViT and DeiT, distilled or not, and MAE fine-tuned with mean pooling."""
    weights.without_prefix("model.")
    return _converted(weights, settings)


def dino(weights: Weights, settings: Settings) -> Converted:
    """DINO's backbone, alone or with its linear classifier in a file of its own."""
    weights.without_prefix("backbone.")
    weights.leave_out(r"^head\.(mlp|last_layer)")
    return _converted(weights, settings)


def moco(weights: Weights, settings: Settings) -> Converted:
    """MoCo v3: its encoder, or a linear classifier trained on top of it."""
    weights.leave_out(r"^(momentum_encoder|predictor)\.")
    weights.without_prefix("base_encoder.")
    weights.leave_out(r"^head\.\d+\.")  # the projector of the contrastive loss, no classifier
    return _converted(weights, settings)


def mae(weights: Weights, settings: Settings) -> Converted:
    """MAE: the encoder of a pre-trained model, or a fine-tuned classifier."""
    weights.leave_out(r"^(decoder_|mask_token)")
    return _converted(weights, settings)


FAMILIES: dict[str, Callable[[Weights, Settings], Converted]] = {
    **{"vit": vit, "deit": vit, "dino": dino, "moco": moco, "mae": mae}
}


def _converted(weights: Weights, settings: Settings) -> Converted:
    sizes = _sizes(weights, settings)
    labels = _classifier(weights, settings)
    read = 1 if labels is None else labels[0].shape[1] / sizes["hidden_size"]
    if read != 1 and (read != 2 or settings.family != "dino"):
        raise InputError(f"the classifier reads {read:g} times the width of a token, and which tokens is not known")
    if "dist_token" in weights:
        build = _distilled
    elif "fc_norm.weight" in weights:
        build = _mean
    else:
        build = _class_token if read == 1 else _beside_mean
    made = build(weights, settings, sizes, labels)
    made.processor = _processor(settings.family, sizes["image_size"])
    made.assumed = {"heads": sizes["num_attention_heads"]}
    return made


def _sizes(weights: Weights, settings: Settings) -> dict[str, Any]:
    """What the shapes of the tensors say."""
    width, channels, high, wide = weights.shape("patch_embed.proj.weight")
    tokens = weights.shape("pos_embed")[1] - ("cls_token" in weights) - ("dist_token" in weights)
    side = round(tokens**0.5)
    if side * side != tokens or high != wide:
        raise InputError(f"{tokens} patches of {high} × {wide} pixels make up no square picture, which the model takes")
    return {
        "hidden_size": width,
        "num_hidden_layers": weights.count(r"blocks\.(\d+)\."),
        "num_attention_heads": settings.head_count(width, _HEADS.get(settings.family, _WIDE_HEADS)),
        "intermediate_size": weights.shape("blocks.0.mlp.fc1.weight")[0],
        "image_size": side * high,
        "patch_size": high,
        "num_channels": channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _classifier(weights: Weights, settings: Settings) -> tuple[Tensor, Tensor] | None:
    """The classifier's weight and bias, of the file itself or of a second one."""
    for source in (settings.head, weights):
        for name in ("linear", "head", "fc", "classifier", ""):
            dot = f"{name}." if name else ""
            if source is not None and f"{dot}weight" in source and (name or source is not weights):
                return source.take(f"{dot}weight"), source.take(f"{dot}bias")
    if settings.labels is not None:
        raise InputError("labels were given, but the file has no classifier: is it in a second file (head=)?")
    return None


def _encoder(weights: Weights, sizes: dict[str, Any], to: str, names: dict[str, str]) -> dict[str, Tensor]:
    """Everything below the classifier, as most of transformers' vision transformers have it."""
    layers = range(sizes["num_hidden_layers"])
    found = {
        f"{to}embeddings.cls_token": weights.take("cls_token"),
        f"{to}embeddings.position_embeddings": weights.take("pos_embed"),
        **weights.take_all("patch_embed.proj", f"{to}embeddings.patch_embeddings.projection"),
    }
    for i in layers:
        attention = f"{to}encoder.layer.{i}.attention.attention"
        parts = [f"{attention}.{part}" for part in ("query", "key", "value")]
        found |= weights.take_thirds(f"blocks.{i}.attn.qkv.weight", f"blocks.{i}.attn.qkv.bias", parts)
    inside = {f"blocks.{{i}}.{old}": f"{to}encoder.layer.{{i}}.{new}" for old, new in names.items()}
    return found | renamed(weights, inside, layers)


_NAMES = {
    "attn.proj": "attention.output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _class_token(weights: Weights, settings: Settings, sizes: dict[str, Any], labels: Any) -> Converted:
    to = "" if labels is None else "vit."
    found = _encoder(weights, sizes, to, _NAMES) | weights.take_all("norm", f"{to}layernorm")
    if labels is None:
        return Converted("ViTModel", transformers.ViTConfig(**sizes), found)
    config = transformers.ViTConfig(**sizes, **settings.named(len(labels[0])))
    return Converted("ViTForImageClassification", config, found | _named("classifier", labels))


def _distilled(weights: Weights, settings: Settings, sizes: dict[str, Any], labels: Any) -> Converted:
    if labels is None:
        raise InputError("the file has a distillation token but no classifier, which is not converted")
    found = _encoder(weights, sizes, "deit.", _NAMES) | weights.take_all("norm", "deit.layernorm")
    found["deit.embeddings.distillation_token"] = weights.take("dist_token")
    found |= _named("cls_classifier", labels) | weights.take_all("head_dist", "distillation_classifier")
    config = transformers.DeiTConfig(**sizes, **settings.named(len(labels[0])))
    return Converted("DeiTForImageClassificationWithTeacher", config, found)


def _mean(weights: Weights, settings: Settings, sizes: dict[str, Any], labels: Any) -> Converted:
    """BEiT is pooled this way. Its keys have no bias: that adds the same to a query's score for every key, which the
    softmax takes away again."""
    if labels is None:
        raise InputError("the file has a norm after pooling (fc_norm) but no classifier, which is not converted")
    found = _encoder(weights, sizes, "beit.", _NAMES) | weights.take_all("fc_norm", "beit.pooler.layernorm")
    found = {name: part for name, part in found.items() if not name.endswith("attention.key.bias")}
    if not sizes.pop("qkv_bias"):
        raise InputError("the file has no biases of queries and values, which BEiT, pooled alike, cannot do without")
    config = transformers.BeitConfig(
        **sizes,
        **settings.named(len(labels[0])),
        use_mean_pooling=True,
        use_absolute_position_embeddings=True,
        use_relative_position_bias=False,
        use_shared_relative_position_bias=False,
        layer_scale_init_value=0.0,
        drop_path_rate=0.0,
    )
    return Converted("BeitForImageClassification", config, found | _named("classifier", labels))


def _beside_mean(weights: Weights, settings: Settings, sizes: dict[str, Any], labels: Any) -> Converted:
    """DINO's classifier reads class token and mean feature by feature in turn, DINOv2's one after the other."""
    names = {**{name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}, "attn.proj": "attention.output.dense"}
    found = _encoder(weights, sizes, "dinov2.", names) | weights.take_all("norm", "dinov2.layernorm")
    width, inside = sizes["hidden_size"], sizes.pop("intermediate_size")
    if inside % width:
        raise InputError(f"layers {inside} wide inside are no multiple of {width}, as DINOv2's are")
    found["dinov2.embeddings.mask_token"] = torch.zeros(1, width)
    for i in range(sizes["num_hidden_layers"]):
        for scale in ("layer_scale1", "layer_scale2"):
            found[f"dinov2.encoder.layer.{i}.{scale}.lambda1"] = torch.ones(width)
    weight, bias = torch.cat([labels[0][:, 0::2], labels[0][:, 1::2]], dim=1), labels[1]
    config = transformers.Dinov2Config(
        **sizes, **settings.named(len(weight)), mlp_ratio=inside // width, layerscale_value=1.0, drop_path_rate=0.0
    )
    return Converted("Dinov2ForImageClassification", config, found | _named("classifier", (weight, bias)))


def _named(name: str, labels: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.weight": labels[0], f"{name}.bias": labels[1]}


def _processor(family: str, size: int) -> Any:
    """How the family's authors prepare pictures: timm's ViTs as they are, the others cut out of larger ones."""
    square = {"height": size, "width": size}
    if family == "vit":
        return transformers.ViTImageProcessor(size=square, resample=3, **_HALF)
    larger = {"shortest_edge": round(size * 256 / 224)}
    return transformers.CLIPImageProcessor(size=larger, crop_size=square, resample=3, **_IMAGENET)
