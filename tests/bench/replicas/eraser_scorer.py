"""Reference implementation of ERASER's scorer, from the text of its definition, on its own file format.

Annotations are spans of tokens (document, first token, token after the last), in groups; predictions are hard spans and
a soft score for each token. Everything is macro-averaged over instances: the metrics of each instance first, then its
F1, then the mean.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Span = tuple[str, int, int]


def spans_of(annotation: Mapping[str, Any]) -> set[Span]:
    """The spans of all groups; a span in two groups counts once."""
    return {
        (span["docid"], span["start_token"], span["end_token"])
        for group in annotation["evidences"]
        for span in group
        if span["start_token"] < span["end_token"]
    }


def tokens_of(spans: set[Span]) -> set[tuple[str, int]]:
    return {(document, token) for document, start, stop in spans for token in range(start, stop)}


def _f1(predicted_hits: int, num_predicted: int, gold_hits: int, num_gold: int) -> float:
    precision = predicted_hits / num_predicted if num_predicted else 0.0
    recall = gold_hits / num_gold if num_gold else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def token_f1(gold: Sequence[set[Span]], predicted: Sequence[set[Span]]) -> float:
    """`token_prf.instance_macro.f1`."""
    figures = []
    for true, prediction in zip(gold, predicted, strict=True):
        true_tokens, predicted_tokens = tokens_of(true), tokens_of(prediction)
        hits = len(true_tokens & predicted_tokens)
        figures.append(_f1(hits, len(predicted_tokens), hits, len(true_tokens)))
    return sum(figures) / len(figures)


def iou_f1(gold: Sequence[set[Span]], predicted: Sequence[set[Span]], threshold: float = 0.5) -> float:
    """`iou_scores` at a threshold, macro: a predicted span is a hit by its best overlap with a true span."""
    figures = []
    for true, prediction in zip(gold, predicted, strict=True):
        hits = 0
        for span in prediction:
            best = 0.0
            for other in true:
                if other[0] == span[0]:
                    a, b = set(range(span[1], span[2])), set(range(other[1], other[2]))
                    best = max(best, len(a & b) / len(a | b))
            hits += best >= threshold
        figures.append(_f1(hits, len(prediction), hits, len(true)))
    return sum(figures) / len(figures)


def auprc(gold: Sequence[set[Span]], soft: Sequence[Sequence[float]]) -> float:
    """Token soft scores: trapezoids under precision over recall, for each instance separately."""
    areas = []
    for true, scores in zip(gold, soft, strict=True):
        inside = {token for _, token in tokens_of(true)}
        points = [(0.0, 1.0)]
        for threshold in sorted(set(scores), reverse=True):
            chosen = [token for token, score in enumerate(scores) if score >= threshold]
            hits = sum(token in inside for token in chosen)
            points.append((hits / len(inside), hits / len(chosen)))
        areas.append(sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)))
    return sum(areas) / len(areas)


def aopc(clean: Sequence[float], altered: Sequence[Sequence[float]]) -> float:
    """Comprehensiveness (tokens removed) or sufficiency (only these kept), over thresholds and instances."""
    drops = [sum(p - q for q in qs) / len(qs) for p, qs in zip(clean, altered, strict=True)]
    return sum(drops) / len(drops)
