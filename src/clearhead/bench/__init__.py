"""The benchmark: which explanation is true?

A protocol measures, `explaining` explains, `statistics` says how sure we are, `tables` sets side by side.
"""

from clearhead.bench import (  # noqa: F401 – they register themselves
    agreement,
    answers,
    detections,
    perceptions,
    perturbed,
    rationales,
    ray_engine,
    sanity,
    segmentation,
    subsets,
    truth,
)
from clearhead.bench.protocol import PROTOCOLS, Measurement, Protocol, protocol, register

__all__ = ["PROTOCOLS", "Measurement", "Protocol", "protocol", "register"]
