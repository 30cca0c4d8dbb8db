"""Typical models from outside transformers, each with its registration and its reader.

A replica of each computes the same forward pass for one input, with loops over heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clearhead
from tests.replicas.plain_pass import Seen

WIDTH, HEADS, LAYERS, VOCAB_SIZE = 16, 4, 3, 30
VOCABULARY = [f"w{i}" for i in range(VOCAB_SIZE)]


# --- a vision transformer as in timm: one fused projection, layers in an nn.Sequential ----------------------------


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, width))


@clearhead.register_attention(FusedAttention)
def attend_fused(module: FusedAttention, x: Tensor) -> Any:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attention = (q @ k.mT * module.scale).softmax(-1)
    return module.proj((attention @ v).transpose(1, 2).flatten(2)), attention, v


class PreNormBlock(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Classifies by its class token, or by the mean of its patches."""

    def __init__(self, pool: str = "token") -> None:
        super().__init__()
        self.pool = pool
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH)) if pool == "token" else None
        self.pos_embed = nn.Parameter(torch.randn(1, 12 + (pool == "token"), WIDTH))
        self.blocks = nn.Sequential(*(PreNormBlock(FusedAttention()) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1))


def vit_reader(pool: str) -> clearhead.ImageReader:
    before = ["[CLS]"] if pool == "token" else []
    return clearhead.ImageReader(patch_size=4, prefix_tokens=before, image_size=(16, 12), labels=["cat", "dog", "owl"])


# --- torch's own encoder ------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A plain nn.TransformerEncoder over words, which averages all positions that are not padding."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.words, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(20, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=batch_first)
        for encoder_layer in self.encoder.layers:  # they are copies of one layer
            for weight in encoder_layer.parameters():
                nn.init.normal_(weight, std=0.4)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        along = 1 if self.batch_first else 0
        positions = self.places(torch.arange(src.shape[along], device=src.device))
        x = self.words(src) + (positions if self.batch_first else positions[:, None])
        x = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        x = x if self.batch_first else x.transpose(0, 1)
        real = torch.ones(x.shape[:2]) if src_key_padding_mask is None else (~src_key_padding_mask)
        weight = real.to(x.dtype)[..., None]
        return self.head((x * weight).sum(1) / weight.sum(1))


def encoder_reader(batch_first: bool = True) -> clearhead.TokenReader:
    return clearhead.TokenReader(
        read=lambda text: [VOCABULARY.index(word) for word in text.split()],
        token_names=VOCABULARY,
        pad_id=0,
        inputs=lambda ids, real: {"src": ids if batch_first else ids.T, "src_key_padding_mask": ~real},
    )


# --- a transformer as in a textbook: one module per head ------------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        return weights.softmax(-1) @ self.v(x)


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


@clearhead.register_attention(MultiHead)
def attend_multi_head(module: MultiHead, x: Tensor) -> Any:
    q, k, v = (torch.stack([getattr(head, letter)(x) for head in module.heads], 1) for letter in "qkv")
    attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return module.out((attention @ v).transpose(1, 2).flatten(2)), attention, v


