"""Reference implementation of perturbation metrics: one altered input at a time, sums as loops."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def nested_removals(
    scores: Sequence[float], counts: Sequence[int], direction: str, ties: Sequence[int] | None = None
) -> list[set[int]]:
    """The positions removed at each count; `ties` gives the order of equal scores."""
    indices = list(range(len(scores))) if ties is None else list(ties)
    order = sorted(indices, key=lambda i: scores[i] if direction == "negative" else -scores[i])
    if direction == "keep":
        return [set(order) - set(order[:count]) for count in counts]
    return [set(order[:count]) for count in counts]


def probabilities(logits: Sequence[float]) -> list[float]:
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def trapezoids(x: Sequence[float], y: Sequence[float]) -> float:
    total = 0.0
    for i in range(1, len(x)):
        total += (x[i] - x[i - 1]) * (y[i] + y[i - 1]) / 2
    return total


def figures(logits: Sequence[Sequence[float]], fractions: Sequence[float], judged: int) -> dict[str, float]:
    """The metrics from the logits of the clean input and of each altered one."""
    p = [probabilities(row)[judged] for row in logits]
    is_correct = [1.0 if list(row).index(max(row)) == judged else 0.0 for row in logits]
    drops = [p[0] - after for after in p[1:]]
    x = [0.0, *fractions]
    metrics = {
        "aopc": sum(drops) / len(drops),
        "absolute aopc": sum(abs(drop) for drop in drops) / len(drops),
        "log-odds": sum(math.log(after / p[0]) for after in p[1:]) / len(drops),
    }
    for name, y in (("accuracy", is_correct), ("probability", p)):
        below_one = [i for i in range(len(x)) if x[i] < 1]
        to_nine = [i for i in range(len(x)) if x[i] <= 0.9]
        metrics[f"{name} te"] = trapezoids([x[i] for i in to_nine], [y[i] for i in to_nine])
        metrics[f"{name} bi"] = trapezoids([*(x[i] for i in below_one), 1.0], [*(y[i] for i in below_one), 0.0])
        metrics[f"{name} idl"] = sum(y) / len(y)
        metrics[f"{name} clearhead"] = trapezoids(x, y) / x[-1]
    return metrics


def text_logits(model: Any, ids: Sequence[int], removed: set[int], fill: str, tokens: dict[str, int]) -> list[float]:
    """The logits of one altered text."""
    kept_ids, attention = [], []
    for position, token in enumerate(ids):
        if position not in removed:
            kept_ids.append(token)
            attention.append(1)
        elif fill == "delete":
            continue
        else:
            kept_ids.append(tokens["mask"] if fill == "mask" else tokens["pad"] if "pad" in fill else token)
            attention.append(0 if "attention" in fill else 1)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([kept_ids]), attention_mask=torch.tensor([attention]))
    return [float(value) for value in output.logits[0]]


def image_logits(model: Any, pixels: np.ndarray, removed: np.ndarray, colour: Callable[[int], float]) -> list[float]:
    """The logits of one altered image; `colour` gives the fill value of each channel."""
    altered = pixels.copy()
    for channel in range(len(pixels)):
        for row in range(pixels.shape[1]):
            for column in range(pixels.shape[2]):
                if removed[row, column]:
                    altered[channel, row, column] = colour(channel)
    with torch.no_grad():
        output = model(pixel_values=torch.as_tensor(altered)[None])
    return [float(value) for value in output.logits[0]]


def bilinear(heat: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear upscaling without aligned corners, pixel by pixel."""
    rows, columns = heat.shape
    upscaled = np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max((i + 0.5) * rows / size[0] - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) * columns / size[1] - 0.5, 0), columns - 1)
            top, left = int(y), int(x)
            down, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            a, b = y - top, x - left
            upper = heat[top, left] * (1 - b) + heat[top, right] * b
            lower = heat[down, left] * (1 - b) + heat[down, right] * b
            upscaled[i, j] = upper * (1 - a) + lower * a
    return upscaled
