"""LIME with scikit-learn's ridge, on given coalitions: rows of who is there."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

Value = Callable[[Collection[int]], float]


def scores(
    players: Sequence[int],
    value: Value,
    rows: Sequence[Sequence[bool]],
    width: float | None = None,
    ridge: float = 1.0,
) -> tuple[np.ndarray, float]:
    """The weights of the players, and the intercept."""
    from sklearn.linear_model import Ridge

    known: dict[tuple[int, ...], float] = {}
    worth, weights = [], []
    for row in rows:
        there = tuple(player for player, present in zip(players, row, strict=True) if present)
        known.setdefault(there, 0.0 if there in known else value(there))
        worth.append(known[there])
        cosine = len(there) / (np.sqrt(len(there)) * np.sqrt(len(players))) if there else 0.0
        sigma = 0.25 * np.sqrt(len(players)) if width is None else width
        weights.append(np.exp(-((1 - cosine) ** 2) / sigma**2))
    model = Ridge(alpha=ridge, solver="cholesky").fit(np.array(rows, dtype=float), worth, sample_weight=weights)
    return model.coef_, float(model.intercept_)
