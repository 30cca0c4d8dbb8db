"""Occlusion: y(x) − y(x without u), one unit after another."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

Value = Callable[[Collection[int]], float]


def scores(players: Sequence[int], value: Value) -> np.ndarray:
    return np.array([value(players) - value([p for p in players if p != player]) for player in players])


def windowed(players: Sequence[int], value: Value, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """The mean over a player's windows of what they lose, per player of a window."""
    found = []
    for player in players:
        own = [window for window in windows if player in window]
        lost = [(value(players) - value([p for p in players if p not in window])) / len(window) for window in own]
        found.append(sum(lost) / len(lost))
    return np.array(found)
