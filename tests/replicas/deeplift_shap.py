"""DeepLIFT SHAP on a BERT classifier: the mean of DeepLIFT's scores, one reference after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tests.replicas import deeplift


def scores(
    model: Any,
    x: Float[np.ndarray, "token model"],
    references: Sequence[Float[np.ndarray, "token model"]],
    label: int,
) -> Float[np.ndarray, "token"]:
    return np.mean([deeplift.scores(model, x, reference, label) for reference in references], axis=0)
