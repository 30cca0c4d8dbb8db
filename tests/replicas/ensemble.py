"""Ensemble: DeepLIFT and gradient length, each divided by its root mean square, added."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

Streams = Mapping[str, Float[np.ndarray, "unit"]]


def scores(components: Sequence[Streams]) -> dict[str, np.ndarray]:
    """Combine the scores of several methods, given by stream; all streams have one size."""
    totals = {stream: np.zeros(len(own)) for stream, own in components[0].items()}
    for component in components:
        values = [x for own in component.values() for x in own]
        size = (sum(x**2 for x in values) / len(values)) ** 0.5
        for stream in totals:
            totals[stream] = totals[stream] + np.asarray(component[stream]) / size
    return totals
