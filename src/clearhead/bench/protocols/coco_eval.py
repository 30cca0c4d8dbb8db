"""COCO's average precision of masks, by pycocotools, for masks that were made from explanations of a detector.

A map of a detection becomes a mask as the authors of Generic Attention make it: scaled to 0 … 255 and cut at Otsu's
threshold on the feature map's own grid, then scaled up bilinearly, where everything above zero is inside; so masks grow
by up to one cell. `mask_of` of clearhead.explanation.otsu_mask cuts after scaling up instead.

    COCO      overlaps 0.50, 0.55 … 0.95;   AUTHORS   0.20, 0.25 … 0.95
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
from clearhead.explanation.otsu_mask import otsu

COCO = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
AUTHORS = tuple(round(0.2 + 0.05 * step, 2) for step in range(16))
#: What pycocotools counts as small, medium and large, in this order behind "all".
NAMES = ("AP", "AP medium", "AP large", "AR", "AR medium", "AR large")


@dataclass(frozen=True)
class Instance:
    """An object of a picture: its mask and class; the detector's score where it was detected."""

    picture: int
    label: int
    inside: Bool[np.ndarray, "height width"]
    score: float = 1.0
    crowd: bool = False


def authors_mask(heat: Float[np.ndarray, "row column"], size: tuple[int, int]) -> Bool[np.ndarray, "height width"]:
    """
    >>> authors_mask(np.array([[0.0, 0.0, 1.0]]), (1, 6)).astype(int)
    array([[0, 0, 0, 1, 1, 1]])
    """
    low, high = np.nanmin(heat), np.nanmax(heat)
    if not low < high:
        return np.zeros(size, dtype=bool)
    levels = (np.nan_to_num((heat - low) / (high - low)) * 255).astype(np.uint8)
    cut = torch.as_tensor((levels > otsu(levels)).astype(np.float64))[None, None]
    large = torch.nn.functional.interpolate(cut, size=size, mode="bilinear", align_corners=False)
    return np.asarray(large[0, 0].numpy() > 0)


def scores(truth: Sequence[Instance], found: Iterable[Instance], overlaps: Sequence[float] = COCO) -> dict[str, float]:
    """COCOeval of masks; a figure is NaN where no object has the size that it speaks of."""
    coco, evaluate = _pycocotools()
    shapes = {one.picture: one.inside.shape for one in truth}
    found = list(found)
    strangers = {one.picture for one in found} - set(shapes)
    if strangers:
        raise InputError(f"detections in pictures that have no truth: {sorted(strangers)}")
    with contextlib.redirect_stdout(io.StringIO()):
        true, said = coco(), coco()
        labels = sorted({one.label for one in [*truth, *found]})
        images = [{"id": picture, "height": high, "width": wide} for picture, (high, wide) in shapes.items()]
        for made, instances in ((true, truth), (said, found)):
            made.dataset = {
                "images": images,
                "categories": [{"id": label} for label in labels],
                "annotations": [_annotation(number, one) for number, one in enumerate(instances, 1)],
            }
            made.createIndex()
        judge = evaluate(true, said, "segm")
        judge.params.iouThrs = np.asarray(overlaps)
        judge.evaluate()
        judge.accumulate()
    precision, recall = judge.eval["precision"][..., -1], judge.eval["recall"][..., -1]
    sizes = [judge.params.areaRngLbl.index(name) for name in ("all", "medium", "large")]
    figures = [_mean(precision[..., size]) for size in sizes] + [_mean(recall[..., size]) for size in sizes]
    return dict(zip(NAMES, figures, strict=True))


def _mean(values: np.ndarray) -> float:
    told = values[values > -1]
    return float(told.mean()) if told.size else float("nan")


def _annotation(number: int, one: Instance) -> dict[str, Any]:
    from pycocotools import mask

    run_lengths = mask.encode(np.asfortranarray(one.inside.astype(np.uint8)))
    return {
        **{"id": number, "image_id": one.picture, "category_id": one.label, "segmentation": run_lengths},
        **{"area": float(mask.area(run_lengths)), "bbox": mask.toBbox(run_lengths).tolist()},
        **{"iscrowd": int(one.crowd), "ignore": int(one.crowd), "score": one.score},
    }


def _pycocotools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO as Coco
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise InputError("COCO's scores need pycocotools: pip install 'clearhead[bench]'") from None
    return Coco, COCOeval
