"""Beyond Intuition (Chen et al., 2023), head-wise, with whole matrices: P ← P + Ã P from P = I, then P ⊙ F."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.path_passes import Walker
from tests.replicas.plain_pass import Seen

Matrix = Float[np.ndarray, "row unit"]


def feedback(walker: Walker, steps: int = 20, heads: Sequence[int] | None = None) -> Matrix:
    """F: mean over the way, clamp, mean over heads – in this order."""
    wishes = [walker.wish(walker.x, k / (steps - 1)) for k in range(steps)]
    mean = sum(wishes[1:], wishes[0]) / steps
    mean = mean if heads is None else mean[list(heads)]
    return np.where(mean > 0, mean, 0).mean(0)


def head_weights(seen: Seen, layer: int, heads: Sequence[int]) -> list[float]:
    """θ."""
    found = []
    for head in heads:
        product = seen.attention[layer, head].T @ seen.attention_gradient[layer, head]
        found.append(float(np.abs(product).mean()))
    return [weight / sum(found) for weight in found]


def matrix(
    seen: Seen,
    wished: Matrix,
    layers: Sequence[int] = range(3),
    heads: Sequence[int] | None = None,
    perception: str = "head",
) -> Matrix:
    heads = list(range(seen.heads) if heads is None else heads)
    perceived = np.eye(seen.units)
    for layer in layers:
        weights = head_weights(seen, layer, heads) if perception == "head" else [1 / len(heads)] * len(heads)
        mixed = sum(w * seen.attention[layer, head] for w, head in zip(weights, heads, strict=True))
        perceived = perceived + mixed @ perceived
    return (np.ones_like(perceived) if perception == "none" else perceived) * wished


def scores(seen: Seen, wished: Matrix, readout: Float[np.ndarray, "unit"], **how: object) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, wished, **how)  # type: ignore[arg-type]
