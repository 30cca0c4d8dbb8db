"""Ensemble: DeepLIFT and gradient length, each divided by its root mean square over content, added."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

Streams = Mapping[str, Float[np.ndarray, "unit"]]


def scores(components: Sequence[Streams], special: Mapping[str, Sequence[bool]]) -> dict[str, np.ndarray]:
    """Combine the scores of several methods, given by stream; special tokens do not count in the size."""
    totals = {stream: np.zeros(len(is_special)) for stream, is_special in special.items()}
    for component in components:
        content = [component[s][i] for s, flags in special.items() for i, flag in enumerate(flags) if not flag]
        size = (sum(x**2 for x in content) / len(content)) ** 0.5
        for stream in totals:
            totals[stream] = totals[stream] + np.asarray(component[stream]) / size
    return totals
