"""Figures of masks, pixel by pixel."""

from collections.abc import Sequence

import numpy as np


def cut(values: np.ndarray, inside: np.ndarray, counted: np.ndarray, threshold: float) -> dict[str, float]:
    n = {"right": 0, "counted": 0, "object both": 0, "object either": 0, "ground both": 0, "ground either": 0}
    rows = []
    for i in range(len(values)):
        both = predicted = true = 0
        for j in range(values.shape[1]):
            if not counted[i, j]:
                continue
            yes, really = bool(values[i, j] > threshold), bool(inside[i, j])
            n["counted"] += 1
            n["right"] += yes == really
            n["object both"] += yes and really
            n["object either"] += yes or really
            n["ground both"] += not yes and not really
            n["ground either"] += not yes or not really
            both += yes and really
            predicted += yes
            true += really
        rows.append(2 * both / (predicted + true) if predicted + true else 0.0)
    union = n["object either"]
    precision = n["object both"] / max(1, n["right"] - n["ground both"] + _wrongly(values, inside, counted, threshold))
    recall = n["object both"] / max(1, int((inside & counted).sum()))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {
        **{name: float(value) for name, value in n.items()},
        "pixel accuracy": n["right"] / n["counted"],
        "iou": n["object both"] / union if union else 0.0,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "row f1": sum(rows) / len(rows),
    }


def _wrongly(values: np.ndarray, inside: np.ndarray, counted: np.ndarray, threshold: float) -> int:
    return int(((values > threshold) & ~inside & counted).sum())


def best_iou(values: np.ndarray, inside: np.ndarray, counted: np.ndarray) -> float:
    tried = [-1.0, *sorted(set(values[counted].tolist()))]
    return max(cut(values, inside, counted, threshold)["iou"] for threshold in tried)


def both_channels(values: np.ndarray, inside: np.ndarray) -> float:
    """The average precision of ground and object in one list."""
    scores = [1 - v for v in values] + list(values)
    return average_precision(scores, [not t for t in inside] + [bool(t) for t in inside])


def roc_auc(values: np.ndarray, inside: np.ndarray) -> float:
    """How often a pixel of the object has more than one of the ground; ties count half."""
    won = pairs = 0.0
    for own in values[inside]:
        for other in values[~inside]:
            pairs += 1
            won += 1.0 if own > other else 0.5 if own == other else 0.0
    return won / pairs


def average_precision(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """Each threshold by itself."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [t for s, t in zip(scores, truth, strict=True) if s >= threshold]
        recall = sum(chosen) / sum(truth)
        total += (recall - before) * sum(chosen) / len(chosen)
        before = recall
    return total


def otsu(levels: np.ndarray) -> int:
    best, found = -1.0, 0
    for threshold in range(256):
        low, high = levels[levels <= threshold].astype(float), levels[levels > threshold].astype(float)
        if not len(low) or not len(high):
            continue
        between = len(low) * len(high) * (low.mean() - high.mean()) ** 2
        if between > best * (1 + 1e-12):
            best, found = between, threshold
    return found