class Textbook(nn.Module):
    """Sinusoidal or learned positions; classifies by the first token."""

    def __init__(self, positions: str = "fixed") -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, WIDTH)
        angle = torch.arange(20.0)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.sinusoids: Tensor
        self.register_buffer("sinusoids", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
        self.position = nn.Embedding(20, WIDTH) if positions == "learned" else None
        self.blocks = nn.ModuleList(PreNormBlock(MultiHead()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids) + (self.sinusoids[positions] if self.position is None else self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def textbook_reader() -> clearhead.TokenReader:
    return clearhead.TokenReader(
        read=lambda text: [VOCABULARY.index(word) for word in text.split()], token_names=VOCABULARY
    )


# --- a recurrent network with additive attention: one query -------------------------------------------------------


class AdditiveAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.u(torch.tanh(self.w(hidden))).squeeze(-1).masked_fill(~real, float("-inf"))
        weights = energy.softmax(-1)
        return (weights.unsqueeze(1) @ hidden).squeeze(1), weights


@clearhead.register_attention(AdditiveAttention)
def attend_additive(module: AdditiveAttention, hidden: Tensor, real: Tensor) -> Any:
    energy = module.u(torch.tanh(module.w(hidden))).squeeze(-1).masked_fill(~real, float("-inf"))
    attention, values = energy.softmax(-1)[:, None, None], hidden[:, None]  # one head, one query
    return ((attention @ values).flatten(1), attention.flatten(1)), attention, values


class BiLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.attention, self.head = AdditiveAttention(), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        real = torch.arange(hidden.shape[1])[None] < lengths.cpu()[:, None]
        return self.head(self.attention(hidden, real.to(hidden.device))[0])


def bilstm_reader() -> clearhead.TokenReader:
    return clearhead.TokenReader(
        read=lambda text: [VOCABULARY.index(word) for word in text.split()],
        token_names=VOCABULARY,
        pad_id=0,
        inputs=lambda ids, real: {"ids": ids, "lengths": real.sum(1)},
        pooling_module="attention",
        labels=["bad", "good"],
    )


# --- the cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its reader and read-out, the replica of its forward pass for one input, and its read-out weights."""

    model: Callable[[], nn.Module]
    reader: Callable[[], Any]
    readout: str | None
    replica: Callable[[Any, Tensor], tuple[Tensor, list[Tensor], list[Tensor]]]
    weights: Callable[[int], np.ndarray]
    before: int = 0


def attend(x: Tensor, qkv: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Run the heads of one input in a loop; return their outputs (unit × width) and their attention."""
    attention_maps, mixed = [], []
    for q, k, _ in qkv:
        attention_maps.append(torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), -1))
    attention = torch.stack(attention_maps)  # gradients are taken at this tensor
    for head, (_, _, v) in enumerate(qkv):
        mixed.append(attention[head] @ v)
    return torch.cat(mixed, -1), attention


def split_heads(x: Tensor) -> list[Tensor]:
    return list(x.split(WIDTH // HEADS, -1))


def vit_replica(model: Any, pixels: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    cells = pixels.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    x = cells @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias
    if model.cls_token is not None:
        x = torch.cat([model.cls_token[0], x])
    x, attention_maps, states = x + model.pos_embed[0], [], []
    for block in model.blocks:
        states.append(x)
        inside = block.norm1(x)
        q, k, v = (
            split_heads(projection)
            for projection in (inside @ block.attn.qkv.weight.T + block.attn.qkv.bias).chunk(3, -1)
        )
        mixed, attention = attend(inside, list(zip(q, k, v, strict=True)))
        attention_maps.append(attention)
        x = x + block.attn.proj(mixed)
        x = x + block.mlp(block.norm2(x))
    x = model.norm(x)
    return model.head(x[0] if model.pool == "token" else x.mean(0)), attention_maps, states


def encoder_replica(model: Any, vectors: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    x, attention_maps, states = vectors + model.places.weight[: len(vectors)], [], []
    for layer in model.encoder.layers:
        states.append(x)
        weight, bias = layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias
        q, k, v = (split_heads(projection) for projection in (x @ weight.T + bias).chunk(3, -1))
        mixed, attention = attend(x, list(zip(q, k, v, strict=True)))
        attention_maps.append(attention)
        x = layer.norm1(x + layer.self_attn.out_proj(mixed))
        x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
    return model.head(x.mean(0)), attention_maps, states


def textbook_replica(model: Any, vectors: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    positions: Any = model.sinusoids if model.position is None else model.position.weight
    x, attention_maps, states = vectors + positions[: len(vectors)], [], []
    for block in model.blocks:
        states.append(x)
        inside = block.norm1(x)
        mixed, attention = attend(inside, [(h.q(inside), h.k(inside), h.v(inside)) for h in block.attn.heads])
        attention_maps.append(attention)
        x = x + block.attn.out(mixed)
        x = x + block.mlp(block.norm2(x))
    return model.head(x[0]), attention_maps, states


def bilstm_replica(model: Any, vectors: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    hidden = model.lstm(vectors[None])[0][0]
    energy = torch.stack([model.attention.u(torch.tanh(model.attention.w(h)))[0] for h in hidden])
    weights = (energy.exp() / energy.exp().sum())[None, None]  # head × query × key
    return model.head(weights[0, 0] @ hidden), [weights], []


def weigh_first_row(units: int) -> np.ndarray:
    return np.eye(units)[0]


def weigh_all_rows(units: int) -> np.ndarray:
    return np.full(units, 1 / units)


CASES: dict[str, Case] = {
    "vit, class token": Case(ViT, lambda: vit_reader("token"), None, vit_replica, weigh_first_row, before=1),
    "vit, mean": Case(lambda: ViT("mean"), lambda: vit_reader("mean"), None, vit_replica, weigh_all_rows),
    "nn.TransformerEncoder": Case(Encoder, encoder_reader, "mean", encoder_replica, weigh_all_rows),
    "nn.TransformerEncoder, length first": Case(
        lambda: Encoder(False), lambda: encoder_reader(False), "mean", encoder_replica, weigh_all_rows
    ),
    "textbook, fixed positions": Case(Textbook, textbook_reader, None, textbook_replica, weigh_first_row),
    "textbook, learned positions": Case(
        lambda: Textbook("learned"), textbook_reader, None, textbook_replica, weigh_first_row
    ),
    "bilstm": Case(BiLSTM, bilstm_reader, None, bilstm_replica, lambda units: np.ones(1)),
}
TEXTS = ["w3 w7 w20 w5 w11", "w9 w2", "w1 w25 w14 w6 w8 w29 w17"]


def made(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Build one of the models, with weights so large that attention is not uniform."""
    torch.manual_seed(5)
    model = CASES[name].model().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5)
    return model


def explainer(name: str, dtype: torch.dtype = torch.float64) -> clearhead.Explainer:
    case = CASES[name]
    return clearhead.load(made(name, dtype), case.reader(), readout=case.readout)


def inputs(name: str) -> list[Any]:
    if not name.startswith("vit"):
        return TEXTS
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 16, 12, generator=generator) for _ in range(3)]


def run_replica(name: str, model: Any, raw: Any, label: int) -> Seen:
    """Run the replica of a model on one input and record it, with the gradients of one label."""
    if name.startswith("vit"):
        leaf = raw.double().requires_grad_()
    else:
        table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        leaf = table.weight[[VOCABULARY.index(word) for word in raw.split()]].detach().requires_grad_()
    logits, attention_maps, states = CASES[name].replica(model, leaf)
    gradients = torch.autograd.grad(logits[label], [*attention_maps, *states, leaf], allow_unused=True)
    filled = [
        (torch.zeros_like(node) if gradient is None else gradient).numpy()
        for gradient, node in zip(gradients, [*attention_maps, *states, leaf], strict=True)
    ]
    count = len(attention_maps)
    empty = np.empty((0, 0, 0))
    return Seen(
        attention=np.stack([tensor.detach().numpy() for tensor in attention_maps]),
        attention_gradient=np.stack(filled[:count]),
        hidden=np.stack([tensor.detach().numpy() for tensor in states]) if states else empty,
        hidden_gradient=np.stack(filled[count:-1]) if states else empty,
        inputs=leaf.detach().numpy(),
        input_gradient=filled[-1],
        logits=logits.detach().numpy(),
    )
