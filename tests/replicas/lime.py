"""LIME with scikit-learn's ridge, on given coalitions: rows of booleans, one per player."""

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
    """Return the weights of the players, and the intercept."""
    from sklearn.linear_model import Ridge

    cache: dict[tuple[int, ...], float] = {}
    values, weights = [], []
    for row in rows:
        members = tuple(player for player, present in zip(players, row, strict=True) if present)
        cache.setdefault(members, 0.0 if members in cache else value(members))
        values.append(cache[members])
        cosine = len(members) / (np.sqrt(len(members)) * np.sqrt(len(players))) if members else 0.0
        sigma = 0.25 * np.sqrt(len(players)) if width is None else width
        weights.append(np.exp(-((1 - cosine) ** 2) / sigma**2))
    model = Ridge(alpha=ridge, solver="cholesky").fit(np.array(rows, dtype=float), values, sample_weight=weights)
    return model.coef_, float(model.intercept_)
