"""Truth: do the highest scores fall on what is known to decide the label?

Units that are special, that ask the question, or that show a little of the evidence but not enough of it to count, are
set aside; all others are ranked by score. Against a set S of true units among n:

    precision          share of S among the first |S| of the ranking
    average precision  mean over S of (how many of S are ranked no later) / (rank)
    rank               mean over S of the share of other units that are ranked earlier: 0 best, ½ by chance
    reach              how far one has to read until all of S is there, as a share of n

Where several sets are each enough by themselves, `sufficient …` takes all of them together (does it find everything
that speaks for the label?), and `minimal …` the one of them that the method finds best (does it find one whole
reason?); the words of other reasons then count like any other word. With a single set the two are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int

from clearhead.bench.data import Example, Mask, Piece, Region, evidence_units, shown_in
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, ranking, register
from clearhead.errors import unknown
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import Box

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

FIGURES = ("precision", "average precision", "rank", "reach")
#: A detection is the object's own from this overlap (intersection over union) of their boxes on.
OVERLAP = 0.5


@register("truth")
@dataclass(frozen=True)
class Truth(Protocol):
    """`by` "score" ranks what speaks for the label first; "magnitude" whatever speaks most, for or against."""

    smaller_is_better: ClassVar[frozenset[str]] = frozenset(
        f"{kind} {figure}" for kind in ("minimal", "sufficient") for figure in ("rank", "reach")
    )

    about: ClassVar[str] = "Do the highest scores fall on the units that are known to decide the label?"
    headline: ClassVar[tuple[str, ...]] = ("minimal average precision",)

    explained: Explained = "gold"
    by: str = "score"
    more_than: float = 0.5

    def check(self) -> None:
        super().check()
        if self.by not in ("score", "magnitude"):
            raise unknown("by", self.by, ("score", "magnitude"))

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        self.check()
        found = []
        for method, own in explanations.items():
            for example, explanation in zip(examples, own, strict=True):
                found += self._one(example, method, explanation)
        return found

    def _one(self, example: Example, method: str, explanation: AnyExplanation) -> list[Measurement]:
        made = []
        for stream in example.streams or explanation.streams:
            part = _meant(explanation[stream], example)
            figures = None if part is None else self._figures(example, part)
            if figures is not None:
                made.append(Measurement(example.id, method, stream, figures))
        return made

    def _figures(self, example: Example, part: Explanation) -> dict[str, float] | None:
        assert example.evidence is not None
        every = range(len(example.evidence))
        sets = [evidence_units(example, part.units, one, self.more_than) for one in every]
        union = np.logical_or.reduce(sets) if sets else np.zeros(len(part), dtype=bool)
        shown = shown_in(example, [piece for one in example.evidence for piece in one], part.units)
        asks = shown_in(example, example.aside, part.units)
        counted = ~np.asarray(part.units.special) & ~((shown > 0) & ~union) & ~(asks > 0)
        union = union & counted
        if not union.any() or union[counted].all():
            return None  # nothing here to find, or nothing to find it among
        scores = np.abs(part.scores) if self.by == "magnitude" else part.scores
        order = ranking(scores[counted], self.seed, example.id, part.stream)
        whole = found(union[counted], order)
        each = [found(one[counted], order) for one in sets if one[counted].any()]
        figures = {f"sufficient {name}": value for name, value in whole.items()}
        for name in FIGURES:
            best = min if f"minimal {name}" in self.smaller_is_better else max
            figures[f"minimal {name}"] = best(one[name] for one in each)
        return figures


def found(true: Bool[np.ndarray, "unit"], order: Int[np.ndarray, "unit"]) -> dict[str, float]:
    """The four figures of one ranking against one set.

    >>> found(np.array([True, False, True]), np.array([0, 1, 2]))["average precision"]
    0.8333333333333333
    """
    hits = true[order]
    count, others = int(hits.sum()), int((~hits).sum())
    places = np.flatnonzero(hits)
    so_far = np.arange(1, count + 1)
    ahead = places + 1 - so_far  # other units that come earlier
    return {
        "precision": float(hits[:count].mean()),
        "average precision": float((so_far / (places + 1)).mean()),
        "rank": float(ahead.mean() / others) if others else 0.0,
        "reach": float((places[-1] + 1) / len(hits)),
    }


def _meant(part: Explanation, example: Example) -> Explanation | None:
    """Of several detections the one of the marked object; None where the model did not find it."""
    if part.target.get("kind") not in ("detection", "several") or part.units.boxes is None:
        return part
    assert example.evidence is not None
    wanted = _box([piece for one in example.evidence for piece in one])
    steps: list[Any] = part.target.get("steps") or [part.target]
    overlaps = [_overlap(wanted, tuple(step["box"])) if step.get("found") else 0.0 for step in steps]
    best = int(np.argmax(overlaps))
    if overlaps[best] < OVERLAP:
        return None
    return part if part.steps is None else part.step(best)


def _box(pieces: Sequence[Piece]) -> Box:
    """The smallest box around all of them."""
    edges = []
    for piece in pieces:
        if isinstance(piece, Region):
            edges.append(piece.box)
        elif isinstance(piece, Mask):
            (high, wide), (rows, columns) = piece.inside.shape, np.nonzero(piece.inside)
            edges.append((columns.min() / wide, rows.min() / high, (columns.max() + 1) / wide, (rows.max() + 1) / high))
    left, top, right, bottom = zip(*edges, strict=True)
    return (float(min(left)), float(min(top)), float(max(right)), float(max(bottom)))


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(wide, 0.0) * max(high, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared)
