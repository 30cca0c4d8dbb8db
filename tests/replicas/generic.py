"""Generic Attention (Chefer et al., ICCV 2021), equations 1, 5 and 6: R = I; R ← R + Ā R, layer by layer.
The identity is subtracted at the end, as clearhead defines its scores."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def positive(seen: Seen, layer: int, head: int) -> Float[np.ndarray, "row unit"]:
    """(∇A ⊙ A)⁺ of one head, entry by entry."""
    result = np.zeros((seen.units, seen.units))
    for i in range(seen.units):
        for j in range(seen.units):
            result[i, j] = max(seen.attention_gradient[layer, head, i, j] * seen.attention[layer, head, i, j], 0.0)
    return result


def mean_positive(seen: Seen, layer: int, heads: Sequence[int] | None = None) -> Float[np.ndarray, "row unit"]:
    """Ā of equation 5."""
    heads = range(seen.heads) if heads is None else heads
    return sum((positive(seen, layer, head) for head in heads), np.zeros((seen.units, seen.units))) / len(heads)


def fused(seen: Seen, layer: int, heads: Sequence[int] | None, fusion: str) -> Float[np.ndarray, "row unit"]:
    """Ā with the order of clamp and mean over heads of the paper's code, of Beyond Intuition, and of InterpretDL."""
    if fusion == "clamp-mean":
        return mean_positive(seen, layer, heads)
    chosen_heads = list(range(seen.heads) if heads is None else heads)
    attention, gradient = seen.attention[layer, chosen_heads], seen.attention_gradient[layer, chosen_heads]
    product = sum(attention[h] * gradient[h] for h in range(len(chosen_heads))) / len(chosen_heads)
    if fusion == "separate-means":
        product = attention.mean(0) * gradient.mean(0)
    return np.maximum(product, 0)


def matrix(
    seen: Seen,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    fusion: str = "clamp-mean",
) -> Float[np.ndarray, "row unit"]:
    relevance = np.eye(seen.units)
    for layer in range(seen.layers) if layers is None else layers:
        relevance = relevance + fused(seen, layer, heads, fusion) @ relevance
    return relevance - np.eye(seen.units)


def contributions(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer head unit"]:
    """Π(I + Ā_b) − I telescopes: layer b adds Π_{later}(I + Ā) · Ā_b, and Ā_b is a mean over heads."""
    layers = list(range(seen.layers) if layers is None else layers)
    heads = range(seen.heads) if heads is None else heads
    result = []
    for index, layer in enumerate(layers):
        later = np.eye(seen.units)
        for other in layers[index + 1 :]:
            later = (np.eye(seen.units) + mean_positive(seen, other, heads)) @ later
        result.append([readout @ later @ positive(seen, layer, head) / len(heads) for head in heads])
    return np.array(result)


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    fusion: str = "clamp-mean",
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, layers, heads, fusion)
