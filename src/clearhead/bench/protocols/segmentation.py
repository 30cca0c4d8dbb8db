"""Segmentation: does the heat map cover the object?

The heat map is scaled up bilinearly to the size of what the model saw, the object's mask is taken at the same pixels;
unclear pixels are left out. Thresholds: `mean` of the map (foreground is what lies above), `otsu`, `quarter` of the
map's range, `raw-quarter` (of the largest value, whatever the smallest is), `best` (of all thresholds the one with the
largest overlap, for each picture: an upper bound).

    pixel accuracy   share of pixels that are right
    iou, f1          of the foreground, in each picture;   row f1: the mean over rows of the F1 of each row by itself,
                     rows without foreground counting zero, as Beyond Intuition's code computes its mF1
    precision        share of the foreground that lies on the object;   recall  share of the object that is foreground
    average precision of (1 − m, m) against the two classes together, per picture (no threshold)
    object average precision, roc auc   of m against the object alone, per picture (no threshold)
    pointing         1 where the largest value lies on the object
    inside mass      share of the positive relevance (of patches) that falls on the object

InterpretDL's pointing game (`idl-pointing`) is precision, recall and F1 by `raw-quarter`, and the last two. Its F1 has
1e-6 more in the denominator, which is not copied.

mIoU is no mean over pictures: intersections and unions are summed over all pictures and then divided, for object and
ground, and the two averaged (`summary`). So the counts are figures, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data import Characters, Example, Mask, Place, Region
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, ranking, register
from clearhead.bench.protocols.perturbation_modalities import scaled_up
from clearhead.bench.rle import packed
from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.otsu_mask import otsu
from clearhead.units import Box

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

THRESHOLDS = ("mean", "otsu", "quarter", "raw-quarter", "best")
#: Recalls at which the curve of precision is kept.
RECALLS = tuple(step / 20 for step in range(21))
Grid = Bool[np.ndarray, "height width"]


@register("segmentation")
@dataclass(frozen=True)
class Segmentation(Protocol):
    """`masks` True keeps what each threshold cut out, packed as lengths of runs."""

    about: ClassVar[str] = "Does the heat map cover the object?"
    headline: ClassVar[tuple[str, ...]] = ("iou, otsu", "f1, raw-quarter", "inside mass")

    explained: Explained = "predicted"
    thresholds: tuple[str, ...] = ("mean", "otsu", "best")
    masks: bool = False

    def check(self) -> None:
        super().check()
        for one in self.thresholds:
            if one not in THRESHOLDS:
                raise unknown("threshold", one, THRESHOLDS)

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        self.check()
        made = []
        for method, own in explanations.items():
            for example, explanation in zip(examples, own, strict=True):
                for stream, part in explanation.parts.items():
                    if part.units.grid is not None and part.picture is not None:
                        seen = _view(ex.subject, example.input)
                        figures, curves = self._one(example, part, seen)
                        made.append(Measurement(example.id, method, stream, figures, curves))
        return made

    def overall(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Pixel accuracy and mIoU by each threshold: sums over all pictures first."""
        return {
            f"{name}, {rule}": summary(measurements, rule)[name]
            for rule in self.thresholds
            for name in ("pixel accuracy", "mIoU")
        }

    def _one(
        self, example: Example, part: Explanation, view: Box
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        assert part.picture is not None
        size = (part.picture.shape[0], part.picture.shape[1])
        inside, counted = object_mask(example, size, view)
        heat = np.nan_to_num(part.heat_map())
        large = scaled_up(heat, size)
        values = ranged(large)
        figures: dict[str, float] = {}
        curves: dict[str, tuple[float, ...]] = {}
        for rule in self.thresholds:
            found = foreground(large, inside, counted, rule)
            figures |= {f"{name}, {rule}": value for name, value in compared(found, inside, counted).items()}
            if self.masks:
                curves[f"mask, {rule}"] = packed(found)
        top = ranking(values.flatten(), self.seed, example.id)[0]
        figures |= {
            "average precision": average_precision(values[counted], inside[counted]),
            **told_apart(values[counted], inside[counted]),
            "pointing": float(inside.flatten()[top]),
            "inside mass": inside_mass(heat, inside, counted),
            "object's share": float(inside[counted].mean()),
        }
        curves |= {"recall": RECALLS, "precision": precisions(values[counted], inside[counted])}
        return figures, curves


@register("mosaic")
@dataclass(frozen=True)
class Mosaic(Segmentation):
    """Pictures of two classes side by side (data `mosaic:pets`): what is explained must stay in its own part.

    `inside mass` is the share of the positive relevance that does; by chance it is the part's share of the picture.
    """

    headline: ClassVar[tuple[str, ...]] = ("inside mass", "pointing")

    explained: Explained = "gold"


def object_mask(example: Example, size: tuple[int, int], view: Box) -> tuple[Grid, Grid]:
    """The object's pixels of what the model saw, and those that count: each pixel is asked at its middle."""
    if example.evidence is None:
        raise InputError(f"{example.id!r} has no mask of its object: choose a data set or split that has")
    high, wide = size
    y = view[1] + (np.arange(high) + 0.5) / high * (view[3] - view[1])
    x = view[0] + (np.arange(wide) + 0.5) / wide * (view[2] - view[0])
    inside, ignored = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for piece in (piece for one in example.evidence for piece in one):
        if isinstance(piece, Mask):
            rows = (y * piece.inside.shape[0]).astype(int).clip(0, piece.inside.shape[0] - 1)
            columns = (x * piece.inside.shape[1]).astype(int).clip(0, piece.inside.shape[1] - 1)
            inside |= piece.inside[np.ix_(rows, columns)]
            if piece.ignored is not None:
                ignored |= piece.ignored[np.ix_(rows, columns)]
        elif isinstance(piece, Region):
            left, top, right, bottom = piece.box
            inside |= np.outer((y > top) & (y < bottom), (x > left) & (x < right))
        elif isinstance(piece, Characters | Place):
            continue
    return inside, ~ignored | inside


def _view(subject: Any, given: Any) -> Box:
    """What a model sees of an example's picture; of one with several streams, what reads its pictures says."""
    processor = getattr(subject.processor, "image_processor", subject.processor)
    return view_of(processor, given["image"] if isinstance(given, dict) else given)


def view_of(processor: Any, picture: Any) -> Box:
    """The part of a picture that the model sees, as fractions: processors may cut out the middle."""
    whole: Box = (0.0, 0.0, 1.0, 1.0)
    crop = getattr(processor, "crop_size", None)
    if not getattr(processor, "do_center_crop", False) or not crop or not hasattr(picture, "size"):
        return whole
    wide, high = picture.size if not isinstance(picture, np.ndarray) else picture.shape[1::-1]
    size = getattr(processor, "size", None) or {}
    if getattr(processor, "do_resize", True):
        if "shortest_edge" in size:
            factor = size["shortest_edge"] / min(wide, high)
            wide, high = wide * factor, high * factor
        else:
            wide, high = size["width"], size["height"]
    across, down = min(1.0, crop["width"] / wide), min(1.0, crop["height"] / high)
    return ((1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2)


def ranged(values: Float[np.ndarray, "height width"]) -> Float[np.ndarray, "height width"]:
    """The map from 0 to 1; a flat one is 0 everywhere."""
    span = values.max() - values.min()
    return np.asarray((values - values.min()) / span if span else np.zeros_like(values))


def foreground(raw: Float[np.ndarray, "height width"], inside: Grid, counted: Grid, rule: str) -> Grid:
    """The map cut at a threshold."""
    if rule == "raw-quarter":
        return raw > 0.25 * raw.max()
    values = ranged(raw)
    if rule == "best":
        return values > best_threshold(values[counted], inside[counted])
    if rule == "otsu":
        levels = (values * 255).astype(np.uint8)
        return levels > otsu(levels)
    return values > (values.mean() if rule == "mean" else 0.25)


def compared(found: Grid, inside: Grid, counted: Grid) -> dict[str, float]:
    """What was cut out, against the object's mask."""
    yes, no = found & counted, ~found & counted
    both, either = (yes & inside).sum(), (yes | (inside & counted)).sum()
    ground_both, ground_either = (no & ~inside).sum(), (no | (~inside & counted)).sum()
    right = both + ground_both
    cut_out, there = yes.sum(), (inside & counted).sum()
    return {
        "pixel accuracy": float(right / counted.sum()),
        "iou": float(both / either) if either else 0.0,
        "f1": float(2 * both / (both + either)) if either else 0.0,
        "precision": float(both / cut_out) if cut_out else 0.0,
        "recall": float(both / there) if there else 0.0,
        "row f1": row_f1(yes, inside & counted),
        "right": float(right),
        "counted": float(counted.sum()),
        "object both": float(both),
        "object either": float(either),
        "ground both": float(ground_both),
        "ground either": float(ground_either),
    }


def best_threshold(values: Float[np.ndarray, "pixel"], inside: Bool[np.ndarray, "pixel"]) -> float:
    """Of all thresholds (foreground is what lies above) the one with the largest overlap with the object."""
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    both = np.cumsum(inside[order])
    either = np.arange(1, len(order) + 1) + inside.sum() - both
    ends = np.append(ranked[1:] < ranked[:-1], True)  # pixels of one value go together
    overlap = np.where(ends, both / np.maximum(either, 1), -1.0)
    best = int(overlap.argmax())
    return float(ranked[best + 1]) if best + 1 < len(ranked) else -np.inf


def row_f1(found: Grid, inside: Grid) -> float:
    both, sums = (found & inside).sum(1), found.sum(1) + inside.sum(1)
    return float(np.divide(2 * both, sums, out=np.zeros(len(sums)), where=sums > 0).mean())


def average_precision(values: Float[np.ndarray, "pixel"], inside: Bool[np.ndarray, "pixel"]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(np.concatenate([~inside, inside]), np.concatenate([1 - values, values])))


def told_apart(values: Float[np.ndarray, "pixel"], inside: Bool[np.ndarray, "pixel"]) -> dict[str, float]:
    """How well the map tells the object from the ground, whatever the threshold; NaN where there is but one of them."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    if inside.all() or not inside.any():
        return {"object average precision": float("nan"), "roc auc": float("nan")}
    return {
        "object average precision": float(average_precision_score(inside, values)),
        "roc auc": float(roc_auc_score(inside, values)),
    }


def inside_mass(heat: Float[np.ndarray, "row column"], inside: Grid, counted: Grid) -> float:
    """Each patch's positive relevance spread evenly over its pixels; NaN where there is none."""
    high, wide = inside.shape
    rows, columns = ((np.arange(size) * parts // size) for size, parts in zip((high, wide), heat.shape, strict=True))
    mass = np.maximum(heat, 0)[np.ix_(rows, columns)] * counted
    return float((mass * inside).sum() / mass.sum()) if mass.sum() > 0 else float("nan")


def precisions(values: Float[np.ndarray, "pixel"], inside: Bool[np.ndarray, "pixel"]) -> tuple[float, ...]:
    """The best precision at each of `RECALLS` or beyond."""
    from sklearn.metrics import precision_recall_curve

    if not inside.any():
        return (0.0,) * len(RECALLS)
    precision, recall, _ = precision_recall_curve(inside, values)
    return tuple(float(precision[recall >= wanted - 1e-12].max()) for wanted in RECALLS)


def summary(measurements: Iterable[Measurement], rule: str = "mean") -> dict[str, float]:
    """Figures of a whole data set for one method: sums first, then quotients."""
    rows: list[Mapping[str, float]] = [one.figures for one in measurements]
    eps = np.finfo(float).eps

    def total(name: str) -> float:
        return float(sum(row[f"{name}, {rule}"] for row in rows))

    ious = [total(f"{kind} both") / (total(f"{kind} either") + eps) for kind in ("object", "ground")]

    def mean(name: str) -> float:
        return float(np.nanmean([row[name] for row in rows]))

    return {
        "pixel accuracy": total("right") / total("counted"),
        "mIoU": float(sum(ious) / 2),
        "mAP": mean("average precision"),
        "F1": mean(f"f1, {rule}"),
        "row F1": mean(f"row f1, {rule}"),
        "pointing": mean("pointing"),
        "inside mass": mean("inside mass"),
    }
