"""A direction put to the test: found without a share of the vectors, and tried on that share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.concepts.densray import Vectors, densray, densray_of_numbers, pooled, two_sets
from clearhead.concepts.directions import Direction, HeldOut
from clearhead.errors import InputError


def held_out(
    first: Vectors,
    second: Vectors,
    *,
    groups: tuple[Sequence[Any], Sequence[Any]] | None = None,
    share: float = 0.25,
    seed: int = 0,
    find: Any = densray,
    **how: Any,
) -> Direction:
    """The direction of all vectors, tested: the same is found without a share of them, and tried on that share.

    groups: what may not be torn apart, one for each vector of each set: the word it stands for, or the sentence it and
    its counterfactual come from. Otherwise a word that was seen is tested by its own twin.
    find: another function of two sets, such as `hard_direction`
    """
    first, second = two_sets(first, second, how.get("names", ("first", "second")))
    sides = groups or (range(len(first)), range(len(first), len(first) + len(second)))
    if [len(side) for side in sides] != [len(first), len(second)]:
        raise InputError("groups= must name one group for each vector of each of the two sets")
    whole = find(first, second, **how)
    out = _drawn(sides, share, seed)
    fewer = {"few": True} if find is densray else {}  # the whole has enough: what is left of it need not
    tried = find(first[~out[0]], second[~out[1]], **{**how, **fewer})
    return replace(whole, tested=measured(tried, first[out[0]], second[out[1]]))


def held_out_of_numbers(
    vectors: Vectors, labels: Float[Tensor, "vector"], *, share: float = 0.25, seed: int = 0, **how: Any
) -> Direction:
    """The same for labels that are numbers: the correlation (Pearson's) of scores and labels on what was held out."""
    found = densray_of_numbers(vectors, labels, **how)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
    count = max(2, round(share * len(vectors)))
    out, kept = order[:count], order[count:]
    labels = torch.as_tensor(labels).double()
    tried = densray_of_numbers(vectors[kept], labels[kept], **{**how, "few": True})
    both = torch.stack([tried.score(vectors[out].double()).cpu(), labels[out].cpu()])
    return replace(found, tested=HeldOut(None, float(torch.corrcoef(both)[0, 1]), count))


def measured(direction: Direction, first: Vectors, second: Vectors) -> HeldOut:
    """How often the score has the sign of its class (both classes count the same), and Cohen's d."""
    one, other = direction.score(first.double()), direction.score(second.double())
    accuracy = float(((one > 0).double().mean() + (other < 0).double().mean()) / 2)
    effect = (one.mean() - other.mean()) / pooled(one[:, None], other[:, None])[0]
    return HeldOut(accuracy, float(effect), len(first) + len(second))


def _drawn(sides: tuple[Sequence[Any], Sequence[Any]], share: float, seed: int) -> list[Bool[Tensor, "vector"]]:
    """Which vectors of each set are held out: whole groups, until both sets have about that share."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys([*sides[0], *sides[1]]))}
    members = [torch.tensor([numbers[group] for group in side]) for side in sides]
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    out = []
    for side in members:
        ranks = rank[side]
        wanted = max(1, round(share * len(side)))
        limit = ranks.sort().values[wanted - 1]
        out.append(ranks <= limit)
    # a group that one set holds out is held out by the other, too
    gone = torch.zeros(len(numbers), dtype=torch.bool)
    for side, own in zip(members, out, strict=True):
        gone[side[own]] = True
    found = [gone[side] for side in members]
    if any(one.all() for one in found):
        raise InputError("holding out whole groups leaves one set empty: give more groups, or a smaller share")
    return found
