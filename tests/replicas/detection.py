"""Generic Attention and related methods on DETR (relevance.md 2.1, 2.2, 2.4, 2.9.4), one query at a time, with loops.

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
    """Attention and its gradient in the encoder, among queries (`within`) and from queries to the image (`across`)."""

    encoder: Maps
    within: Maps
    across: Maps
    encoder_gradient: Maps
    within_gradient: Maps
    across_gradient: Maps
    pixel_gradient: Float[np.ndarray, "channel height width"]


def watch(model: Any, pixels: Float[Tensor, "1 channel height width"], query: int, label: int) -> Seen:
    eager = copy.deepcopy(model).eval().requires_grad_(True)
    eager.set_attn_implementation("eager")
    leaf = pixels.to(eager.dtype).clone().requires_grad_()
    output = eager(pixel_values=leaf, output_attentions=True)
    kinds = [output.encoder_attentions, output.decoder_attentions, output.cross_attentions]
    maps = [attention_map for kind in kinds for attention_map in kind]
    raw_gradients = torch.autograd.grad(output.logits[0, query, label], [*maps, leaf], allow_unused=True)
    gradients = [torch.zeros_like(m) if g is None else g for m, g in zip([*maps, leaf], raw_gradients, strict=True)]
    counts = [len(kind) for kind in kinds]
    split = np.cumsum([0, *counts])
    attention_lists = [[_plain(m) for m in maps[a:b]] for a, b in pairwise(split)]
    gradient_lists = [[_plain(g) for g in gradients[a:b]] for a, b in pairwise(split)]
    return Seen(*attention_lists, *gradient_lists, _plain(gradients[-1]))


def _plain(tensor: Tensor) -> np.ndarray:
    return tensor[0].detach().double().numpy()


def fused(attention: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Ā = E_h((∇A ⊙ A)⁺), entry by entry."""
    heads, rows, columns = attention.shape
    result = np.zeros((rows, columns))
    for h in range(heads):
        for i in range(rows):
            for j in range(columns):
                result[i, j] += max(attention[h, i, j] * gradient[h, i, j], 0.0) / heads
    return result


def normalised(relevance: np.ndarray) -> np.ndarray:
    """R̄ = R̂ / its row sums + I; a row of zeros stays zero."""
    residual = relevance - np.eye(len(relevance))
    for row in residual:
        if row.sum() != 0:
            row /= row.sum()
    return residual + np.eye(len(relevance))


def generic(seen: Seen, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the query in R_qi and in R_qq without the identity."""
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
        product = np.eye(maps[0].shape[1])
        for attention_map in maps:
            product = (attention_map.mean(0) + np.eye(len(product))) / 2 @ product
        return product

    return (rolled(seen.within).T @ seen.across[-1].mean(0) @ rolled(seen.encoder))[query]


def attention_gradcam(seen: Seen, query: int) -> np.ndarray:
    last, gradient = seen.across[-1], seen.across_gradient[-1]
    return np.mean([gradient[h].mean() * last[h] for h in range(len(last))], axis=0).clip(min=0)[query]
