"""Run-length encoding of masks as tuples of floats, so that they can be stored in a table like any curve."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool


def encode_rle(mask: Bool[np.ndarray, "height width"]) -> tuple[float, ...]:
    """Encode a mask as height, width and the lengths of alternating runs (False first), in row-major order.

    >>> encode_rle(np.array([[False, True], [True, False]]))
    (2.0, 2.0, 1.0, 2.0, 1.0)
    """
    flat = mask.flatten()
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    leading_zero = [0] if flat[0] else []
    run_ends = np.concatenate([leading_zero, changes, [len(flat)]])
    return (*map(float, mask.shape), *np.diff(run_ends, prepend=0).astype(float).tolist())


def decode_rle(encoded: Sequence[float]) -> Bool[np.ndarray, "height width"]:
    """Decode a mask from `encode_rle`.

    >>> decode_rle((1.0, 3.0, 0.0, 2.0, 1.0))
    array([[ True,  True, False]])
    """
    height, width, *lengths = (int(number) for number in encoded)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(height, width)
