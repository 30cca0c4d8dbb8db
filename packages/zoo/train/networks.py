"""The two networks of the picture models: a plain ViT, stored in transformers' layout, and the ResNet that teaches it.

The ViT is written out here, and not taken from transformers, for three reasons: training taps its inner tokens, each
block is compiled by itself (one compilation serves all), and stored names are those that every transformers 5 opens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

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
        start_block(self)

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
        self, size: int, patch: int, width: int, depth: int, heads: int, classes: int, taps: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.size, self.patch, self.width, self.heads, self.taps = size, patch, width, heads, taps
        self.grid = size // patch
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position_embeddings = nn.Parameter(wave_positions(self.grid, width))
        self.projection = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.layernorm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.classifier = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self, pictures: Float[Tensor, "batch 3 size size"]
    ) -> tuple[Float[Tensor, "batch classes"], list[Float[Tensor, "batch patch width"]]]:
        x = self.projection(pictures).flatten(2).transpose(1, 2)
        dtype = x.dtype
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position_embeddings
        # under autocast the sum is float32; half the bytes are enough for the residual stream
        x = x.to(dtype)
        tapped = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.taps:
                tapped.append(x[:, 1:])
        return self.classifier(self.layernorm(x[:, 0])), tapped


def wave_positions(grid: int, width: int) -> Float[Tensor, "1 token width"]:
    """Two-dimensional sine positions (zero for the class token): near patches start out alike, as attention can use."""
    rates = 1.0 / 100 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(grid)[:, None] * rates
    wave = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = wave[:, None].expand(grid, grid, -1)
    columns = wave[None].expand(grid, grid, -1)
    patches = torch.cat([rows, columns], dim=-1).reshape(1, grid * grid, width)
    return 0.5 * torch.cat([torch.zeros(1, 1, width), patches], dim=1)


@torch.no_grad()
def start_block(block: Block) -> None:
    """Mimetic start (Trockman & Kolter 2023): query·key near the identity, value·output near minus the identity.

    Small sets of pictures are too small to learn from noise that attention should look nearby first.
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


def stored_name(name: str) -> str:
    """The name of a ViT weight in transformers' files (the layout that 5.0 and later releases both read).

    >>> stored_name("blocks.3.up.bias")
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


class Residual(nn.Module):
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
    """ResNet-18 whose stem keeps the resolution, as small pictures need; gives logits and the last two stages' maps."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(inputs, outputs, stride), Residual(outputs, outputs, 1))
            for inputs, outputs, stride in zip((64, *widths[:-1]), widths, (1, 2, 2, 2), strict=True)
        )
        self.classifier = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # each block starts as the identity, which lets the learning rate be high from the start
        for module in self.modules():
            if isinstance(module, Residual):
                nn.init.zeros_(module.second_norm.weight)

    def forward(
        self, pictures: Float[Tensor, "batch 3 size size"]
    ) -> tuple[Float[Tensor, "batch classes"], list[Float[Tensor, "batch channel h w"]]]:
        x = self.stem(pictures)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return self.classifier(x.mean(dim=(2, 3))), maps[2:]
