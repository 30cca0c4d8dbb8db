"""Owen values over a tree of pairs, by their definition: the mean over all orders in which each pair's two halves may
come, players of one group never apart."""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

Value = Callable[[Collection[int]], float]
#: A player, or a pair of trees.
Tree = int | tuple["Tree", "Tree"]


def orders(tree: Tree) -> Iterator[list[int]]:
    """Every order that keeps groups together: each pair as it stands, and turned round."""
    if isinstance(tree, int):
        yield [tree]
        return
    for first, second in (tree, tree[::-1]):
        for before in orders(first):
            for after in orders(second):
                yield before + after


def scores(players: Sequence[int], value: Value, tree: Tree) -> np.ndarray:
    known: dict[frozenset[int], float] = {}

    def worth(there: Collection[int]) -> float:
        key = frozenset(there)
        if key not in known:
            known[key] = value(key)
        return known[key]

    total, count = dict.fromkeys(players, 0.0), 0
    for order in orders(tree):
        count += 1
        for place, player in enumerate(order):
            total[player] += worth(order[: place + 1]) - worth(order[:place])
    return np.array([total[player] / count for player in players])
