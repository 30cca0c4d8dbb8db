"""What authors do to the scores last: entries zeroed, dropped, added or scaled."""

from collections.abc import Mapping

import numpy as np

from clearhead.units import Units


def own_entry_zero(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The unit whose row is read gets nothing."""
    changed = scores.copy()
    changed[..., list(rows)] = 0
    return changed


def mm_clip_scores(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are dropped; what is left of a text is divided by its sum."""
    changed = _inside(scores, units, rows)
    if units.boxes is None:
        with np.errstate(invalid="ignore"):
            changed /= np.nansum(changed, axis=-1, keepdims=True)
    return changed


def clip_scaled(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are dropped; what is left is brought to 0…1."""
    return _scaled(_inside(scores, units, rows))


def _inside(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """What is special is dropped; of a text also its start, and what follows its end, where that is the row read."""
    changed = np.where(units.special, np.nan, scores)
    if units.boxes is None:
        for row in rows:
            changed[..., [0, *range(row or len(units), len(units))]] = np.nan
    return changed


def _scaled(scores: np.ndarray) -> np.ndarray:
    """Brought to 0…1; what was dropped stays so."""
    low, high = (end.reduce(scores, axis=-1, keepdims=True) for end in (np.fmin, np.fmax))
    with np.errstate(invalid="ignore"):
        return (scores - low) / (high - low)


def specials_dropped(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are cut off."""
    return np.where(units.special, np.nan, scores)


def identity_kept(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The identity, which Generic Attention starts from, stays in the scores."""
    changed = scores.copy()
    for row, weight in rows.items():
        changed[..., row] += weight
    return changed


def specials_dropped_scaled(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are cut off, and the others brought to 0…1."""
    return _scaled(specials_dropped(scores, units, rows))


def with_identity(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The identity, which Generic Attention starts from, stays in the scores; special tokens are cut off."""
    return specials_dropped(identity_kept(scores, units, rows), units, rows)


def rows_added(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The rows of class token and mean are added, where ours are averaged; special tokens are cut off."""
    return specials_dropped(scores, units, rows) / rows.get(0, 1.0)


def own_entry_least(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The unit whose row is read gets the least score of all."""
    changed = scores.copy()
    changed[..., list(rows)] = scores.min(-1, keepdims=True)
    return changed


def own_entry_least_scaled(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The same, and all scores brought to 0…1."""
    return _scaled(own_entry_least(scores, units, rows))
