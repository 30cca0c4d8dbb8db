"""Benchmark data sets: examples with labels, licences and evidence, read from local files.

>>> from clearhead.bench.data import load_benchmark_dataset
>>> reviews = load_benchmark_dataset("eraser-movies", split="test", root="../data")     # doctest: +SKIP
>>> reviews[0].input[:20], reviews.licence, len(reviews)                                # doctest: +SKIP

Nothing is downloaded unless a data set of the Hugging Face hub or 20 newsgroups is requested by name.
"""

from clearhead.bench.data import (  # noqa: F401  (importing a reader registers it)
    coco,
    eraser,
    hub,
    imagenet,
    imagenet_segmentation,
    newsgroups,
    pets,
    sentence_sets,
    tiny_imagenet,
    vqa,
    zoo_tasks,
)
from clearhead.bench.data.base import BenchmarkDataset, Example, ExampleLabel
from clearhead.bench.data.evidence import (
    CharSpan,
    EvidenceItem,
    EvidenceMask,
    ImageBox,
    UnitIndex,
    compute_box_coverage,
    compute_evidence_coverage,
    find_evidence_units,
)
from clearhead.bench.data.registry import DATASET_REGISTRY, DatasetSpec, load_benchmark_dataset, register_dataset
from clearhead.bench.data.vqa import compute_soft_scores

__all__ = [
    "DATASET_REGISTRY",
    "BenchmarkDataset",
    "CharSpan",
    "DatasetSpec",
    "EvidenceItem",
    "EvidenceMask",
    "Example",
    "ExampleLabel",
    "ImageBox",
    "UnitIndex",
    "compute_box_coverage",
    "compute_evidence_coverage",
    "compute_soft_scores",
    "find_evidence_units",
    "load_benchmark_dataset",
    "register_dataset",
]
