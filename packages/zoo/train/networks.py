"""The networks of the image models: a plain ViT, stored in transformers' layouts, and the ResNet that is its teacher.

The ViT is implemented here rather than taken from transformers for three reasons: training uses its hidden tokens, each
block is compiled separately (one compilation serves all), and the stored names are those that every transformers 5
loads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.training import ExponentialMovingAverage, TrainingBudget, load_checkpoint, train

NORM_EPSILON = 1e-6


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layernorm_before = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)
        self.layernorm_after = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        initialise_block(self)

    def forward(self, x: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        y = self.layernorm_before(x)
        query, key, value = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.dense(attended)
        return x + self.down(F.gelu(self.up(self.layernorm_after(x))))


class ViT(nn.Module):
    """A vision transformer with a class token; `forward` also returns the patch tokens after the blocks in `taps`."""

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        num_classes: int,
        taps: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.image_size, self.patch_size, self.width, self.heads, self.taps = image_size, patch_size, width, heads, taps
        self.grid = image_size // patch_size
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position_embeddings = nn.Parameter(make_sincos_positions(self.grid, width))
        self.projection = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.layernorm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.classifier = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self, images: Float[Tensor, "batch 3 size size"]
    ) -> tuple[Float[Tensor, "batch classes"], list[Float[Tensor, "batch patch width"]]]:
        x, tapped = self.embed_patches(images), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.taps:
                tapped.append(x[:, 1:])
        return self.classifier(self.layernorm(self.pool_tokens(x))), tapped

    def embed_patches(self, images: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch token width"]:
        """The tokens that enter the first block."""
        x = self.projection(images).flatten(2).transpose(1, 2)
        dtype = x.dtype
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position_embeddings
        # under autocast the sum is float32; half the bytes are enough for the residual stream
        return x.to(dtype)

    def pool_tokens(self, tokens: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch width"]:
        return tokens[:, 0]


class MeanViT(ViT):
    """The same, but the classifier reads the mean of the patch tokens, as BEiT does."""

    def pool_tokens(self, tokens: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch width"]:
        return tokens[:, 1:].mean(dim=1)


ViTType = TypeVar("ViTType", bound=ViT)


def open_vit(folder: Path, network_class: type[ViTType], num_classes: int | None = None) -> ViTType:
    """A stored ViT as this module's network, ready to be trained on; other `classes` get a new classifier."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = len(config["id2label"])
    network = network_class(
        config["image_size"],
        config["patch_size"],
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        num_classes or known,
    )
    stored, _ = load_checkpoint(folder / "model.safetensors")
    tensors = {name: stored[get_stored_name(name)] for name in network.state_dict()}
    if num_classes not in (None, known):
        tensors |= {name: tensor for name, tensor in network.state_dict().items() if name.startswith("classifier.")}
    network.load_state_dict(tensors)
    return network


def make_sincos_positions(grid: int, width: int) -> Float[Tensor, "1 token width"]:
    """Two-dimensional sine positions (zero for the class token): near patches start out alike, as attention can use."""
    rates = 1.0 / 100 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(grid)[:, None] * rates
    wave = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = wave[:, None].expand(grid, grid, -1)
    columns = wave[None].expand(grid, grid, -1)
    patches = torch.cat([rows, columns], dim=-1).reshape(1, grid * grid, width)
    return 0.5 * torch.cat([torch.zeros(1, 1, width), patches], dim=1)


@torch.no_grad()
def initialise_block(block: Block) -> None:
    """Mimetic start (Trockman & Kolter 2023): query·key near the identity, value·output near minus the identity.

    Small sets of images are too small to learn from noise that attention should look nearby first.
    """
    width = block.query.in_features
    per_head = width // block.heads
    for head in range(block.heads):
        rows = slice(head * per_head, (head + 1) * per_head)
        left, values, right = torch.linalg.svd(0.7 * torch.randn(width, width) / width**0.5 + 0.7 * torch.eye(width))
        scale = values[:per_head].sqrt()[:, None]
        block.query.weight[rows] = scale * left[:, :per_head].T
        block.key.weight[rows] = scale * right[:per_head]
    left, values, right = torch.linalg.svd(0.4 * torch.randn(width, width) / width**0.5 - 0.4 * torch.eye(width))
    block.value.weight.copy_(values.sqrt()[:, None] * right)
    block.dense.weight.copy_(left * values.sqrt())
    for layer in (block.up, block.down):
        nn.init.trunc_normal_(layer.weight, std=0.02)
    for layer in (block.query, block.key, block.value, block.dense, block.up, block.down):
        nn.init.zeros_(layer.bias)


BLOCK_NAMES = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "dense": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "layernorm_before": "layernorm_before",
    "layernorm_after": "layernorm_after",
}


def get_stored_name(name: str) -> str:
    """The name of a ViT weight in transformers' files (the layout that 5.0 and later releases both read).

    >>> get_stored_name("blocks.3.up.bias")
    'vit.encoder.layer.3.intermediate.dense.bias'
    """
    head, *rest = name.split(".")
    if head == "blocks":
        index, part, kind = rest
        return f"vit.encoder.layer.{index}.{BLOCK_NAMES[part]}.{kind}"
    if head == "classifier":
        return name
    if head == "layernorm":
        return f"vit.{name}"
    return f"vit.embeddings.patch_embeddings.{name}" if head == "projection" else f"vit.embeddings.{name}"


