"""The figures of truth, unit by unit, from their definitions."""

from collections.abc import Sequence


def of_set(ranked: Sequence[str], true: set[str]) -> dict[str, float]:
    first = 0
    for name in ranked[: len(true)]:
        if name in true:
            first += 1
    precisions, shares, last = [], [], 0
    for place, name in enumerate(ranked):
        if name not in true:
            continue
        last = place + 1
        seen, others_before = 0, 0
        for earlier in ranked[: place + 1]:
            if earlier in true:
                seen += 1
            else:
                others_before += 1
        precisions.append(seen / (place + 1))
        others = len(ranked) - len(true)
        shares.append(others_before / others if others else 0.0)
    return {
        "precision": first / len(true),
        "average precision": sum(precisions) / len(true),
        "rank": sum(shares) / len(true),
        "reach": last / len(ranked),
    }


def of_sets(ranked: Sequence[str], sets: Sequence[set[str]]) -> dict[str, float]:
    union: set[str] = set()
    for one in sets:
        union |= one
    made = {f"sufficient {name}": value for name, value in of_set(ranked, union).items()}
    each = [of_set(ranked, one) for one in sets]
    for name in ("precision", "average precision"):
        made[f"minimal {name}"] = max(one[name] for one in each)
    for name in ("rank", "reach"):
        made[f"minimal {name}"] = min(one[name] for one in each)
    return made
