"""Ground-truth localisation: do the highest scores fall on the units that are known to decide the label?

Units that are special, that belong to the question, or that contain some of the evidence but too little to count, are
excluded; all others are ranked by score. For a set S of evidence units among n:

    precision          fraction of S among the first |S| of the ranking
    average precision  mean over S of (number of units of S ranked no later) / (rank)
    rank               mean over S of the fraction of other units that are ranked earlier: 0 best, ½ by chance
    reach              fraction of the ranking that has to be read to find all of S

If several alternative sets are each sufficient evidence, `sufficient …` evaluates their union (does the method find all
evidence for the label?), and `minimal …` the set that the method finds best (does it find one complete set of
evidence?); the units of the other sets then count like any other unit. With a single set both are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int

from clearhead.bench.data import (
    EvidenceItem,
    EvidenceMask,
    Example,
    ImageBox,
    compute_evidence_coverage,
    find_evidence_units,
)
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    argsort_descending,
    register_protocol,
)
from clearhead.errors import unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import Box

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

RANKING_METRICS = ("precision", "average precision", "rank", "reach")
#: A detection matches an object from this intersection over union of their boxes on.
MIN_BOX_IOU = 0.5


@register_protocol("truth")
@dataclass(frozen=True)
class KnownEvidence(BenchmarkProtocol):
    """Localisation of the known evidence.

    Attributes:
        by: "score" ranks evidence for the label first; "magnitude" ranks by absolute value, for or against.
        more_than: Fraction of a unit that must be evidence for the unit to count.
    """

    smaller_is_better_metrics: ClassVar[frozenset[str]] = frozenset(
        f"{evidence_set} {metric}" for evidence_set in ("minimal", "sufficient") for metric in ("rank", "reach")
    )

    description: ClassVar[str] = "Do the highest scores fall on the units that are known to decide the label?"
    headline_metrics: ClassVar[tuple[str, ...]] = ("minimal average precision",)
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ("minimal ", "sufficient ")

    explained: ExplainedClass = "gold"
    by: str = "score"
    more_than: float = 0.5

    def check_settings(self) -> None:
        """Check the settings of all protocols, and that `by` is "score" or "magnitude"."""
        super().check_settings()
        if self.by not in ("score", "magnitude"):
            raise unknown_value_error("value for by=", self.by, ("score", "magnitude"))

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure each stream that contains both evidence and other units.

        Args:
            explainer: Not used.
            examples: Examples with evidence.
            explanations: Method name → explanations, in the order of `examples`.
            output_cache: Not used.

        Returns:
            One measurement per example, method and stream, with `minimal` and `sufficient` `RANKING_METRICS`.
        """
        self.check_settings()
        measurements = []
        for method, method_explanations in explanations.items():
            for example, explanation in zip(examples, method_explanations, strict=True):
                measurements += self._measure_example(example, method, explanation)
        return measurements

    def _measure_example(self, example: Example, method: str, explanation: AnyExplanation) -> list[Measurement]:
        """Measure each stream with evidence; of several detections, the one whose box fits the annotation."""
        measurements = []
        for stream in example.streams or explanation.streams:
            stream_explanation = _select_matching_detection(explanation[stream], example)
            if stream_explanation is None:
                continue
            metrics = self._compute_metrics(example, stream_explanation)
            if metrics is not None:
                measurements.append(Measurement(example.id, method, stream, metrics))
        return measurements

    def _compute_metrics(self, example: Example, explanation: Explanation) -> dict[str, float] | None:
        """Rank the units against the union of evidence sets and the best single set; None if undefined."""
        assert example.evidence is not None
        units = explanation.units
        sets = [
            find_evidence_units(example, units, alternative, self.more_than)
            for alternative in range(len(example.evidence))
        ]
        union = np.logical_or.reduce(sets) if sets else np.zeros(len(explanation), dtype=bool)
        all_items = [item for alternative in example.evidence for item in alternative]
        evidence_coverage = compute_evidence_coverage(example, all_items, units)
        question_coverage = compute_evidence_coverage(example, example.excluded, units)
        counted = ~np.asarray(units.special) & ~((evidence_coverage > 0) & ~union) & ~(question_coverage > 0)
        union = union & counted
        if not union.any() or union[counted].all():
            return None  # no evidence in this stream, or no other units to rank it against
        scores = explanation.scores
        if self.by == "magnitude":
            scores = np.abs(scores)
        order = argsort_descending(scores[counted], self.seed, example.id, explanation.stream)
        union_metrics = compute_ranking_metrics(union[counted], order)
        set_metrics = [
            compute_ranking_metrics(is_evidence[counted], order) for is_evidence in sets if is_evidence[counted].any()
        ]
        metrics = {f"sufficient {name}": value for name, value in union_metrics.items()}
        for name in RANKING_METRICS:
            best = min if f"minimal {name}" in self.smaller_is_better_metrics else max
            metrics[f"minimal {name}"] = best(values[name] for values in set_metrics)
        return metrics


def compute_ranking_metrics(is_evidence: Bool[np.ndarray, "unit"], order: Int[np.ndarray, "unit"]) -> dict[str, float]:
    """Compute the four `RANKING_METRICS` of one ranking for one evidence set.

    Args:
        is_evidence: Which units are evidence; at least one.
        order: Indices of the units from the highest to the lowest score.

    Returns:
        The metrics by name.

    Example:
        >>> compute_ranking_metrics(np.array([True, False, True]), np.array([0, 1, 2]))["average precision"]
        0.8333333333333333
    """
    hits = is_evidence[order]
    num_evidence = int(hits.sum())
    num_other = int((~hits).sum())
    positions = np.flatnonzero(hits)
    num_hits = np.arange(1, num_evidence + 1)
    num_other_ahead = positions + 1 - num_hits
    return {
        "precision": float(hits[:num_evidence].mean()),
        "average precision": float((num_hits / (positions + 1)).mean()),
        "rank": float(num_other_ahead.mean() / num_other) if num_other else 0.0,
        "reach": float((positions[-1] + 1) / len(hits)),
    }


def _select_matching_detection(explanation: Explanation, example: Example) -> Explanation | None:
    """Of several detections select that of the annotated object; None if the model did not detect it."""
    if explanation.target.get("kind") not in ("detection", "multiple") or explanation.units.boxes is None:
        return explanation
    assert example.evidence is not None
    object_box = _compute_bounding_box([item for alternative in example.evidence for item in alternative])
    steps: list[Any] = explanation.target.get("steps") or [explanation.target]
    ious = [_compute_box_iou(object_box, tuple(step["box"])) if step.get("found") else 0.0 for step in steps]
    best = int(np.argmax(ious))
    if ious[best] < MIN_BOX_IOU:
        return None
    if explanation.steps is None:
        return explanation
    return explanation.step(best)


def _compute_bounding_box(items: Sequence[EvidenceItem]) -> Box:
    """Return the smallest box around all boxes and masks."""
    boxes = []
    for item in items:
        if isinstance(item, ImageBox):
            boxes.append(item.box)
        elif isinstance(item, EvidenceMask):
            height, width = item.pixels.shape
            rows, columns = np.nonzero(item.pixels)
            boxes.append(
                (
                    columns.min() / width,
                    rows.min() / height,
                    (columns.max() + 1) / width,
                    (rows.max() + 1) / height,
                )
            )
    left_edges, top_edges, right_edges, bottom_edges = zip(*boxes, strict=True)
    return (float(min(left_edges)), float(min(top_edges)), float(max(right_edges)), float(max(bottom_edges)))


def _compute_box_iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the intersection over union of two boxes (x_min, y_min, x_max, y_max)."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)
