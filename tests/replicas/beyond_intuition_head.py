"""Beyond Intuition (Chen et al., 2023), head-wise, with full matrices: P ← P + Ã P from P = I, then P ⊙ F."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.path_passes import InputEvaluator
from tests.replicas.plain_pass import Seen

Matrix = Float[np.ndarray, "row unit"]


def compute_feedback(evaluator: InputEvaluator, steps: int = 20, heads: Sequence[int] | None = None) -> Matrix:
    """F: mean over the path, clamp, mean over heads – in this order."""
    gradients = [evaluator.compute_attention_gradient(evaluator.x, k / (steps - 1)) for k in range(steps)]
    mean = sum(gradients[1:], gradients[0]) / steps
    mean = mean if heads is None else mean[list(heads)]
    return np.where(mean > 0, mean, 0).mean(0)


def head_weights(seen: Seen, layer: int, heads: Sequence[int]) -> list[float]:
    """θ."""
    weights = []
    for head in heads:
        product = seen.attention[layer, head].T @ seen.attention_gradient[layer, head]
        weights.append(float(np.abs(product).mean()))
    return [weight / sum(weights) for weight in weights]


def matrix(
    seen: Seen,
    feedback: Matrix,
    layers: Sequence[int] = range(3),
    heads: Sequence[int] | None = None,
    perception: str = "head",
) -> Matrix:
    heads = list(range(seen.heads) if heads is None else heads)
    accumulated = np.eye(seen.units)
    for layer in layers:
        weights = head_weights(seen, layer, heads) if perception == "head" else [1 / len(heads)] * len(heads)
        mixed = sum(w * seen.attention[layer, head] for w, head in zip(weights, heads, strict=True))
        accumulated = accumulated + mixed @ accumulated
    return (np.ones_like(accumulated) if perception == "none" else accumulated) * feedback


def scores(
    seen: Seen, feedback: Matrix, readout: Float[np.ndarray, "unit"], **how: object
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(seen, feedback, **how)  # type: ignore[arg-type]
