"""Occlusion: y(x) − y(x without u), one unit after another."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

Value = Callable[[Collection[int]], float]


def scores(players: Sequence[int], value: Value) -> np.ndarray:
    return np.array([value(players) - value([p for p in players if p != player]) for player in players])


def windowed(players: Sequence[int], value: Value, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return for each player the mean over its windows of the lost value, divided by the size of the window."""
    result = []
    for player in players:
        player_windows = [window for window in windows if player in window]
        differences = [
            (value(players) - value([p for p in players if p not in window])) / len(window) for window in player_windows
        ]
        result.append(sum(differences) / len(differences))
    return np.array(result)
