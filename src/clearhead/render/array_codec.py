"""Arrays as short text for a page: exact while they are small, in 255 steps where they are large."""

from base64 import b64encode
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

#: Up to so many numbers are kept as they are (four bytes each); more are rounded to 1/127 of the largest.
EXACT = 20_000
#: With more numbers than this an array is left to the file.
LARGEST = 1_100_000
#: The byte that stands for "no score".
_MISSING = -128


def packed(values: Float[np.ndarray, "..."], full: float) -> dict[str, Any]:
    """Shape, type and bytes of an array; `full` is what full colour stands for, and what rounding is measured by.

    >>> packed(np.array([[0.5, -1.0]]), full=1.0)
    {'shape': [1, 2], 'type': 'f4', 'full': 1.0, 'data': 'AAAAPwAAgL8='}
    """
    about = {"shape": list(values.shape), "full": float(full)}
    if values.size <= EXACT:
        return {"shape": about["shape"], "type": "f4", "full": about["full"], "data": _text(values.astype("<f4"))}
    finite = np.isfinite(values)
    top = float(np.abs(values[finite]).max()) if finite.any() else 1.0
    steps = np.where(finite, np.rint(np.where(finite, values, 0.0) / (top or 1.0) * 127), _MISSING).astype(np.int8)
    return {**about, "type": "i1", "step": (top or 1.0) / 127, "data": _text(steps)}


def tiles(weights: UInt8[np.ndarray, "..."]) -> dict[str, Any]:
    """Weights that `quantised` made."""
    return {"shape": list(weights.shape), "type": "u1", "data": _text(weights)}


def quantised(weights: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Shares from 0 to 1 as bytes of their square roots, so that the many small ones of a long input stay apart.

    >>> quantised(np.array([0.0, 0.0001, 1.0])).tolist()
    [0, 3, 255]
    """
    return np.rint(255 * np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))).astype(np.uint8)


def _text(values: np.ndarray) -> str:
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()
