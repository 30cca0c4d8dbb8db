"""Tiny models with the code and the parameter names of their original authors: input of `clearhead convert`."""

import re
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 64


def spread(model: nn.Module) -> Any:
    """Fill a model with large random weights, so that every weight affects the output."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1) * 0.5)
    return model.double().eval()


# --- timm's vision transformer and models based on it --------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE, bias=bias), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, count, width))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDE, eps=1e-6), Attention(heads, bias)
        self.norm2, self.mlp = nn.LayerNorm(WIDE, eps=1e-6), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDE, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """`pool`: token, avg (MAE's: the norm comes after the mean) or dist (DeiT's two classifiers); None for no head."""

    def __init__(self, pool: str | None = "token", heads: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.pool = pool
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDE))
        if pool == "dist":
            self.dist_token = nn.Parameter(torch.zeros(1, 1, WIDE))
            self.head_dist = nn.Linear(WIDE, 5)
        self.pos_embed = nn.Parameter(torch.zeros(1, 9 + 1 + (pool == "dist"), WIDE))
        self.blocks = nn.Sequential(*(Block(heads, bias) for _ in range(2)))
        if pool == "avg":
            self.fc_norm = nn.LayerNorm(WIDE, eps=1e-6)
        else:
            self.norm = nn.LayerNorm(WIDE, eps=1e-6)
        if pool is not None:
            self.head = nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        first = [self.cls_token, self.dist_token] if self.pool == "dist" else [self.cls_token]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in first), x], 1)
        x = self.blocks(x + self.pos_embed)
        if self.pool == "avg":
            return self.head(self.fc_norm(x[:, 1:].mean(1)))
        x = self.norm(x)
        if self.pool == "dist":
            return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
        return x if self.pool is None else self.head(x[:, 0])


def dino_features(backbone: VisionTransformer, x: Tensor) -> Tensor:
    """eval_linear.py of DINO with one block and average pooling: class token and mean, interleaved."""
    tokens = backbone(x)
    output = torch.cat((tokens[:, 0].unsqueeze(-1), tokens[:, 1:].mean(1).unsqueeze(-1)), dim=-1)
    return output.reshape(output.shape[0], -1)


# --- OpenAI's CLIP ------------------------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int, mask: Tensor | None) -> None:
        super().__init__()
        self.attn, self.ln_1, self.ln_2 = nn.MultiheadAttention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        layers = [("c_fc", nn.Linear(width, 4 * width)), ("gelu", QuickGELU()), ("c_proj", nn.Linear(4 * width, width))]
        self.mlp, self.mask = nn.Sequential(OrderedDict(layers)), mask

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        mask = None if self.mask is None else self.mask.to(x.dtype)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(*(ResidualAttentionBlock(width, heads, mask) for _ in range(2)))


class Visual(nn.Module):
    def __init__(self, width: int, heads: int, output_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(10, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Transformer(width, heads)
        self.proj = nn.Parameter(torch.zeros(width, output_size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding + torch.zeros(len(x), 1, x.shape[-1], dtype=x.dtype), x], 1)
        x = self.ln_pre(x + self.positional_embedding).permute(1, 0, 2)
        return self.ln_post(self.transformer.resblocks(x).permute(1, 0, 2)[:, 0]) @ self.proj


class CLIP(nn.Module):
    WORDS, LENGTH, OUT = 30, 7, 12

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        width = 2 * WIDE
        self.visual = Visual(width, heads, self.OUT)
        self.transformer = Transformer(width, heads, torch.full((7, 7), float("-inf")).triu(1))
        self.token_embedding, self.ln_final = nn.Embedding(self.WORDS, width), nn.LayerNorm(width)
        self.positional_embedding = nn.Parameter(torch.zeros(self.LENGTH, width))
        self.text_projection = nn.Parameter(torch.zeros(width, self.OUT))
        self.logit_scale = nn.Parameter(torch.zeros([]))

    def encode_text(self, text: Tensor) -> Tensor:
        x = (self.token_embedding(text) + self.positional_embedding).permute(1, 0, 2)
        x = self.ln_final(self.transformer.resblocks(x).permute(1, 0, 2))
        return x[torch.arange(len(x)), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        images, texts = self.visual(image), self.encode_text(text)
        images, texts = images / images.norm(dim=1, keepdim=True), texts / texts.norm(dim=1, keepdim=True)
        return self.logit_scale.exp() * images @ texts.t()


# --- DETR: transformers' names mapped back ------------------------------------------------------------------------

_BACK = [
    (r"^model\.backbone\.conv_encoder\.model\.embedder\.embedder\.convolution", "backbone.0.body.conv1"),
    (r"^model\.backbone\.conv_encoder\.model\.embedder\.embedder\.normalization", "backbone.0.body.bn1"),
    (r"^model\.backbone\.conv_encoder\.model\.encoder\.stages\.", "backbone.0.body.layer"),
    (r"shortcut\.convolution", "downsample.0"),
    (r"shortcut\.normalization", "downsample.1"),
    (r"^model\.(encoder|decoder)\.layers", r"transformer.\1.layers"),
    (r"encoder_attn\.", "multihead_attn."),
    (r"self_attn_layer_norm", "norm1"),
    (r"(decoder.*)encoder_attn_layer_norm", r"\1norm2"),
    (r"(encoder.*)final_layer_norm", r"\1norm2"),
    (r"(decoder.*)final_layer_norm", r"\1norm3"),
    (r"fc([12])", r"linear\1"),
    (r"^model\.decoder\.layernorm", "transformer.decoder.norm"),
    (r"^model\.query_position_embeddings", "query_embed"),
    (r"^model\.input_projection", "input_proj"),
    (r"^class_labels_classifier", "class_embed"),
    (r"^bbox_predictor", "bbox_embed"),
]


def original_detr(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a transformers checkpoint to the authors' names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        for pattern, new in _BACK:
            name = re.sub(pattern, new, name)
        # transformers counts stages, and convolutions of a block, from 0; the authors count from 1
        name = re.sub(r"body\.layer(\d)\.layers\.(\d+)", lambda m: f"body.layer{int(m[1]) + 1}.{m[2]}", name)
        name = re.sub(r"\.layer\.(\d)\.convolution", lambda m: f".conv{int(m[1]) + 1}", name)
        name = re.sub(r"\.layer\.(\d)\.normalization", lambda m: f".bn{int(m[1]) + 1}", name)
        renamed[name] = tensor
    for name in [name for name in renamed if ".q_proj." in name]:
        projections = [renamed.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        renamed[name.replace("q_proj.", "in_proj_")] = torch.cat(projections)
    return renamed
