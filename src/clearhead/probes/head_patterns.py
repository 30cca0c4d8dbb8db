"""What a head looks at: figures of one map, and a name that suggests a reading of it."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.probes.divergences import entropy

#: A head is named after a pattern that takes at least this share of its weight …
MUCH = 0.4
#: … or after its entropy, as a share of the largest.
BROAD = 0.85
#: The patterns that a name is chosen from, and how each is to be read.
READINGS = {
    "previous token": "looks at the unit before: local order, pieces of a word",
    "next token": "looks at the unit after",
    "itself": "looks at its own unit: adds little that the residual stream has not",
    "class token": "looks at the first special token, often a place to put attention that is not needed",
    "separator": "looks at separators, often a place to put attention that is not needed",
    "same word": "looks at other occurrences of the same unit",
    "one unit": "all look at one unit of the input",
    "broad": "spreads over everything, near to an average of all units",
    "mixed": "no pattern takes most of it: look at single inputs",
}


def figures(
    attention: Float[Tensor, "head query key"], special: Bool[Tensor, "key"], names: Sequence[str]
) -> dict[str, Float[Tensor, "head"]]:
    """Shares of each head's weight, its entropy (1 is uniform), and how far away it looks, all as means over rows."""
    queries, n = attention.shape[1:]
    place = torch.arange(n, device=attention.device)
    pools = queries != n  # a query that is no unit is far from all of them
    apart = torch.full((queries, n), n, device=attention.device) if pools else place[None, :] - place[:, None]
    kind = {name: number for number, name in enumerate(dict.fromkeys(names))}
    words = torch.tensor([kind[name] for name in names], device=attention.device)
    twins = torch.zeros_like(apart, dtype=torch.bool) if pools else words[None] == words[:, None]
    twins = twins & (apart != 0) & ~special.to(attention.device)[None]
    first = special & (torch.arange(n) == 0)
    return {
        "previous token": _share(attention, apart == -1),
        "next token": _share(attention, apart == 1),
        "itself": _share(attention, apart == 0),
        "class token": (attention * first.to(attention)).sum(-1).mean(-1),
        "separator": (attention * (special & ~first).to(attention)).sum(-1).mean(-1),
        "same word": _share(attention, twins),
        "one unit": attention.mean(1).masked_fill(special.to(attention.device), 0).amax(-1),
        "sink": attention.mean(1).amax(-1),
        "entropy": entropy(attention).mean(-1) / math.log(n) if n > 1 else torch.zeros(len(attention)),
        "distance": (attention * apart.abs()).sum(-1).mean(-1) * (math.nan if pools else 1),
    }


def _share(attention: Float[Tensor, "head query key"], there: Bool[Tensor, "query key"]) -> Float[Tensor, "head"]:
    """The weight on these keys, mean over the rows that have any; nothing where none has."""
    rows = there.any(-1)
    if not rows.any():
        return attention.new_zeros(len(attention))
    return (attention * there).sum(-1)[:, rows].mean(-1)


def pattern(of_head: Mapping[str, float]) -> str:
    """The name of a head.

    >>> quiet = dict.fromkeys(READINGS, 0.0) | {"entropy": 0.5}
    >>> pattern(quiet | {"previous token": 0.9}), pattern(quiet | {"entropy": 0.95}), pattern(quiet)
    ('previous token', 'broad', 'mixed')
    """
    best = max((name for name in READINGS if name in of_head), key=lambda name: of_head[name])
    if of_head[best] >= MUCH:
        return best
    return "broad" if of_head["entropy"] >= BROAD else "mixed"
