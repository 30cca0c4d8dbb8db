"""Reference implementation of ERASER's metrics, on lists of words."""


def token_f1(chosen: set[int], gold: set[int]) -> float:
    hits = 0
    for word in chosen:
        if word in gold:
            hits += 1
    precision = hits / len(chosen) if chosen else 0.0
    recall = hits / len(gold)
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def iou_f1(predicted: list[set[int]], gold: list[set[int]]) -> float:
    hits = 0
    for span in predicted:
        best = 0.0
        for other in gold:
            best = max(best, len(span & other) / len(span | other))
        if best >= 0.5:
            hits += 1
    precision = hits / len(predicted) if predicted else 0.0
    recall = min(1.0, hits / len(gold))
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def runs(chosen: set[int]) -> list[set[int]]:
    spans: list[set[int]] = []
    for word in sorted(chosen):
        if spans and word - 1 in spans[-1]:
            spans[-1].add(word)
        else:
            spans.append({word})
    return spans


def areas(scores: list[float], gold: set[int]) -> tuple[float, float]:
    """Area under precision over recall by trapezoids, and average precision; every score is a threshold."""
    points = []
    for threshold in sorted(set(scores), reverse=True):
        chosen = {word for word, score in enumerate(scores) if score >= threshold}
        hits = len(chosen & gold)
        points.append((hits / len(gold), hits / len(chosen)))
    auprc, average, (recall, precision) = 0.0, 0.0, (0.0, 1.0)
    for next_recall, next_precision in points:
        auprc += (next_recall - recall) * (precision + next_precision) / 2
        average += (next_recall - recall) * next_precision
        recall, precision = next_recall, next_precision
    return auprc, average
