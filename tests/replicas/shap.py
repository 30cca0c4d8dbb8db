"""Owen values over a tree of pairs, by their definition: the mean over all orders of the players in which the
players of each group are adjacent."""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

Value = Callable[[Collection[int]], float]
#: A player, or a pair of trees.
Tree = int | tuple["Tree", "Tree"]


def orders(tree: Tree) -> Iterator[list[int]]:
    """Yield every order in which groups are contiguous: each pair in both orders."""
    if isinstance(tree, int):
        yield [tree]
        return
    for first, second in (tree, tree[::-1]):
        for before in orders(first):
            for after in orders(second):
                yield before + after


def scores(players: Sequence[int], value: Value, tree: Tree) -> np.ndarray:
    cache: dict[frozenset[int], float] = {}

    def cached_value(members: Collection[int]) -> float:
        key = frozenset(members)
        if key not in cache:
            cache[key] = value(key)
        return cache[key]

    total, count = dict.fromkeys(players, 0.0), 0
    for order in orders(tree):
        count += 1
        for position, player in enumerate(order):
            total[player] += cached_value(order[: position + 1]) - cached_value(order[:position])
    return np.array([total[player] / count for player in players])
