"""Rank agreement pair by pair, and subsets one at a time."""

import math
from collections.abc import Sequence
from itertools import pairwise, permutations


def tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    agree = ties_a = ties_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            pairs += 1
            x, y = (a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])
            agree += x * y
            ties_a += x == 0
            ties_b += y == 0
    return agree / math.sqrt((pairs - ties_a) * (pairs - ties_b))


def ranks(a: Sequence[float]) -> list[float]:
    return [sum(other < own for other in a) + (sum(other == own for other in a) + 1) / 2 for own in a]


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = sum(a) / len(a), sum(b) / len(b)
    both = sum((p - x) * (q - y) for p, q in zip(a, b, strict=True))
    return both / math.sqrt(sum((p - x) ** 2 for p in a) * sum((q - y) ** 2 for q in b))


def rho(a: Sequence[float], b: Sequence[float]) -> float:
    return pearson(ranks(a), ranks(b))


def in_common(a: Sequence[float], b: Sequence[float], top: int) -> float:
    """The share of the highest in common, over all ways in which the ties of both sides may fall."""
    firsts = []
    for own in (a, b):
        orders = permutations(range(len(own)))
        falling = [order for order in orders if all(own[i] >= own[j] for i, j in pairwise(order))]
        firsts.append([set(order[:top]) for order in falling])
    shares = [len(one & other) / top for one in firsts[0] for other in firsts[1]]
    return sum(shares) / len(shares)


def squares(high: int, wide: int, sides: Sequence[int], stride: int) -> list[list[set[tuple[int, int]]]]:
    """By side, the pixels of each square that lies wholly in a picture, row by row."""
    found = []
    for side in sides:
        own = []
        for top in range(0, high, stride):
            if top + side > high:
                break
            for left in range(0, wide, stride):
                if left + side > wide:
                    break
                own.append({(i, j) for i in range(top, top + side) for j in range(left, left + side)})
        found.append(own)
    return found
