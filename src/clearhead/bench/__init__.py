"""Benchmarks of explanations: protocols, data sets, and runs that measure methods on them.

`runner` runs a job, `protocols` measure explanations, `data` loads examples, `run_results`, `tables`, `export` and
`report_page` present the results of a finished run.
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
from clearhead.bench.protocols.base import (
    PROTOCOL_REGISTRY,
    BenchmarkProtocol,
    Measurement,
    make_protocol,
    register_protocol,
)

__all__ = ["PROTOCOL_REGISTRY", "BenchmarkProtocol", "Measurement", "make_protocol", "register_protocol"]
