"""COCO average precision against a reference implementation with loops."""

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
    ObjectInstance(2, 1, np.zeros((40, 40), dtype=bool), 0.95),  # a rejected query: an empty mask
]


def iou(first: np.ndarray, second: np.ndarray) -> float:
    return (first & second).sum() / max(1, (first | second).sum())


def reference_metrics(label: int, threshold: float) -> tuple[float, float]:
    """Mean precision at 101 recalls and the last recall: detections by score match the best free object."""
    truth = [detection for detection in TRUTH if detection.label == label]
    taken: set[int] = set()
    hits = []
    for detection in sorted(
        (detection for detection in FOUND if detection.label == label), key=lambda detection: -detection.score
    ):
        free = [
            (iou(detection.mask, t.mask), i)
            for i, t in enumerate(truth)
            if t.image_index == detection.image_index and i not in taken
        ]
        best = max(free, default=(0.0, -1))
        hits.append(best[0] >= threshold)
        taken |= {best[1]} if hits[-1] else set()
    recalls = [sum(hits[: i + 1]) / len(truth) for i in range(len(hits))]
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    precision_at = [
        max([p for p, r in zip(precisions, recalls, strict=True) if r >= step / 100 - 1e-12], default=0.0)
        for step in range(101)
    ]
    return float(np.mean(precision_at)), recalls[-1]


@pytest.mark.parametrize("overlaps", [COCO_IOU_THRESHOLDS, WIDE_IOU_THRESHOLDS])
def test_average_precision_equals_reference(overlaps: tuple[float, ...]) -> None:
    expected = [reference_metrics(label, threshold) for label in (0, 1) for threshold in overlaps]
    metrics = compute_coco_metrics(TRUTH, FOUND, overlaps)
    assert metrics["AP"] == pytest.approx(np.mean([ap for ap, _ in expected]), abs=1e-9)
    assert metrics["AR"] == pytest.approx(np.mean([recall for _, recall in expected]), abs=1e-9)
    assert np.isnan(metrics["AP large"])  # no object has more than 96 × 96 pixels


def test_wide_thresholds_give_higher_average_precision() -> None:
    assert len(WIDE_IOU_THRESHOLDS) == 16 and {0.5, 0.75} <= set(WIDE_IOU_THRESHOLDS) and len(COCO_IOU_THRESHOLDS) == 10
    assert (
        compute_coco_metrics(TRUTH, FOUND, WIDE_IOU_THRESHOLDS)["AP"]
        > compute_coco_metrics(TRUTH, FOUND, COCO_IOU_THRESHOLDS)["AP"]
    )


def test_low_res_mask_extends_by_half_a_cell_and_is_empty_for_constant_map() -> None:
    heat = np.zeros((4, 4))
    heat[1, 1] = 1.0
    mask = compute_low_res_mask(heat, (32, 32))
    assert mask[8:16, 8:16].all() and mask.sum() == 16 * 16  # half a cell more on each side
    assert not compute_low_res_mask(np.ones((4, 4)), (8, 8)).any()


def test_detections_in_unknown_images_raise() -> None:
    with pytest.raises(InputError, match="without ground truth"):
        compute_coco_metrics(TRUTH, [ObjectInstance(3, 0, box(0, 1), 0.5)])
