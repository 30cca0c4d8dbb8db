"""Data sets for benchmarks: examples with their labels, licences and evidence, read where they lie.

>>> import clearhead.bench.data as data
>>> reviews = data.read("eraser-movies", split="test", root="../data")     # doctest: +SKIP
>>> reviews[0].input[:20], reviews.licence, len(reviews)                   # doctest: +SKIP

Nothing is downloaded unless a data set of the hub or 20 newsgroups is asked for by name.
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
from clearhead.bench.data.base import DataSet, Example, Label
from clearhead.bench.data.evidence import Characters, Mask, Piece, Place, Region, evidence_units, shares, shown_in
from clearhead.bench.data.registry import READERS, Reader, read, register
from clearhead.bench.data.vqa import soft_answers

__all__ = [
    "READERS",
    "Characters",
    "DataSet",
    "Example",
    "Label",
    "Mask",
    "Piece",
    "Place",
    "Reader",
    "Region",
    "evidence_units",
    "read",
    "register",
    "shares",
    "shown_in",
    "soft_answers",
]
