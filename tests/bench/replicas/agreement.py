"""Reference implementations of rank agreement and of subset squares, as plain loops."""

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
    return [sum(other < value for other in a) + (sum(other == value for other in a) + 1) / 2 for value in a]


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((p - x) * (q - y) for p, q in zip(a, b, strict=True))
    return covariance / math.sqrt(sum((p - x) ** 2 for p in a) * sum((q - y) ** 2 for q in b))


def rho(a: Sequence[float], b: Sequence[float]) -> float:
    return pearson(ranks(a), ranks(b))


def mean_top_overlap(a: Sequence[float], b: Sequence[float], top: int) -> float:
    """The mean overlap of the top values, over all ways to break the ties of both sides."""
    top_sets = []
    for values in (a, b):
        orders = permutations(range(len(values)))
        sorted_orders = [order for order in orders if all(values[i] >= values[j] for i, j in pairwise(order))]
        top_sets.append([set(order[:top]) for order in sorted_orders])
    overlaps = [len(first & second) / top for first in top_sets[0] for second in top_sets[1]]
    return sum(overlaps) / len(overlaps)


def squares(height: int, width: int, sides: Sequence[int], stride: int) -> list[list[set[tuple[int, int]]]]:
    """For each side length, the pixels of each square that lies inside the image, row by row."""
    squares_by_side = []
    for side in sides:
        current = []
        for top in range(0, height, stride):
            if top + side > height:
                break
            for left in range(0, width, stride):
                if left + side > width:
                    break
                current.append({(i, j) for i in range(top, top + side) for j in range(left, left + side)})
        squares_by_side.append(current)
    return squares_by_side
