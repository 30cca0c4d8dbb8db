"""Relevance propagation (Transformer-Explainability) on BERT and ViT, written out from the last operation to the first,
as in section 2.5 of the specification. One sample at a time, without autograd; no code of clearhead is used."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from tests.replicas.weights import weights

EPS = 1e-9


def safe_divide(a: Any, b: Any) -> np.ndarray:
    """0 where b = 0, else a / (b + ε), with ε of fixed sign."""
    a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    below = b + EPS
    below = np.where(below == 0, EPS, below)
    return np.where(b == 0, 0.0, a / below)


def linear(variant: str, r: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    xp, xn, wp, wn = np.maximum(x, 0), np.minimum(x, 0), np.maximum(weight, 0), np.minimum(weight, 0)
    zp, zn = xp @ wp.T, xn @ wn.T
    if variant == "ours":
        s = safe_divide(r, zp + zn)
        return xp * (s @ wp) + xn * (s @ wn)
    return xp * (safe_divide(r, zp) @ wp) + xn * (safe_divide(r, zn) @ wn)


def add(variant: str, r: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = safe_divide(r, a + b)
    to_a, to_b = a * s, b * s
    if variant == "ours":
        sum_a, sum_b, total = to_a.sum(), to_b.sum(), r.sum()
        share_a = safe_divide(abs(sum_a), abs(sum_a) + abs(sum_b)) * total
        share_b = safe_divide(abs(sum_b), abs(sum_a) + abs(sum_b)) * total
        to_a, to_b = to_a * safe_divide(share_a, sum_a), to_b * safe_divide(share_b, sum_b)
    return to_a, to_b


def clone(x: np.ndarray, *branches: np.ndarray) -> np.ndarray:
    return x * sum(safe_divide(r, x) for r in branches)


def product(r: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The relevance of both factors of a matrix product, each halved."""
    s = safe_divide(r, x @ y)
    return x * (s @ y.swapaxes(-1, -2)) / 2, y * (x.swapaxes(-1, -2) @ s) / 2


@dataclass
class RelevanceRecord:
    """P_b of every layer, and the relevance of the encoder input and of the model inputs."""

    maps: list[Float[np.ndarray, "head query key"]] = field(default_factory=list)
    encoder: np.ndarray | None = None
    inputs: np.ndarray | None = None


def _heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def _join_heads(x: np.ndarray) -> np.ndarray:
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def _softmax(scores: np.ndarray) -> np.ndarray:
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


class RecordedForward:
    """The operations of the forward pass of one model, and relevance propagation through attention."""

    def __init__(self, model: Any, variant: str) -> None:
        self.weights = {name: tensor.numpy() for name, tensor in weights(model).items()}
        self.config, self.variant = model.config, variant

    def weight(self, name: str) -> np.ndarray:
        return self.weights[f"{name}.weight"]

    def apply(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weight(name).T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.layer_norm_eps)
        return scaled * self.weight(name) + self.weights[f"{name}.bias"]

    def attend(
        self, names: tuple[str, str, str], x: np.ndarray, mask: np.ndarray | float = 0.0
    ) -> tuple[np.ndarray, ...]:
        count = self.config.num_attention_heads
        q, k, v = (_heads(self.apply(name, x), count) for name in names)
        attention = _softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask)
        return q, k, v, attention, _join_heads(attention @ v)

    def propagate_attention(
        self,
        r: np.ndarray,
        names: tuple[str, str, str],
        x: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        attention: np.ndarray,
        record: RelevanceRecord,
        mask: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Propagate relevance from the joined heads to the inputs of query, key and value, and to an added mask."""
        to_a, to_v = product(_heads(r, len(q)), attention, v)
        record.maps.insert(0, to_a)
        if mask is not None:
            to_a, _ = add(
                self.variant, to_a, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), np.broadcast_to(mask, to_a.shape)
            )
        to_q, to_k = product(to_a, q, k.swapaxes(-1, -2))
        relevances = (to_q, to_k.swapaxes(-1, -2), to_v)
        weights = [self.weight(name) for name in names]
        return [
            linear(self.variant, _join_heads(relevance), x, w) for relevance, w in zip(relevances, weights, strict=True)
        ]


def gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


def bert(model: Any, ids: list[int], label: int, variant: str, mask: list[int] | None = None) -> RelevanceRecord:
    """`mask` is 1 for tokens and 0 for padding; the authors' code adds a mask also where nothing is masked."""
    forward, record = RecordedForward(model, variant), RelevanceRecord()
    hidden = None if mask is None else (1.0 - np.array(mask)) * np.finfo(np.float32).min
    table = "bert.embeddings"
    token = forward.weight(f"{table}.word_embeddings")[ids]
    token_type = forward.weight(f"{table}.token_type_embeddings")[[0] * len(ids)]
    position = forward.weight(f"{table}.position_embeddings")[: len(ids)]
    x = forward.norm(f"{table}.LayerNorm", token + token_type + position)
    layers = []
    for layer in range(model.config.num_hidden_layers):
        at = f"bert.encoder.layer.{layer}"
        names = tuple(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))
        q, k, v, attention, joined = forward.attend(names, x, 0.0 if hidden is None else hidden)
        projected = forward.apply(f"{at}.attention.output.dense", joined)
        middle = forward.norm(f"{at}.attention.output.LayerNorm", projected + x)
        inner = gelu(forward.apply(f"{at}.intermediate.dense", middle))
        outer = forward.apply(f"{at}.output.dense", inner)
        layers.append((at, names, x, q, k, v, attention, joined, projected, middle, inner, outer))
        x = forward.norm(f"{at}.output.LayerNorm", outer + middle)
    pooled = np.tanh(forward.apply("bert.pooler.dense", x[0]))
    r = np.zeros(model.config.num_labels)
    r[label] = 1
    r = linear(variant, r, pooled, forward.weight("classifier"))
    r = linear(variant, r, x[0], forward.weight("bert.pooler.dense"))
    at_tokens = np.zeros_like(x)
    at_tokens[0] = x[0] * safe_divide(r, x[0])
    r = at_tokens
    for at, names, x, q, k, v, attention, joined, projected, middle, inner, outer in reversed(layers):
        to_narrow, skip = add(variant, r, outer, middle)
        branch = linear(variant, to_narrow, inner, forward.weight(f"{at}.output.dense"))
        branch = linear(variant, branch, middle, forward.weight(f"{at}.intermediate.dense"))
        r = clone(middle, branch, skip)
        to_projected, skip = add(variant, r, projected, x)
        branch = linear(variant, to_projected, joined, forward.weight(f"{at}.attention.output.dense"))
        branches = forward.propagate_attention(branch, names, x, q, k, v, attention, record, hidden)
        r = clone(x, clone(x, *branches), skip)
    record.encoder = r
    to_embeddings, _ = add(variant, r, token + token_type, position)
    record.inputs, _ = add(variant, to_embeddings, token, token_type)
    return record