def to_beit_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A `MeanViT`'s weights under BEiT's names.

    BEiT's keys have no bias. It is left out, and nothing changes: it adds the same to all scores of a query.
    """
    stored = {get_stored_name(name): tensor for name, tensor in tensors.items() if not name.endswith(".key.bias")}
    renamed = {name.replace("vit.", "beit.", 1): tensor for name, tensor in stored.items()}
    return {name.replace("beit.layernorm.", "beit.pooler.layernorm."): tensor for name, tensor in renamed.items()}


CLIP_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "dense": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "layernorm_before": "layer_norm1",
    "layernorm_after": "layer_norm2",
}


@torch.no_grad()
def to_clip_tower(vit: ViT, images: Float[Tensor, "batch 3 size size"]) -> dict[str, Tensor]:
    """The ViT as CLIP's image encoder, without its classifier.

    CLIP's patches have no bias, so it moves into their positions. CLIP's extra norm after the embeddings cannot be the
    identity: its scale and shift are those that come closest to it, in squares, on the tokens of these images.
    """
    positions = vit.position_embeddings[0].clone()
    if vit.projection.bias is not None:
        positions[1:] += vit.projection.bias
    tokens = vit.embed_patches(images).flatten(0, 1)
    plain = F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPSILON)
    # the mean over channels is invisible to every later norm: only what deviates from it has to be met
    wanted = tokens - tokens.mean(dim=-1, keepdim=True)
    spread = plain - plain.mean(dim=0)
    scale = (spread * wanted).mean(dim=0) / spread.square().mean(dim=0)
    tower = {
        "embeddings.class_embedding": vit.cls_token[0, 0],
        "embeddings.patch_embedding.weight": vit.projection.weight,
        "embeddings.position_embedding.weight": positions,
        "pre_layrnorm.weight": scale,
        "pre_layrnorm.bias": wanted.mean(dim=0) - scale * plain.mean(dim=0),
        "post_layernorm.weight": vit.layernorm.weight,
        "post_layernorm.bias": vit.layernorm.bias,
    }
    for name, tensor in vit.blocks.state_dict().items():
        index, part, kind = name.split(".")
        tower[f"encoder.layers.{index}.{CLIP_NAMES[part]}.{kind}"] = tensor
    return {f"vision_model.{name}": tensor.detach().clone() for name, tensor in tower.items()}


def fine_tune(
    options: argparse.Namespace,
    model: nn.Module,
    budget: TrainingBudget,
    compute_loss: Callable[[], Tensor],
    evaluate: Callable[[nn.Module], dict[str, float]],
    groups: list[dict[str, Any]],
    num_evaluations: int = 6,
) -> dict[str, Tensor]:
    """Train, say some times on the way how the averaged weights do on held-out images, and give those weights."""
    checkpoint = options.work / "checkpoint.safetensors"
    if not options.resume:
        checkpoint.unlink(missing_ok=True)
    average = ExponentialMovingAverage(model.train(), horizon=100)
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=torch.device(options.device).type == "cuda")
    marks = [number / num_evaluations for number in range(num_evaluations)]

    def report() -> None:
        with average.averaged_weights() as network, torch.no_grad():
            figures = {name: round(figure, 4) for name, figure in evaluate(network).items()}
        print(f"held out at {budget.fraction:.0%}: {figures}", flush=True)

    def watched() -> Tensor:
        if marks and budget.fraction >= marks[0]:
            while marks and budget.fraction >= marks[0]:
                marks.pop(0)
            report()
        return compute_loss()

    train(
        watched,
        [optimiser],
        budget,
        average,
        max_grad_norm=1.0,
        report_every=5 if options.smoke else 25,
        checkpoint=checkpoint,
        name="smoke" if options.smoke else "train",
    )
    report()
    return average.tensors


class ResidualBlock(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Float[Tensor, "batch inputs height width"]) -> Float[Tensor, "batch outputs h w"]:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 whose stem keeps the resolution, as small images need; gives logits and the last two stages' maps."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1))
            for inputs, outputs, stride in zip((64, *widths[:-1]), widths, (1, 2, 2, 2), strict=True)
        )
        self.classifier = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # each block starts as the identity, which lets the learning rate be high from the start
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.second_norm.weight)

    def forward(
        self, images: Float[Tensor, "batch 3 size size"]
    ) -> tuple[Float[Tensor, "batch classes"], list[Float[Tensor, "batch channel h w"]]]:
        x = self.stem(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return self.classifier(x.mean(dim=(2, 3))), maps[2:]


def build_vit_config(
    shape: argparse.Namespace, labels: Sequence[str], image_size: int, patch_size: int
) -> dict[str, Any]:
    """The configuration of a ViT classifier for transformers; shape: its width, depth and heads."""
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "dtype": "float16",
        "image_size": image_size,
        "patch_size": patch_size,
        "num_channels": 3,
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "qkv_bias": True,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": NORM_EPSILON,
        "initializer_range": 0.02,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
