"""Masks as lengths of runs, so that they can lie in a table like any curve."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool


def packed(mask: Bool[np.ndarray, "height width"]) -> tuple[float, ...]:
    """Height, width, and how many pixels are out and in by turns, row by row.

    >>> packed(np.array([[False, True], [True, False]]))
    (2.0, 2.0, 1.0, 2.0, 1.0)
    """
    flat = mask.flatten()
    turns = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    ends = np.concatenate([[0] if flat[0] else [], turns, [len(flat)]])
    return (*map(float, mask.shape), *np.diff(ends, prepend=0).astype(float).tolist())


def unpacked(runs: Sequence[float]) -> Bool[np.ndarray, "height width"]:
    """
    >>> unpacked((1.0, 3.0, 0.0, 2.0, 1.0))
    array([[ True,  True, False]])
    """
    high, wide, *lengths = (int(one) for one in runs)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(high, wide)
