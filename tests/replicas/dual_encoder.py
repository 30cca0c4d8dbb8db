"""Generic Attention on dual encoders, with matrices and loops: each tower by itself.

    Ā = E_h[(∂y/∂A ⊙ A)⁺],     R ← R + Ā R  from R = I

CLIP's scores are a row of R − I. SigLIP pools its patches with a learned query p, which is cross-attention:

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
    """Return the cosine of one text and one image, and Ā of each call: text, image, and the pooling query."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    text_inputs = {name: tensor for name, tensor in batch.items() if not name.startswith("pixel")}
    recorded: dict[str, list[Tensor]] = {"text": [], "image": []}
    for name, tower in (("text", eager.text_model), ("image", eager.vision_model)):
        # In transformers 5.0 CLIP's towers do not return the attention of their layers; the layers do.
        for layer in tower.encoder.layers:
            layer.self_attn.register_forward_hook(partial(_keep, recorded[name]))
    text, image = eager.text_model(**text_inputs), eager.vision_model(pixel_values=batch["pixel_values"])
    if hasattr(eager, "text_projection"):
        vectors = eager.text_projection(text.pooler_output), eager.visual_projection(image.pooler_output)
    else:
        pooled, attention = pooling(eager.vision_model.head, image.last_hidden_state)
        recorded["probe"] = [attention]
        vectors = text.pooler_output, pooled
    cosine = torch.nn.functional.cosine_similarity(*vectors)[0]
    names = [(name, index) for name, tensors in recorded.items() for index in range(len(tensors))]
    gradients = torch.autograd.grad(cosine, [recorded[name][index] for name, index in names])
    fused: dict[str, list[np.ndarray]] = {name: [] for name in recorded}
    for (name, index), gradient in zip(names, gradients, strict=True):
        fused[name].append(fuse(recorded[name][index][0].detach(), gradient[0]))
    return float(cosine.detach()), fused


def pooling(head: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """SigLIP's pooling head, one attention head after another."""
    weights, biases = head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3)
    inputs = (head.probe, states, states)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weights, biases, strict=True))
    head_dim = head.attention.head_dim
    attention = torch.stack(
        [
            (q[..., start : start + head_dim] @ k[..., start : start + head_dim].mT / head_dim**0.5).softmax(-1)
            for start in range(0, q.shape[-1], head_dim)
        ],
        dim=1,
    )
    heads = [attention[:, i] @ v[..., i * head_dim : (i + 1) * head_dim] for i in range(attention.shape[1])]
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
    for attention_map in maps:
        matrix = matrix + attention_map @ matrix
    return matrix


def pooled_relevance(probe: np.ndarray, maps: list[np.ndarray]) -> np.ndarray:
    """R_pi."""
    residual = relevance(maps) - np.eye(len(maps[0]))
    normalised = np.eye(len(residual))
    for row in range(len(residual)):
        total = residual[row].sum()
        if total:
            normalised[row] += residual[row] / total
    return probe @ normalised
