"""Detections: masks made from the explanations of a detector's objects, against the objects' own (Generic Attention).

Every object that the detector finds is explained, and its heat map cut into a mask: as the authors cut it (`cut`
"authors", see `coco_eval.py`) or after scaling up ("after"). Over all pictures at once, by pycocotools:

    AP, AR                   over overlaps from 0.50 to 0.95, of objects of all sizes, medium and large
    the authors' AP, AR …    over overlaps from 0.20 to 0.95

and in each picture `overlap`: the mean over its true objects of the best overlap that a mask of their class has. Masks
are kept in the table, packed. Objects that are not found are missed; masks of what is none count against precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Bool

from clearhead.bench.data import Example, Mask
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, register
from clearhead.bench.protocols.coco_eval import AUTHORS, Instance, authors_mask, scores
from clearhead.bench.rle import packed, unpacked
from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.otsu_mask import mask_of

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

CUTS = ("authors", "after")
Grid = Bool[np.ndarray, "height width"]


@register("detections")
@dataclass(frozen=True)
class Detections(Protocol):
    about: ClassVar[str] = "Masks made from the explanations of a detector’s objects, against the objects’ own."
    headline: ClassVar[tuple[str, ...]] = ("overlap",)

    explained: Explained = "predicted"
    cut: str = "authors"

    def check(self) -> None:
        super().check()
        if self.cut not in CUTS:
            raise unknown("cut", self.cut, CUTS)

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
                truth = _truth(example)
                size = truth[0].inside.shape
                found = [self._instance(ex, part, size) for part in _objects(explanation["image"])]
                figures = {
                    "overlap": float(np.mean([_best(one, found) for one in truth if not one.crowd])),
                    "objects": float(len(truth)),
                    "found": float(len(found)),
                }
                curves = {**_kept("true", truth), **_kept("found", found)}
                made.append(Measurement(example.id, method, "image", figures, curves))
        return made

    def overall(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """COCO's scores, by both rows of overlaps."""
        truth, found = _instances("true", measurements), _instances("found", measurements)
        of_authors = scores(truth, found, AUTHORS)
        return {f"the authors' {name}": value for name, value in of_authors.items()} | scores(truth, found)

    def _instance(self, ex: "Explainer", part: Explanation, size: tuple[int, int]) -> Instance:
        assert part.picture is not None
        seen, heat = (part.picture.shape[0], part.picture.shape[1]), part.heat_map()
        inside = _resized(authors_mask(heat, seen) if self.cut == "authors" else mask_of(heat, *seen), size)
        return Instance(0, ex.subject.label_index(part.target["label"]), inside, part.target["probability"])


def _objects(part: Explanation) -> list[Explanation]:
    """The explanation of each object that was found; none where the surest query found nothing."""
    steps = [part] if part.steps is None else [part.step(which) for which in range(len(part.steps))]
    return [one for one in steps if one.target.get("found")]


def _truth(example: Example) -> list[Instance]:
    pieces = [piece for one in example.evidence or () for piece in one]
    marked = [piece for piece in pieces if isinstance(piece, Mask) and piece.label is not None]
    if not marked:
        raise InputError(
            f"{example.id!r} has no masks of objects with their classes: take known:shapes-scenes, or coco:pictures"
        )
    return [Instance(0, int(piece.label or 0), piece.inside, crowd=piece.crowd) for piece in marked]


def _best(true: Instance, found: Sequence[Instance]) -> float:
    """The best overlap (intersection over union) that a mask of its class has with an object."""
    return max((_overlap(true.inside, one.inside) for one in found if one.label == true.label), default=0.0)


def _overlap(one: Grid, other: Grid) -> float:
    return float((one & other).sum() / max(1, (one | other).sum()))


def _resized(mask: Grid, size: tuple[int, int]) -> Grid:
    """The nearest pixel: from what the model saw to the picture itself."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, mask.shape, strict=True))
    return mask[np.ix_(rows, columns)]


def _kept(kind: str, instances: Sequence[Instance]) -> dict[str, tuple[float, ...]]:
    return {
        f"{kind} {number:03d}": (float(one.label), one.score, float(one.crowd), *packed(one.inside))
        for number, one in enumerate(instances)
    }


def _instances(kind: str, measurements: Sequence[Measurement]) -> list[Instance]:
    return [
        Instance(picture, int(label), unpacked(runs), score, bool(crowd))
        for picture, one in enumerate(measurements)
        for name, (label, score, crowd, *runs) in sorted(one.curves.items())
        if name.startswith(kind)
    ]
