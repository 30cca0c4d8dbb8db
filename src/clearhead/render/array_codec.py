"""Encodes arrays as base64 text for HTML pages: small ones exactly, large ones quantised to 255 levels."""

from base64 import b64encode
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

#: Arrays of up to this size are stored as float32; larger ones are rounded to 1/127 of the largest value.
MAX_EXACT_ELEMENTS = 20_000
#: Larger arrays are not embedded in a page; they are in the explanation's file.
MAX_EMBEDDED_ELEMENTS = 1_100_000
#: The byte that stands for "no score".
_NO_SCORE_BYTE = -128


def encode_array(values: Float[np.ndarray, "..."], vmax: float) -> dict[str, Any]:
    """Encode an array of scores.

    Args:
        values: The scores; NaN means "no score".
        vmax: The score of full colour.

    Returns:
        The array's shape, dtype, score of full colour and base64 data, ready for JSON.

    Example:
        >>> encode_array(np.array([[0.5, -1.0]]), vmax=1.0)
        {'shape': [1, 2], 'dtype': 'f4', 'vmax': 1.0, 'data': 'AAAAPwAAgL8='}
    """
    shape = list(values.shape)
    if values.size <= MAX_EXACT_ELEMENTS:
        return {"shape": shape, "dtype": "f4", "vmax": float(vmax), "data": _to_base64(values.astype("<f4"))}
    is_finite = np.isfinite(values)
    largest = 1.0
    if is_finite.any():
        largest = float(np.abs(values[is_finite]).max()) or 1.0
    levels = np.where(is_finite, np.rint(np.where(is_finite, values, 0.0) / largest * 127), _NO_SCORE_BYTE)
    return {
        "shape": shape,
        "vmax": float(vmax),
        "dtype": "i1",
        "quantisation_step": largest / 127,
        "data": _to_base64(levels.astype(np.int8)),
    }


def encode_weight_bytes(weights: UInt8[np.ndarray, "..."]) -> dict[str, Any]:
    """Encode weights that `quantise_sqrt` quantised."""
    return {"shape": list(weights.shape), "dtype": "u1", "data": _to_base64(weights)}


def quantise_sqrt(weights: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Quantise weights from 0 to 1 to bytes of their square roots, which keeps small weights distinguishable.

    Args:
        weights: Weights of any shape. NaN becomes 0, and values outside 0…1 are clipped.

    Returns:
        Bytes of the same shape: 255 √w, rounded.

    Example:
        >>> quantise_sqrt(np.array([0.0, 0.0001, 1.0])).tolist()
        [0, 3, 255]
    """
    return np.rint(255 * np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))).astype(np.uint8)


def _to_base64(values: np.ndarray) -> str:
    """Encode the bytes of an array, in row-major order, as base64 text."""
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()
