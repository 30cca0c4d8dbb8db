"""Postprocessing of scores in authors' code: entries set to zero, dropped, added or rescaled."""

from collections.abc import Mapping

import numpy as np

from clearhead.units import Units


def zero_readout_unit(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Set the score of the read-out unit to zero."""
    changed = scores.copy()
    changed[..., list(readout_weights)] = 0
    return changed


def drop_special_and_normalise_text(
    scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]
) -> np.ndarray:
    """Drop special tokens, and divide the other scores of a text by their sum."""
    changed = _drop_special_and_outside(scores, units, readout_weights)
    if units.boxes is None:
        with np.errstate(invalid="ignore"):
            changed /= np.nansum(changed, axis=-1, keepdims=True)
    return changed


def drop_outside_and_rescale(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Drop special tokens (of a text also its first token and everything after its end), and rescale to 0…1."""
    return _rescale_to_unit_range(_drop_special_and_outside(scores, units, readout_weights))


def _drop_special_and_outside(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Drop special tokens; of a text also its first token and, if the read-out is its end, all tokens from there on."""
    changed = np.where(units.special, np.nan, scores)
    if units.boxes is None:
        for row in readout_weights:
            changed[..., [0, *range(row or len(units), len(units))]] = np.nan
    return changed


def _rescale_to_unit_range(scores: np.ndarray) -> np.ndarray:
    """Rescale to 0…1; dropped units stay NaN."""
    low = np.fmin.reduce(scores, axis=-1, keepdims=True)
    high = np.fmax.reduce(scores, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (scores - low) / (high - low)


def drop_special(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Set the scores of special tokens to NaN, so that they are neither ranked nor drawn."""
    return np.where(units.special, np.nan, scores)


def add_identity(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Add the identity that Generic Attention starts from."""
    changed = scores.copy()
    for row, weight in readout_weights.items():
        changed[..., row] += weight
    return changed


def drop_special_and_rescale(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Drop special tokens, and rescale the other scores to 0…1."""
    return _rescale_to_unit_range(drop_special(scores, units, readout_weights))


def add_identity_and_drop_special(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Add each read-out unit's weight to its score (R starts as the identity), and set special units to NaN."""
    return drop_special(add_identity(scores, units, readout_weights), units, readout_weights)


def sum_rows_and_drop_special(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Set special units to NaN, and turn the mean of two read-out rows (class token, mean of patches) into their sum.

    The length of the scores stays the same. All other scores are divided by the weight of row 0 in the mean.
    """
    return drop_special(scores, units, readout_weights) / readout_weights.get(0, 1.0)


def set_readout_unit_to_minimum(scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]) -> np.ndarray:
    """Set the score of the read-out unit to the minimum."""
    changed = scores.copy()
    changed[..., list(readout_weights)] = scores.min(-1, keepdims=True)
    return changed


def set_readout_unit_to_minimum_and_rescale(
    scores: np.ndarray, units: Units, readout_weights: Mapping[int, float]
) -> np.ndarray:
    """Set the score of the read-out unit to the minimum, and rescale all scores to 0…1."""
    return _rescale_to_unit_range(set_readout_unit_to_minimum(scores, units, readout_weights))
