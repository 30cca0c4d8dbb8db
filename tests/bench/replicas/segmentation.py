"""Reference implementation of mask metrics, pixel by pixel."""

from collections.abc import Sequence

import numpy as np


def mask_metrics(values: np.ndarray, inside: np.ndarray, counted: np.ndarray, threshold: float) -> dict[str, float]:
    counts = {"right": 0, "counted": 0, "object both": 0, "object either": 0, "ground both": 0, "ground either": 0}
    rows = []
    for i in range(len(values)):
        row_hits = predicted = actual = 0
        for j in range(values.shape[1]):
            if not counted[i, j]:
                continue
            is_predicted, is_object = bool(values[i, j] > threshold), bool(inside[i, j])
            counts["counted"] += 1
            counts["right"] += is_predicted == is_object
            counts["object both"] += is_predicted and is_object
            counts["object either"] += is_predicted or is_object
            counts["ground both"] += not is_predicted and not is_object
            counts["ground either"] += not is_predicted or not is_object
            row_hits += is_predicted and is_object
            predicted += is_predicted
            actual += is_object
        rows.append(2 * row_hits / (predicted + actual) if predicted + actual else 0.0)
    union = counts["object either"]
    precision = counts["object both"] / max(
        1, counts["right"] - counts["ground both"] + _false_positives(values, inside, counted, threshold)
    )
    recall = counts["object both"] / max(1, int((inside & counted).sum()))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {
        **{name: float(value) for name, value in counts.items()},
        "pixel accuracy": counts["right"] / counts["counted"],
        "iou": counts["object both"] / union if union else 0.0,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "row f1": sum(rows) / len(rows),
    }


def _false_positives(values: np.ndarray, inside: np.ndarray, counted: np.ndarray, threshold: float) -> int:
    return int(((values > threshold) & ~inside & counted).sum())


def best_iou(values: np.ndarray, inside: np.ndarray, counted: np.ndarray) -> float:
    thresholds = [-1.0, *sorted(set(values[counted].tolist()))]
    return max(mask_metrics(values, inside, counted, threshold)["iou"] for threshold in thresholds)


def both_channels(values: np.ndarray, inside: np.ndarray) -> float:
    """The average precision of background and object in one list."""
    scores = [1 - v for v in values] + list(values)
    return average_precision(scores, [not t for t in inside] + [bool(t) for t in inside])


def roc_auc(values: np.ndarray, inside: np.ndarray) -> float:
    """The fraction of pairs in which the object pixel has a higher value than the background pixel; ties count half."""
    won = pairs = 0.0
    for object_value in values[inside]:
        for background_value in values[~inside]:
            pairs += 1
            won += 1.0 if object_value > background_value else 0.5 if object_value == background_value else 0.0
    return won / pairs


def average_precision(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """Average precision, one threshold at a time."""
    total, previous_recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [t for s, t in zip(scores, truth, strict=True) if s >= threshold]
        recall = sum(chosen) / sum(truth)
        total += (recall - previous_recall) * sum(chosen) / len(chosen)
        previous_recall = recall
    return total


def otsu(levels: np.ndarray) -> int:
    best, best_threshold = -1.0, 0
    for threshold in range(256):
        low, high = levels[levels <= threshold].astype(float), levels[levels > threshold].astype(float)
        if not len(low) or not len(high):
            continue
        between = len(low) * len(high) * (low.mean() - high.mean()) ** 2
        if between > best * (1 + 1e-12):
            best, best_threshold = between, threshold
    return best_threshold
