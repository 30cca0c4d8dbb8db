"""Generic Attention on dual encoders, slowly: each tower by itself, with matrices and loops.

    Ā = E_h[(∂y/∂A ⊙ A)⁺],     R ← R + Ā R  from R = I

CLIP's scores are a row of R − I. SigLIP pools its patches with one query p of its own, which is cross-attention:

    R_pi = Ā_pi · R̄_ii,     R̄ = (R − I) / (row sums of R − I) + I
"""

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _keep(maps: list[Tensor], module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
    maps.append(output[1])


def maps_of(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, list[np.ndarray]]]:
    """The cosine of one text and one picture, and Ā of each call: of text, of image, and of the query that pools."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    words = {name: part for name, part in batch.items() if not name.startswith("pixel")}
    used: dict[str, list[Tensor]] = {"text": [], "image": []}
    for name, tower in (("text", eager.text_model), ("image", eager.vision_model)):
        # In transformers 5.0 CLIP's towers do not return the attention of their layers; the layers do.
        for layer in tower.encoder.layers:
            layer.self_attn.register_forward_hook(partial(_keep, used[name]))
    text, image = eager.text_model(**words), eager.vision_model(pixel_values=batch["pixel_values"])
    if hasattr(eager, "text_projection"):
        vectors = eager.text_projection(text.pooler_output), eager.visual_projection(image.pooler_output)
    else:
        pooled, attention = pooling(eager.vision_model.head, image.last_hidden_state)
        used["probe"] = [attention]
        vectors = text.pooler_output, pooled
    cosine = torch.nn.functional.cosine_similarity(*vectors)[0]
    names = [(name, place) for name, parts in used.items() for place in range(len(parts))]
    gradients = torch.autograd.grad(cosine, [used[name][place] for name, place in names])
    fused: dict[str, list[np.ndarray]] = {name: [] for name in used}
    for (name, place), gradient in zip(names, gradients, strict=True):
        fused[name].append(fuse(used[name][place][0].detach(), gradient[0]))
    return float(cosine.detach()), fused


def pooling(head: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """SigLIP's pooling head, head by head."""
    weights, biases = head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3)
    given = (head.probe, states, states)
    q, k, v = (part @ w.T + b for part, w, b in zip(given, weights, biases, strict=True))
    wide = head.attention.head_dim
    attention = torch.stack(
        [
            (q[..., start : start + wide] @ k[..., start : start + wide].mT / wide**0.5).softmax(-1)
            for start in range(0, q.shape[-1], wide)
        ],
        dim=1,
    )
    heads = [attention[:, i] @ v[..., i * wide : (i + 1) * wide] for i in range(attention.shape[1])]
    pooled = head.attention.out_proj(torch.cat(heads, dim=-1))
    return (pooled + head.mlp(head.layernorm(pooled)))[:, 0], attention


def fuse(attention: Tensor, gradient: Tensor) -> np.ndarray:
    heads, rows, columns = attention.shape
    fused = np.zeros((rows, columns))
    for h in range(heads):
        for i in range(rows):
            for j in range(columns):
                fused[i, j] += max(0.0, float(attention[h, i, j]) * float(gradient[h, i, j])) / heads
    return fused


def relevance(maps: list[np.ndarray]) -> np.ndarray:
    """R of one tower."""
    matrix = np.eye(len(maps[0]))
    for one in maps:
        matrix = matrix + one @ matrix
    return matrix


def pooled_relevance(probe: np.ndarray, maps: list[np.ndarray]) -> np.ndarray:
    """R_pi."""
    gathered = relevance(maps) - np.eye(len(maps[0]))
    normalised = np.eye(len(gathered))
    for row in range(len(gathered)):
        total = gathered[row].sum()
        if total:
            normalised[row] += gathered[row] / total
    return probe @ normalised
