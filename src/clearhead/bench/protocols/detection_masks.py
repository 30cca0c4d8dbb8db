"""Detection masks: masks cut from the explanations of a detector's objects, compared with the annotated masks.

The protocol follows Generic Attention. Every detected object is explained, and its heat map is cut into a mask as the
authors do (`cut` "authors", see `coco_eval.py`) or after upscaling ("after"). Over all images at once, by pycocotools:

    AP, AR                   over IoU thresholds from 0.50 to 0.95, for objects of all sizes, medium and large
    the authors' AP, AR …    over IoU thresholds from 0.20 to 0.95

and for each image `overlap`: the mean over its annotated objects of the best IoU of a mask of their class. Masks are
stored in the table, run-length encoded. Objects that are not detected count as missed; masks of detections that match
no object lower the precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Bool

from clearhead.bench.data import EvidenceMask, Example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    register_protocol,
)
from clearhead.bench.protocols.coco_eval import (
    WIDE_IOU_THRESHOLDS,
    ObjectInstance,
    compute_coco_metrics,
    compute_low_res_mask,
)
from clearhead.bench.rle import decode_rle, encode_rle
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.otsu_mask import compute_otsu_mask

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

MASK_MODES = ("authors", "after")
MaskArray = Bool[np.ndarray, "height width"]


@register_protocol("detections")
@dataclass(frozen=True)
class DetectionMasks(BenchmarkProtocol):
    """Overlap of masks cut from the explanations of detections with the annotated objects.

    Attributes:
        cut: "authors" cuts the heat map into a mask as the authors do, "after" after upscaling.
    """

    description: ClassVar[str] = (
        "Masks cut from the explanations of a detector’s objects, compared with the annotated masks."
    )
    headline_metrics: ClassVar[tuple[str, ...]] = ("overlap",)
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ("overlap",)

    explained: ExplainedClass = "predicted"
    cut: str = "authors"

    def check_settings(self) -> None:
        """Check the settings of all protocols, and that `cut` is one of `MASK_MODES`."""
        super().check_settings()
        if self.cut not in MASK_MODES:
            raise unknown_value_error("value for cut=", self.cut, MASK_MODES)

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure the overlap for each image and store all masks as curves for the COCO metrics."""
        self.check_settings()
        measurements = []
        for method, method_explanations in explanations.items():
            for example, explanation in zip(examples, method_explanations, strict=True):
                true_instances = _list_true_instances(example)
                size = true_instances[0].mask.shape
                detected = [
                    self._make_instance(explainer, detection, size)
                    for detection in _split_detections(explanation["image"])
                ]
                best_ious = [
                    _compute_best_iou(instance, detected) for instance in true_instances if not instance.is_crowd
                ]
                metrics = {
                    "overlap": float(np.mean(best_ious)),
                    "objects": float(len(true_instances)),
                    "found": float(len(detected)),
                }
                curves = {**_instances_to_curves("true", true_instances), **_instances_to_curves("found", detected)}
                measurements.append(Measurement(example.id, method, "image", metrics, curves))
        return measurements

    def compute_dataset_metrics(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Compute COCO's AP and AR, at the authors' and at COCO's IoU thresholds."""
        true_instances = _curves_to_instances("true", measurements)
        detected = _curves_to_instances("found", measurements)
        wide_metrics = compute_coco_metrics(true_instances, detected, WIDE_IOU_THRESHOLDS)
        return {
            **{f"the authors' {name}": value for name, value in wide_metrics.items()},
            **compute_coco_metrics(true_instances, detected),
        }

    def _make_instance(self, explainer: "Explainer", explanation: Explanation, size: tuple[int, int]) -> ObjectInstance:
        """Cut a detection's heat map (authors' rule or Otsu) into a mask of the annotation's size."""
        assert explanation.image is not None
        view_size = (explanation.image.shape[0], explanation.image.shape[1])
        heat_map = explanation.heat_map()
        if self.cut == "authors":
            mask = compute_low_res_mask(heat_map, view_size)
        else:
            mask = compute_otsu_mask(heat_map, *view_size)
        label = explainer.adapter.label_index(explanation.target["label"])
        return ObjectInstance(0, label, _resize_nearest(mask, size), explanation.target["probability"])


def _split_detections(explanation: Explanation) -> list[Explanation]:
    """Return the explanation of each detected object; none if the most confident query detected nothing."""
    if explanation.steps is None:
        detections = [explanation]
    else:
        detections = [explanation.step(step_index) for step_index in range(len(explanation.steps))]
    return [detection for detection in detections if detection.target.get("found")]


def _list_true_instances(example: Example) -> list[ObjectInstance]:
    """List the labelled object masks of an example; an example without them raises `InputError`."""
    items = [item for alternative in example.evidence or () for item in alternative]
    masks = [item for item in items if isinstance(item, EvidenceMask) and item.label is not None]
    if not masks:
        raise InputError(
            f"{example.id!r} has no object masks with classes: use the data set known:shapes-scenes or coco:image"
        )
    return [ObjectInstance(0, int(mask.label or 0), mask.pixels, is_crowd=mask.is_crowd) for mask in masks]


def _compute_best_iou(true_instance: ObjectInstance, detected: Sequence[ObjectInstance]) -> float:
    """Return the best intersection over union of an object with the masks of its class."""
    ious = (
        _compute_mask_iou(true_instance.mask, instance.mask)
        for instance in detected
        if instance.label == true_instance.label
    )
    return max(ious, default=0.0)


def _compute_mask_iou(first: MaskArray, second: MaskArray) -> float:
    """Return the intersection over union of two masks; 0 if both are empty."""
    return float((first & second).sum() / max(1, (first | second).sum()))


def _resize_nearest(mask: MaskArray, size: tuple[int, int]) -> MaskArray:
    """Resize a mask from the model's input size to the image's size by nearest neighbour."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, mask.shape, strict=True))
    return mask[np.ix_(rows, columns)]


def _instances_to_curves(prefix: str, instances: Sequence[ObjectInstance]) -> dict[str, tuple[float, ...]]:
    """Store instances as numbered curves: label, score, crowd flag, and run lengths of the mask."""
    return {
        f"{prefix} {index:03d}": (
            float(instance.label),
            instance.score,
            float(instance.is_crowd),
            *encode_rle(instance.mask),
        )
        for index, instance in enumerate(instances)
    }


def _curves_to_instances(prefix: str, measurements: Sequence[Measurement]) -> list[ObjectInstance]:
    """Rebuild stored instances; the index of a measurement becomes the image index of its instances."""
    return [
        ObjectInstance(image_index, int(label), decode_rle(runs), score, bool(is_crowd))
        for image_index, measurement in enumerate(measurements)
        for name, (label, score, is_crowd, *runs) in sorted(measurement.curves.items())
        if name.startswith(prefix)
    ]
