"""Generic Attention and its companions on DETR (relevance.md 2.1, 2.2, 2.4, 2.9.4), one query at a time, with loops.

One plain pass of a copy with eager attention, the maps that the model returns, one `autograd.grad`."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Maps = list[Float[np.ndarray, "head query key"]]


@dataclass(frozen=True)
class Seen:
    """Attention and its gradient in the encoder, and in the decoder among queries and to the picture."""

    encoder: Maps
    within: Maps
    across: Maps
    encoder_gradient: Maps
    within_gradient: Maps
    across_gradient: Maps
    pixel_gradient: Float[np.ndarray, "channel height width"]


def watch(model: Any, pixels: Float[Tensor, "1 channel height width"], query: int, label: int) -> Seen:
    twin = copy.deepcopy(model).eval().requires_grad_(True)
    twin.set_attn_implementation("eager")
    leaf = pixels.to(twin.dtype).clone().requires_grad_()
    output = twin(pixel_values=leaf, output_attentions=True)
    kinds = [output.encoder_attentions, output.decoder_attentions, output.cross_attentions]
    maps = [part for kind in kinds for part in kind]
    found = torch.autograd.grad(output.logits[0, query, label], [*maps, leaf], allow_unused=True)
    gradients = [torch.zeros_like(m) if g is None else g for m, g in zip([*maps, leaf], found, strict=True)]
    counts = [len(kind) for kind in kinds]
    split = np.cumsum([0, *counts])
    taken = [[_plain(m) for m in maps[a:b]] for a, b in pairwise(split)]
    steep = [[_plain(g) for g in gradients[a:b]] for a, b in pairwise(split)]
    return Seen(*taken, *steep, _plain(gradients[-1]))


def _plain(part: Tensor) -> np.ndarray:
    return part[0].detach().double().numpy()


def fused(attention: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Ā = E_h((∇A ⊙ A)⁺), entry by entry."""
    heads, rows, columns = attention.shape
    found = np.zeros((rows, columns))
    for h in range(heads):
        for i in range(rows):
            for j in range(columns):
                found[i, j] += max(attention[h, i, j] * gradient[h, i, j], 0.0) / heads
    return found


def normalised(relevance: np.ndarray) -> np.ndarray:
    """R̄ = R̂ / its row sums + I; a row that is zero stays zero."""
    rest = relevance - np.eye(len(relevance))
    for row in rest:
        if row.sum() != 0:
            row /= row.sum()
    return rest + np.eye(len(relevance))


def generic(seen: Seen, query: int) -> tuple[np.ndarray, np.ndarray]:
    """The query's rows of R_qi and of R_qq without the identity."""
    r_ii = np.eye(seen.encoder[0].shape[1])
    for attention, gradient in zip(seen.encoder, seen.encoder_gradient, strict=True):
        r_ii = r_ii + fused(attention, gradient) @ r_ii
    queries = seen.within[0].shape[1]
    r_qq, r_qi = np.eye(queries), np.zeros((queries, len(r_ii)))
    for layer in range(len(seen.within)):
        within = fused(seen.within[layer], seen.within_gradient[layer])
        r_qq, r_qi = r_qq + within @ r_qq, r_qi + within @ r_qi
        across = fused(seen.across[layer], seen.across_gradient[layer])
        r_qi = r_qi + normalised(r_qq).T @ across @ normalised(r_ii)
    return r_qi[query], (r_qq - np.eye(queries))[query]


def attention(seen: Seen, query: int) -> np.ndarray:
    return seen.across[-1].mean(0)[query]


def rollout(seen: Seen, query: int) -> np.ndarray:
    """R_qqᵀ · E_h A · R_ii, with the last map between them."""

    def rolled(maps: Maps) -> np.ndarray:
        found = np.eye(maps[0].shape[1])
        for one in maps:
            found = (one.mean(0) + np.eye(len(found))) / 2 @ found
        return found

    return (rolled(seen.within).T @ seen.across[-1].mean(0) @ rolled(seen.encoder))[query]


def attention_gradcam(seen: Seen, query: int) -> np.ndarray:
    last, gradient = seen.across[-1], seen.across_gradient[-1]
    return np.mean([gradient[h].mean() * last[h] for h in range(len(last))], axis=0).clip(min=0)[query]
