"""Shapley values by their definition: the mean contribution of a player over all orders."""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from math import factorial

import numpy as np

Value = Callable[[Collection[int]], float]


def scores(players: Sequence[int], value: Value) -> np.ndarray:
    values = {
        members: value(members) for size in range(len(players) + 1) for members in combinations(sorted(players), size)
    }
    count, result = len(players), []
    for player in players:
        total = 0.0
        for members, v in values.items():
            if player not in members:
                weight = factorial(len(members)) * factorial(count - len(members) - 1) / factorial(count)
                total += weight * (values[tuple(sorted((*members, player)))] - v)
        result.append(total)
    return np.array(result)
