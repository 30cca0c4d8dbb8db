"""What ERASER's scorer computes, from the text of its definition, on its own file format.

Annotations name spans of tokens (document, first token, token behind the last), in groups; predictions name hard spans
and a soft score for each token. Everything is macro-averaged over instances: figures of each instance first, then F1
of the instance, then the mean.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Span = tuple[str, int, int]


def spans_of(annotation: Mapping[str, Any]) -> set[Span]:
    """All groups together; a span that stands in two groups is one."""
    return {
        (piece["docid"], piece["start_token"], piece["end_token"])
        for group in annotation["evidences"]
        for piece in group
        if piece["start_token"] < piece["end_token"]
    }


def tokens_of(spans: set[Span]) -> set[tuple[str, int]]:
    return {(document, token) for document, start, stop in spans for token in range(start, stop)}


def _f1(hits_of_found: int, found: int, hits_of_gold: int, gold: int) -> float:
    precision = hits_of_found / found if found else 0.0
    recall = hits_of_gold / gold if gold else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def token_f1(gold: Sequence[set[Span]], found: Sequence[set[Span]]) -> float:
    """`token_prf.instance_macro.f1`."""
    figures = []
    for true, said in zip(gold, found, strict=True):
        true_tokens, said_tokens = tokens_of(true), tokens_of(said)
        hits = len(true_tokens & said_tokens)
        figures.append(_f1(hits, len(said_tokens), hits, len(true_tokens)))
    return sum(figures) / len(figures)


def iou_f1(gold: Sequence[set[Span]], found: Sequence[set[Span]], threshold: float = 0.5) -> float:
    """`iou_scores` at a threshold, macro: a found span hits by its best overlap with a true one of its document."""
    figures = []
    for true, said in zip(gold, found, strict=True):
        hits = 0
        for span in said:
            best = 0.0
            for other in true:
                if other[0] == span[0]:
                    a, b = set(range(span[1], span[2])), set(range(other[1], other[2]))
                    best = max(best, len(a & b) / len(a | b))
            hits += best >= threshold
        figures.append(_f1(hits, len(said), hits, len(true)))
    return sum(figures) / len(figures)


def auprc(gold: Sequence[set[Span]], soft: Sequence[Sequence[float]]) -> float:
    """Token soft scores: trapezoids under precision over recall, each instance by itself."""
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


def aopc(whole: Sequence[float], altered: Sequence[Sequence[float]]) -> float:
    """Comprehensiveness (tokens removed) or sufficiency (only they kept): over thresholds and instances."""
    drops = [sum(p - q for q in qs) / len(qs) for p, qs in zip(whole, altered, strict=True)]
    return sum(drops) / len(drops)
