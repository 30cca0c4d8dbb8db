"""COCO average precision of masks (pycocotools), for masks cut from the explanations of a detector.

The heat map of a detection becomes a mask as in Generic Attention's code: it is scaled to 0 … 255, cut at Otsu's
threshold on the feature map's own grid, and upscaled bilinearly, where every pixel above zero is inside. Masks
therefore grow by up to one cell. `compute_otsu_mask` of clearhead.explanation.otsu_mask cuts after upscaling instead.

    COCO_IOU_THRESHOLDS   0.50, 0.55 … 0.95;   WIDE_IOU_THRESHOLDS (the authors')   0.20, 0.25 … 0.95
"""

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float

from clearhead.errors import InputError
from clearhead.explanation.otsu_mask import threshold_otsu

COCO_IOU_THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
WIDE_IOU_THRESHOLDS = tuple(round(0.2 + 0.05 * step, 2) for step in range(16))
#: Reported metrics, by pycocotools' size ranges "all", "medium" and "large".
COCO_METRIC_NAMES = ("AP", "AP medium", "AP large", "AR", "AR medium", "AR large")


@dataclass(frozen=True)
class ObjectInstance:
    """An object in an image: its mask and class, and the detector's score if it was detected.

    Attributes:
        image_index: Index of the image.
        label: Index of the class.
        mask: True inside the object.
        score: Score of a detected object; 1 for an annotated one.
        is_crowd: Whether the mask covers a group of objects.
    """

    image_index: int
    label: int
    mask: Bool[np.ndarray, "height width"]
    score: float = 1.0
    is_crowd: bool = False


def compute_low_res_mask(
    heat_map: Float[np.ndarray, "row column"], size: tuple[int, int]
) -> Bool[np.ndarray, "height width"]:
    """Cut a heat map at Otsu's threshold on its own grid, then upscale the mask bilinearly, as the authors do.

    >>> compute_low_res_mask(np.array([[0.0, 0.0, 1.0]]), (1, 6)).astype(int)
    array([[0, 0, 0, 1, 1, 1]])
    """
    low = np.nanmin(heat_map)
    high = np.nanmax(heat_map)
    if not low < high:
        return np.zeros(size, dtype=bool)
    levels = (np.nan_to_num((heat_map - low) / (high - low)) * 255).astype(np.uint8)
    small_mask = torch.as_tensor((levels > threshold_otsu(levels)).astype(np.float64))[None, None]
    large_mask = torch.nn.functional.interpolate(small_mask, size=size, mode="bilinear", align_corners=False)
    return np.asarray(large_mask[0, 0].numpy() > 0)


def compute_coco_metrics(
    true_instances: Sequence[ObjectInstance],
    detected_instances: Iterable[ObjectInstance],
    iou_thresholds: Sequence[float] = COCO_IOU_THRESHOLDS,
) -> dict[str, float]:
    """Compute COCO's AP and AR of masks; NaN for size ranges without objects."""
    coco_class, coco_eval_class = _import_pycocotools()
    shapes = {instance.image_index: instance.mask.shape for instance in true_instances}
    detected_instances = list(detected_instances)
    unknown_images = {instance.image_index for instance in detected_instances} - set(shapes)
    if unknown_images:
        raise InputError(f"detections in images without ground truth: {sorted(unknown_images)}")
    labels = sorted({instance.label for instance in [*true_instances, *detected_instances]})
    dataset = {
        "images": [
            {"id": image_index, "height": height, "width": width} for image_index, (height, width) in shapes.items()
        ],
        "categories": [{"id": label} for label in labels],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth = _make_coco(coco_class, dataset, true_instances)
        detections = _make_coco(coco_class, dataset, detected_instances)
        evaluator = coco_eval_class(ground_truth, detections, "segm")
        evaluator.params.iouThrs = np.asarray(iou_thresholds)
        evaluator.evaluate()
        evaluator.accumulate()
    precision = evaluator.eval["precision"][..., -1]
    recall = evaluator.eval["recall"][..., -1]
    sizes = [evaluator.params.areaRngLbl.index(name) for name in ("all", "medium", "large")]
    metrics = [_mean_of_valid(values[..., size]) for values in (precision, recall) for size in sizes]
    return dict(zip(COCO_METRIC_NAMES, metrics, strict=True))


def _make_coco(coco_class: Any, dataset: dict[str, Any], instances: Sequence[ObjectInstance]) -> Any:
    """Build an indexed COCO object of pycocotools from instances, without a file."""
    coco = coco_class()
    annotations = [_make_annotation(number, instance) for number, instance in enumerate(instances, 1)]
    coco.dataset = {**dataset, "annotations": annotations}
    coco.createIndex()
    return coco


def _mean_of_valid(values: np.ndarray) -> float:
    """Return the mean without pycocotools' −1 (undefined); NaN if nothing is left."""
    valid = values[values > -1]
    if not valid.size:
        return float("nan")
    return float(valid.mean())


def _make_annotation(number: int, instance: ObjectInstance) -> dict[str, Any]:
    """Encode an instance as a COCO annotation; the mask becomes run lengths, and crowds are ignored."""
    from pycocotools import mask

    run_lengths = mask.encode(np.asfortranarray(instance.mask.astype(np.uint8)))
    return {
        "id": number,
        "image_id": instance.image_index,
        "category_id": instance.label,
        "segmentation": run_lengths,
        "area": float(mask.area(run_lengths)),
        "bbox": mask.toBbox(run_lengths).tolist(),
        "iscrowd": int(instance.is_crowd),
        "ignore": int(instance.is_crowd),
        "score": instance.score,
    }


def _import_pycocotools() -> tuple[Any, Any]:
    """Import `COCO` and `COCOeval`; raise `InputError` with the install command if they are missing."""
    try:
        from pycocotools.coco import COCO as Coco
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise InputError("COCO metrics need pycocotools: pip install 'clearhead[bench]'") from None
    return Coco, COCOeval
