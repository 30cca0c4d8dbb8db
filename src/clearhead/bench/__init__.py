"""The benchmark: which explanation is true?

A protocol measures, `explaining` explains, `statistics` says how sure we are, `tables` sets side by side.
"""

from clearhead.bench import ray_engine  # noqa: F401  (importing a protocol or engine registers it)
from clearhead.bench.protocols import (  # noqa: F401  (importing a protocol or engine registers it)
    agreement,
    answer_recall,
    detection_masks,
    known_evidence,
    mixing_error,
    perturbation_modalities,
    rationales,
    sanity,
    segmentation,
    sensitivity,
)
from clearhead.bench.protocols.base import PROTOCOLS, Measurement, Protocol, protocol, register

__all__ = ["PROTOCOLS", "Measurement", "Protocol", "protocol", "register"]