def vit(
    model: Any, pixels: Float[np.ndarray, "channel high wide"], label: int, variant: str, averaged: bool = False
) -> RelevanceRecord:
    """`averaged`: the classifier reads the mean of the patches, and each patch gets all that arrives at the mean, as in
    transformerinterp's code for MAE."""
    forward, record = RecordedForward(model, variant), RelevanceRecord()
    table = "vit.embeddings"
    kernel = forward.weights[f"{table}.patch_embeddings.projection.weight"]
    side = kernel.shape[-1]
    patches = _patches(pixels, side)
    tokens = patches @ kernel.reshape(len(kernel), -1).T + forward.weights[f"{table}.patch_embeddings.projection.bias"]
    tokens = np.concatenate([forward.weights[f"{table}.cls_token"][0], tokens])
    position = forward.weights[f"{table}.position_embeddings"][0]
    x = tokens + position
    layers = []
    for at in (f"vit.layers.{layer}" for layer in range(model.config.num_hidden_layers)):
        names = tuple(f"{at}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        normed = forward.norm(f"{at}.layernorm_before", x)
        q, k, v, attention, joined = forward.attend(names, normed)
        projected = forward.apply(f"{at}.attention.o_proj", joined)
        middle = projected + x
        normed_middle = forward.norm(f"{at}.layernorm_after", middle)
        inner = gelu(forward.apply(f"{at}.mlp.fc1", normed_middle))
        outer = forward.apply(f"{at}.mlp.fc2", inner)
        layers.append(
            (at, names, x, normed, q, k, v, attention, joined, projected, middle, normed_middle, inner, outer)
        )
        x = outer + middle
    last = forward.norm("vit.layernorm", x)
    r = np.zeros(model.config.num_labels)
    r[label] = 1
    read_rows = range(1, len(x)) if averaged else [0]
    r = linear(variant, r, last[read_rows].mean(0), forward.weight("classifier"))
    at_tokens = np.zeros_like(x)
    for i in read_rows:
        at_tokens[i] = last[i] * safe_divide(r, last[i])
    r = at_tokens
    for at, names, x, normed, q, k, v, attention, joined, projected, middle, normed_middle, inner, outer in reversed(
        layers
    ):
        to_narrow, skip = add(variant, r, outer, middle)
        branch = linear(variant, to_narrow, inner, forward.weight(f"{at}.mlp.fc2"))
        branch = linear(variant, branch, normed_middle, forward.weight(f"{at}.mlp.fc1"))
        r = clone(middle, skip, branch)
        to_projected, skip = add(variant, r, projected, x)
        branch = linear(variant, to_projected, joined, forward.weight(f"{at}.attention.o_proj"))
        r = clone(x, skip, sum(forward.propagate_attention(branch, names, normed, q, k, v, attention, record)))
    record.encoder = r
    to_tokens, _ = add(variant, r, tokens, position)
    record.inputs = _propagate_bounded(
        to_tokens[1:], patches, kernel.reshape(len(kernel), -1), pixels.min(), pixels.max()
    )
    return record


def _patches(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the patches, row by row, each as one vector: channel, row, column."""
    _, high, wide = pixels.shape
    return np.array(
        [
            pixels[:, top : top + side, left : left + side].reshape(-1)
            for top in range(0, high, side)
            for left in range(0, wide, side)
        ]
    )


def _propagate_bounded(r: np.ndarray, x: np.ndarray, weight: np.ndarray, low: float, high: float) -> np.ndarray:
    """The z^B rule; a patch convolution is one linear map of each patch."""
    positive, negative = np.maximum(weight, 0), np.minimum(weight, 0)
    lows, highs = np.full_like(x, low), np.full_like(x, high)
    s = r / (x @ weight.T - lows @ positive.T - highs @ negative.T + EPS)
    return x * (s @ weight) - lows * (s @ positive) - highs * (s @ negative)
