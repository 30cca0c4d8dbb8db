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
    changed = np.where(units.special, np.nan, scores)
    if units.boxes is None:
        for row in rows:  # the end of the text: what follows is dropped, and so is the start
            changed[..., [0, *range(row, len(units))]] = np.nan
        with np.errstate(invalid="ignore"):
            changed /= np.nansum(changed, axis=-1, keepdims=True)
    return changed


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
    changed = specials_dropped(scores, units, rows)
    low, high = np.nanmin(changed, axis=-1, keepdims=True), np.nanmax(changed, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (changed - low) / (high - low)


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
    changed = own_entry_least(scores, units, rows)
    low, high = changed.min(-1, keepdims=True), changed.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (changed - low) / (high - low)
