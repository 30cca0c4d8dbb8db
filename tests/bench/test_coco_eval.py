"""COCO's average precision against a replica written with loops."""

import numpy as np
import pytest

from clearhead.bench.protocols.coco_eval import (
    COCO_IOU_THRESHOLDS,
    WIDE_IOU_THRESHOLDS,
    ObjectInstance,
    compute_coco_metrics,
    compute_low_res_mask,
)
from clearhead.errors import InputError

pytest.importorskip("pycocotools")


def box(left: int, right: int, size: int = 40) -> np.ndarray:
    inside = np.zeros((size, size), dtype=bool)
    inside[:, left:right] = True
    return inside


TRUTH = [
    ObjectInstance(1, 0, box(0, 10)),
    ObjectInstance(1, 0, box(20, 30)),
    ObjectInstance(2, 0, box(5, 25)),
    ObjectInstance(2, 1, box(0, 8)),
]
FOUND = [
    ObjectInstance(1, 0, box(0, 9), 0.9),
    ObjectInstance(1, 0, box(21, 34), 0.8),
    ObjectInstance(1, 0, box(0, 4), 0.7),
    ObjectInstance(2, 0, box(15, 40), 0.6),
    ObjectInstance(2, 1, box(0, 8), 0.5),
    ObjectInstance(2, 1, np.zeros((40, 40), dtype=bool), 0.95),  # a query that was rejected: an empty mask
]


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    return (one & other).sum() / max(1, (one | other).sum())


def replica(label: int, threshold: float) -> tuple[float, float]:
    """Precision at 101 recalls and the last recall: detections by score take the best free object of their picture."""
    truth = [one for one in TRUTH if one.label == label]
    taken: set[int] = set()
    hits = []
    for one in sorted((one for one in FOUND if one.label == label), key=lambda one: -one.score):
        free = [
            (overlap(one.mask, t.mask), i)
            for i, t in enumerate(truth)
            if t.image_index == one.image_index and i not in taken
        ]
        best = max(free, default=(0.0, -1))
        hits.append(best[0] >= threshold)
        taken |= {best[1]} if hits[-1] else set()
    recalls = [sum(hits[: i + 1]) / len(truth) for i in range(len(hits))]
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    at = [
        max([p for p, r in zip(precisions, recalls, strict=True) if r >= step / 100 - 1e-12], default=0.0)
        for step in range(101)
    ]
    return float(np.mean(at)), recalls[-1]


@pytest.mark.parametrize("overlaps", [COCO_IOU_THRESHOLDS, WIDE_IOU_THRESHOLDS])
def test_average_precision_equals_the_replica(overlaps: tuple[float, ...]) -> None:
    expected = [replica(label, threshold) for label in (0, 1) for threshold in overlaps]
    found = compute_coco_metrics(TRUTH, FOUND, overlaps)
    assert found["AP"] == pytest.approx(np.mean([ap for ap, _ in expected]), abs=1e-9)
    assert found["AR"] == pytest.approx(np.mean([recall for _, recall in expected]), abs=1e-9)
    assert np.isnan(found["AP large"])  # no object has more than 96 × 96 pixels


def test_the_authors_thresholds_are_kinder() -> None:
    assert len(WIDE_IOU_THRESHOLDS) == 16 and {0.5, 0.75} <= set(WIDE_IOU_THRESHOLDS) and len(COCO_IOU_THRESHOLDS) == 10
    assert (
        compute_coco_metrics(TRUTH, FOUND, WIDE_IOU_THRESHOLDS)["AP"]
        > compute_coco_metrics(TRUTH, FOUND, COCO_IOU_THRESHOLDS)["AP"]
    )


def test_the_authors_mask_grows_by_part_of_a_cell_and_a_flat_map_has_none() -> None:
    heat = np.zeros((4, 4))
    heat[1, 1] = 1.0
    found = compute_low_res_mask(heat, (32, 32))
    assert found[8:16, 8:16].all() and found.sum() == 16 * 16  # half a cell more on each side
    assert not compute_low_res_mask(np.ones((4, 4)), (8, 8)).any()


def test_detections_in_strange_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="without ground truth"):
        compute_coco_metrics(TRUTH, [ObjectInstance(3, 0, box(0, 1), 0.5)])
