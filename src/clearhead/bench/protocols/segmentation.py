"""Segmentation: does the heat map cover the object?

The heat map is upscaled bilinearly to the model's input image, the object's mask is sampled at the same pixels; pixels
that the annotation leaves undecided are ignored. Thresholds, above which values are foreground: `mean` of the map,
`otsu`, `quarter` of the map's range, `raw-quarter` (of the largest value, whatever the smallest is), `best` (the
threshold with the largest IoU for each image: an upper bound).

    pixel accuracy   fraction of pixels that are correct
    iou, f1          of the foreground, per image;   row f1: the mean over rows of the F1 of each row by itself, rows
                     without foreground counting zero, as Beyond Intuition's code computes its mF1
    precision        fraction of the foreground that lies on the object;   recall  fraction of the object that is
                     foreground
    average precision of (1 − m, m) against both classes together, per image (no threshold)
    object average precision, roc auc   of m against the object alone, per image (no threshold)
    pointing         1 where the largest value lies on the object
    inside mass      fraction of the positive relevance (of patches) that falls on the object

InterpretDL's pointing game (`idl-pointing`) is precision, recall and F1 by `raw-quarter`, and the last two metrics. Its
F1 adds 1e-6 to the denominator, which is not copied.

mIoU is not a mean over images: intersections and unions are summed over all images and then divided, for object and
ground, and the two are averaged (`summarise_segmentation`). The counts are therefore reported as metrics, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data import CharSpan, EvidenceMask, Example, ImageBox, UnitIndex
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    argsort_descending,
    register_protocol,
)
from clearhead.bench.protocols.perturbation_modalities import upscale_bilinear
from clearhead.bench.rle import encode_rle
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.otsu_mask import threshold_otsu
from clearhead.units import Box

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

THRESHOLD_RULES = ("mean", "otsu", "quarter", "raw-quarter", "best")
#: Recall levels at which the precision curve is stored.
RECALL_LEVELS = tuple(step / 20 for step in range(21))
MaskArray = Bool[np.ndarray, "height width"]


@register_protocol("segmentation")
@dataclass(frozen=True)
class ObjectSegmentation(BenchmarkProtocol):
    """Overlap of the thresholded heat map with the object.

    Attributes:
        thresholds: Rules by which the heat map becomes a mask; each has its own metrics.
        masks: Whether the masks are stored, run-length encoded.
    """

    description: ClassVar[str] = "Does the heat map cover the object?"
    headline_metrics: ClassVar[tuple[str, ...]] = ("iou, otsu", "f1, raw-quarter", "inside mass")
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = (
        *("pixel accuracy, ", "iou, ", "f1, ", "precision, ", "recall, ", "row f1, "),
        *("average precision", "object average precision", "roc auc", "pointing", "inside mass"),
    )

    explained: ExplainedClass = "predicted"
    thresholds: tuple[str, ...] = ("mean", "otsu", "best")
    masks: bool = False

    def check_settings(self) -> None:
        """Check the settings of all protocols, and the names of the threshold rules."""
        super().check_settings()
        for rule in self.thresholds:
            if rule not in THRESHOLD_RULES:
                raise unknown_value_error("threshold", rule, THRESHOLD_RULES)

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure the streams whose units are patches of an image."""
        self.check_settings()
        measurements = []
        for method, method_explanations in explanations.items():
            for example, explanation in zip(examples, method_explanations, strict=True):
                for stream, stream_explanation in explanation.by_stream.items():
                    if stream_explanation.units.grid is not None and stream_explanation.image is not None:
                        view_box = _find_view_box(explainer.adapter, example.input)
                        metrics, curves = self._measure_example(example, stream_explanation, view_box)
                        measurements.append(Measurement(example.id, method, stream, metrics, curves))
        return measurements

    def compute_dataset_metrics(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Compute pixel accuracy and mIoU for each threshold, summed over all images before dividing."""
        return {
            f"{name}, {rule}": summarise_segmentation(measurements, rule)[name]
            for rule in self.thresholds
            for name in ("pixel accuracy", "mIoU")
        }

    def _measure_example(
        self, example: Example, explanation: Explanation, view_box: Box
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Upscale the heat map to the view, cut it at each threshold, and compare it with the object's mask."""
        assert explanation.image is not None
        size = (explanation.image.shape[0], explanation.image.shape[1])
        object_mask, valid_pixels = build_object_mask(example, size, view_box)
        patch_map = np.nan_to_num(explanation.heat_map())
        pixel_map = upscale_bilinear(patch_map, size)
        values = scale_min_max(pixel_map)
        valid_values = values[valid_pixels]
        valid_object = object_mask[valid_pixels]
        metrics: dict[str, float] = {}
        curves: dict[str, tuple[float, ...]] = {}
        for rule in self.thresholds:
            predicted = threshold_map(pixel_map, object_mask, valid_pixels, rule)
            mask_metrics = compute_mask_metrics(predicted, object_mask, valid_pixels)
            metrics |= {f"{name}, {rule}": value for name, value in mask_metrics.items()}
            if self.masks:
                curves[f"mask, {rule}"] = encode_rle(predicted)
        top_pixel = argsort_descending(values.flatten(), self.seed, example.id)[0]
        metrics |= {
            "average precision": compute_average_precision(valid_values, valid_object),
            **compute_auc_metrics(valid_values, valid_object),
            "pointing": float(object_mask.flatten()[top_pixel]),
            "inside mass": compute_inside_mass(patch_map, object_mask, valid_pixels),
            "object's share": float(valid_object.mean()),
        }
        curves |= {
            "recall": RECALL_LEVELS,
            "precision": compute_precisions_at_recalls(valid_values, valid_object),
        }
        return metrics, curves


@register_protocol("mosaic")
@dataclass(frozen=True)
class MosaicSegmentation(ObjectSegmentation):
    """Mosaics of images of two classes (data `mosaic:pets`): relevance must stay in the cells of the explained class.

    `inside mass` is the fraction of positive relevance in these cells; by chance it is their fraction of the mosaic.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("inside mass", "pointing")

    explained: ExplainedClass = "gold"


def build_object_mask(example: Example, size: tuple[int, int], view_box: Box) -> tuple[MaskArray, MaskArray]:
    """Sample the object's mask at the pixel centres of the model's input image.

    Returns:
        The object's pixels, and the pixels that are not ignored.
    """
    if example.evidence is None:
        raise InputError(f"{example.id!r} has no object mask: choose a data set or split with masks")
    height, width = size
    y = view_box[1] + (np.arange(height) + 0.5) / height * (view_box[3] - view_box[1])
    x = view_box[0] + (np.arange(width) + 0.5) / width * (view_box[2] - view_box[0])
    object_mask = np.zeros(size, dtype=bool)
    ignored = np.zeros(size, dtype=bool)
    for item in (item for alternative in example.evidence for item in alternative):
        if isinstance(item, EvidenceMask):
            rows = (y * item.pixels.shape[0]).astype(int).clip(0, item.pixels.shape[0] - 1)
            columns = (x * item.pixels.shape[1]).astype(int).clip(0, item.pixels.shape[1] - 1)
            object_mask |= item.pixels[np.ix_(rows, columns)]
            if item.ignored_pixels is not None:
                ignored |= item.ignored_pixels[np.ix_(rows, columns)]
        elif isinstance(item, ImageBox):
            x_min, y_min, x_max, y_max = item.box
            object_mask |= np.outer((y > y_min) & (y < y_max), (x > x_min) & (x < x_max))
        elif isinstance(item, CharSpan | UnitIndex):
            continue
    return object_mask, ~ignored | object_mask


def _find_view_box(adapter: Any, example_input: Any) -> Box:
    """Return the visible part of an example's image; a model with several streams has a separate image processor."""
    processor = getattr(adapter.processor, "image_processor", adapter.processor)
    image = example_input["image"] if isinstance(example_input, dict) else example_input
    return compute_view_box(processor, image)


def compute_view_box(processor: Any, image: Any) -> Box:
    """Return the part of an image that the model sees, as fractions; differs from 1 if the processor crops."""
    full_view: Box = (0.0, 0.0, 1.0, 1.0)
    crop = getattr(processor, "crop_size", None)
    if not getattr(processor, "do_center_crop", False) or not crop or not hasattr(image, "size"):
        return full_view
    width, height = image.size if not isinstance(image, np.ndarray) else image.shape[1::-1]
    size = getattr(processor, "size", None) or {}
    if getattr(processor, "do_resize", True):
        if "shortest_edge" in size:
            factor = size["shortest_edge"] / min(width, height)
            width = width * factor
            height = height * factor
        else:
            width = size["width"]
            height = size["height"]
    x_fraction = min(1.0, crop["width"] / width)
    y_fraction = min(1.0, crop["height"] / height)
    return ((1 - x_fraction) / 2, (1 - y_fraction) / 2, (1 + x_fraction) / 2, (1 + y_fraction) / 2)


def scale_min_max(values: Float[np.ndarray, "height width"]) -> Float[np.ndarray, "height width"]:
    """Scale a map to 0 … 1; a constant map becomes 0 everywhere."""
    span = values.max() - values.min()
    if not span:
        return np.zeros_like(values)
    return np.asarray((values - values.min()) / span)


def threshold_map(
    heat_map: Float[np.ndarray, "height width"], object_mask: MaskArray, valid_pixels: MaskArray, rule: str
) -> MaskArray:
    """Cut a heat map at a threshold; only the rule "best" uses the object's mask."""
    if rule == "raw-quarter":
        return heat_map > 0.25 * heat_map.max()
    values = scale_min_max(heat_map)
    if rule == "best":
        return values > find_best_threshold(values[valid_pixels], object_mask[valid_pixels])
    if rule == "otsu":
        levels = (values * 255).astype(np.uint8)
        return levels > threshold_otsu(levels)
    if rule == "mean":
        return values > values.mean()
    return values > 0.25


def compute_mask_metrics(predicted: MaskArray, object_mask: MaskArray, valid_pixels: MaskArray) -> dict[str, float]:
    """Compute accuracy, IoU, F1, precision and recall of a mask, and the counts that `summarise_segmentation` sums."""
    foreground = predicted & valid_pixels
    background = ~predicted & valid_pixels
    intersection = (foreground & object_mask).sum()
    union = (foreground | (object_mask & valid_pixels)).sum()
    ground_intersection = (background & ~object_mask).sum()
    ground_union = (background | (~object_mask & valid_pixels)).sum()
    num_correct = intersection + ground_intersection
    num_foreground = foreground.sum()
    num_object = (object_mask & valid_pixels).sum()
    return {
        "pixel accuracy": float(num_correct / valid_pixels.sum()),
        "iou": _divide_or_zero(intersection, union),
        "f1": _divide_or_zero(2 * intersection, intersection + union),
        "precision": _divide_or_zero(intersection, num_foreground),
        "recall": _divide_or_zero(intersection, num_object),
        "row f1": compute_row_f1(foreground, object_mask & valid_pixels),
        "right": float(num_correct),
        "counted": float(valid_pixels.sum()),
        "object both": float(intersection),
        "object either": float(union),
        "ground both": float(ground_intersection),
        "ground either": float(ground_union),
    }


def _divide_or_zero(numerator: Any, denominator: Any) -> float:
    """Divide; 0 if the denominator is 0."""
    return float(numerator / denominator) if denominator else 0.0


def find_best_threshold(values: Float[np.ndarray, "pixel"], object_mask: Bool[np.ndarray, "pixel"]) -> float:
    """Find the threshold whose foreground, the pixels above it, has the largest IoU with the object."""
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    intersection = np.cumsum(object_mask[order])
    union = np.arange(1, len(order) + 1) + object_mask.sum() - intersection
    is_cut = np.append(ranked[1:] < ranked[:-1], True)  # pixels of equal value are on the same side
    ious = np.where(is_cut, intersection / np.maximum(union, 1), -1.0)
    best = int(ious.argmax())
    return float(ranked[best + 1]) if best + 1 < len(ranked) else -np.inf


def compute_row_f1(predicted: MaskArray, object_mask: MaskArray) -> float:
    """Compute the mean over rows of the F1 of each row."""
    intersections = (predicted & object_mask).sum(1)
    sums = predicted.sum(1) + object_mask.sum(1)
    return float(np.divide(2 * intersections, sums, out=np.zeros(len(sums)), where=sums > 0).mean())


def compute_average_precision(values: Float[np.ndarray, "pixel"], object_mask: Bool[np.ndarray, "pixel"]) -> float:
    """Compute the average precision of (1 − m, m) against ground and object together."""
    from sklearn.metrics import average_precision_score

    return float(
        average_precision_score(np.concatenate([~object_mask, object_mask]), np.concatenate([1 - values, values]))
    )


def compute_auc_metrics(values: Float[np.ndarray, "pixel"], object_mask: Bool[np.ndarray, "pixel"]) -> dict[str, float]:
    """Compute threshold-free separation of object and ground; NaN if only one of them is present."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    if object_mask.all() or not object_mask.any():
        return {"object average precision": float("nan"), "roc auc": float("nan")}
    return {
        "object average precision": float(average_precision_score(object_mask, values)),
        "roc auc": float(roc_auc_score(object_mask, values)),
    }


def compute_inside_mass(
    heat_map: Float[np.ndarray, "row column"], object_mask: MaskArray, valid_pixels: MaskArray
) -> float:
    """Return the fraction of positive relevance on the object, each patch spread evenly; NaN without relevance."""
    rows, columns = (
        (np.arange(size) * num_patches // size)
        for size, num_patches in zip(object_mask.shape, heat_map.shape, strict=True)
    )
    mass = np.maximum(heat_map, 0)[np.ix_(rows, columns)] * valid_pixels
    if not mass.sum() > 0:
        return float("nan")
    return float((mass * object_mask).sum() / mass.sum())


def compute_precisions_at_recalls(
    values: Float[np.ndarray, "pixel"], object_mask: Bool[np.ndarray, "pixel"]
) -> tuple[float, ...]:
    """Return the best precision at each of `RECALL_LEVELS` or beyond."""
    from sklearn.metrics import precision_recall_curve

    if not object_mask.any():
        return (0.0,) * len(RECALL_LEVELS)
    precision, recall, _ = precision_recall_curve(object_mask, values)
    return tuple(float(precision[recall >= level - 1e-12].max()) for level in RECALL_LEVELS)


def summarise_segmentation(measurements: Iterable[Measurement], rule: str = "mean") -> dict[str, float]:
    """Compute the metrics of a whole data set for one method: counts are summed before dividing."""
    rows: list[Mapping[str, float]] = [measurement.figures for measurement in measurements]
    eps = np.finfo(float).eps

    def compute_total(name: str) -> float:
        return float(sum(row[f"{name}, {rule}"] for row in rows))

    def compute_mean(name: str) -> float:
        return float(np.nanmean([row[name] for row in rows]))

    ious = [
        compute_total(f"{region} both") / (compute_total(f"{region} either") + eps) for region in ("object", "ground")
    ]
    return {
        "pixel accuracy": compute_total("right") / compute_total("counted"),
        "mIoU": float(sum(ious) / 2),
        "mAP": compute_mean("average precision"),
        "F1": compute_mean(f"f1, {rule}"),
        "row F1": compute_mean(f"row f1, {rule}"),
        "pointing": compute_mean("pointing"),
        "inside mass": compute_mean("inside mass"),
    }
