"""Reference implementation of the known-evidence metrics, unit by unit."""

from collections.abc import Sequence


def metrics_of_set(ranked: Sequence[str], true: set[str]) -> dict[str, float]:
    hits = 0
    for name in ranked[: len(true)]:
        if name in true:
            hits += 1
    precisions, ranks, reach = [], [], 0
    for index, name in enumerate(ranked):
        if name not in true:
            continue
        reach = index + 1
        hits_before, others_before = 0, 0
        for earlier in ranked[: index + 1]:
            if earlier in true:
                hits_before += 1
            else:
                others_before += 1
        precisions.append(hits_before / (index + 1))
        others = len(ranked) - len(true)
        ranks.append(others_before / others if others else 0.0)
    return {
        "precision": hits / len(true),
        "average precision": sum(precisions) / len(true),
        "rank": sum(ranks) / len(true),
        "reach": reach / len(ranked),
    }


def metrics_of_sets(ranked: Sequence[str], sets: Sequence[set[str]]) -> dict[str, float]:
    union: set[str] = set()
    for each_set in sets:
        union |= each_set
    metrics = {f"sufficient {name}": value for name, value in metrics_of_set(ranked, union).items()}
    by_set = [metrics_of_set(ranked, each_set) for each_set in sets]
    for name in ("precision", "average precision"):
        metrics[f"minimal {name}"] = max(each_set[name] for each_set in by_set)
    for name in ("rank", "reach"):
        metrics[f"minimal {name}"] = min(each_set[name] for each_set in by_set)
    return metrics
