"""Shapley values by their definition: a player's mean contribution over all orders, size of coalition by size."""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from math import factorial

import numpy as np

Value = Callable[[Collection[int]], float]


def scores(players: Sequence[int], value: Value) -> np.ndarray:
    worth = {
        members: value(members) for size in range(len(players) + 1) for members in combinations(sorted(players), size)
    }
    count, found = len(players), []
    for player in players:
        total = 0.0
        for members, v in worth.items():
            if player not in members:
                weight = factorial(len(members)) * factorial(count - len(members) - 1) / factorial(count)
                total += weight * (worth[tuple(sorted((*members, player)))] - v)
        found.append(total)
    return np.array(found)
