"""Saliency (Simonyan et al. 2014): the magnitude of the gradient at a token embedding, or at the pixels of a patch."""

import numpy as np
from jaxtyping import Float

from tests.replicas.input_x_gradient import reduce_vector, unit_vectors
from tests.replicas.plain_pass import Seen


def scores(seen: Seen, patch: int, before: int, reduce: str = "l2") -> Float[np.ndarray, "unit"]:
    return np.array([reduce_vector(vector, reduce) for vector in unit_vectors(seen.input_gradient, patch, before)])
