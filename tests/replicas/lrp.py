"""Layer-wise relevance propagation: Σ_k R_ik over the embedding of a token, or over the pixels of a patch.

With `positions`, relevance is read at the token embeddings, without the part of position and type embeddings; otherwise
it is read at the input of the first layer."""

import math

import numpy as np
from jaxtyping import Float

from tests.replicas.relevance import RelevanceRecord


def scores(record: RelevanceRecord, positions: bool = False, before: int = 0) -> Float[np.ndarray, "unit"]:
    """`before` is the number of special tokens before the patches of an image; they have no pixels."""
    relevance = record.inputs if positions or before else record.encoder
    assert relevance is not None
    return np.array([0.0] * before + [math.fsum(row) for row in relevance])
