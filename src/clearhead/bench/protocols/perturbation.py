"""Perturbation curves: the model's output as the units with the highest (or lowest) scores are removed.

For each example, method, fill and direction a curve over the removed fraction f, starting at the unperturbed input
(f = 0):

    accuracy     1 where the predicted class is the followed one (its soft score, where labels are answers with scores)
    probability  p_f of the followed class;   logit  its score before softmax
    log ratio    ln p_f / p_0;                log margin  ln p_f of the followed class − that of the best other class

    accuracy …, probability …   area under the curve, by every convention of `compute_curve_area`
    aopc             mean over f > 0 of p_0 − p_f; absolute aopc of |p_0 − p_f| (AttCAT's code)
    log-odds         mean over f > 0 of ln p_f / p_0

Directions: `positive` removes the highest scores first, `negative` the lowest, `keep` all but the highest. With
ERASER's fractions the aopc of `positive` is comprehensiveness, and that of `keep` sufficiency.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data.base import Example
from clearhead.bench.output_cache import OutputCache, PreparedExample, compute_log_probabilities, prepare_example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    argsort_descending,
)
from clearhead.bench.protocols.curves import (
    AREA_CONVENTIONS,
    ROUNDING_RULES,
    compute_curve_area,
    compute_removed_counts,
)
from clearhead.bench.protocols.unit_removal import IMAGE_FILLS, REGION_FILLS, TEXT_FILLS, make_remover
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

REMOVAL_DIRECTIONS = ("positive", "negative", "keep")
#: Fills of all kinds of units; which of them apply to a stream is checked when its units are known.
ALL_FILLS = tuple(dict.fromkeys([*TEXT_FILLS, *REGION_FILLS, *IMAGE_FILLS]))
DECILE_FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))


@dataclass(frozen=True)
class PerturbationProtocol(BenchmarkProtocol):
    """Base class of the perturbation protocols for images, texts and regions.

    Attributes:
        judged: Class whose accuracy and probability are followed: "gold", "predicted" (on the unperturbed input) or
            "explained".
        examples: "all", or only those predicted "correct" or "wrong".
        fractions: Fractions to remove, without the unperturbed input; empty removes one unit after the other.
        rounding: How a fraction becomes a number of units, one of `ROUNDING_RULES`.
        directions: Which scores are removed first; each direction has its own curves.
        fills: Replacement of removed units; each fill has its own curves.
    """

    description: ClassVar[str] = (
        "The model’s output as units are removed, those with the highest scores first (positive) or the lowest "
        "(negative). “probability clearhead” is the mean height of the curve of the followed class’s probability, "
        "aopc is how far it falls on average. The names of parts have the form stream / replacement / direction."
    )
    headline_metrics: ClassVar[tuple[str, ...]] = ("probability clearhead", "aopc")
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ("accuracy ",)

    explained: ExplainedClass = "predicted"
    judged: str = "predicted"
    examples: str = "all"
    fractions: tuple[float, ...] = DECILE_FRACTIONS
    rounding: str = "removed"
    directions: tuple[str, ...] = ("positive", "negative")
    fills: tuple[str, ...] = ()

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return True if a smaller value is better: under `positive` the curve should fall, and its AOPC be large."""
        direction = part_name.split("/")[-1]
        measures_drop = metric in ("aopc", "absolute aopc")
        return (direction == "positive") != measures_drop

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure all curves of these examples."""
        return self.measure_with_cache(explainer, examples, explanations, output_cache)[0]

    def measure_with_cache(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: OutputCache | None = None,
    ) -> tuple[list[Measurement], OutputCache]:
        """Return the measurements, and the cache of model outputs, which counts the forward passes."""
        self.check_settings()
        output_cache = output_cache or OutputCache(explainer)
        prepared_examples = [prepare_example(explainer, example, self) for example in examples]
        clean_keys = [output_cache.request(prepared.sample, prepared.target) for prepared in prepared_examples]
        output_cache.flush()
        requested_curves: list[tuple[int, str, str, list[bytes]]] = []
        trackers: dict[int, _ClassTracker] = {}
        for index, prepared in enumerate(prepared_examples):
            tracker = _ClassTracker(prepared, output_cache[clean_keys[index]], self.judged)
            if self.examples != "all" and tracker.is_correct is None:
                raise InputError(f"examples={self.examples!r}, but {prepared.example.id!r} has no true class")
            if self.examples != "all" and tracker.is_correct != (self.examples == "correct"):
                continue
            trackers[index] = tracker
            curves_to_request = self._iter_perturbed_inputs(explainer, prepared, index, explanations)
            for part_name, method, perturbed_inputs in curves_to_request:
                keys = [
                    output_cache.request(sample, prepared.target, is_empty) for sample, is_empty in perturbed_inputs
                ]
                requested_curves.append((index, method, part_name, [clean_keys[index], *keys]))
        output_cache.flush()
        measurements = []
        for index, method, part_name, keys in requested_curves:
            scores = [output_cache[key] for key in keys]
            metrics, curves = self._compute_metrics(trackers[index], scores, part_name.split("/")[-1])
            measurements.append(Measurement(examples[index].id, method, part_name, metrics, curves))
        return measurements, output_cache

    def count_perturbed_inputs(self, num_methods: int) -> int | None:
        """Upper bound of perturbed inputs per example; None without fixed fractions."""
        if not self.fractions:
            return None
        return 1 + num_methods * len(self.fills) * len(self.directions) * len(self.fractions)

    def check_settings(self) -> None:
        """Check the settings of all protocols, the values of the choices, and that fractions ascend from above 0."""
        super().check_settings()
        for setting, values, accepted in (
            ("class to judge by", (self.judged,), ("gold", "predicted", "explained")),
            ("examples", (self.examples,), ("all", "correct", "wrong")),
            ("direction", self.directions, REMOVAL_DIRECTIONS),
            ("rounding", (self.rounding,), ROUNDING_RULES),
            ("fill", self.fills, ALL_FILLS),
        ):
            if not values:
                raise InputError(f"no {setting} was given. Accepted: {', '.join(accepted)}")
            for value in values:
                if value not in accepted:
                    raise unknown_value_error(setting, value, accepted)
        if list(self.fractions) != sorted(set(self.fractions)) or (self.fractions and self.fractions[0] <= 0):
            raise InputError(
                "fractions must be ascending and above 0 (the clean input is always included), but are "
                f"{self.fractions}"
            )
        if max(self.fractions, default=0) > 1:
            raise InputError(f"fractions must lie between 0 and 1, but are {self.fractions}")

    def _iter_perturbed_inputs(
        self, explainer: "Explainer", prepared: PreparedExample, index: int, explanations: ExplanationsByMethod
    ) -> Iterator[tuple[str, str, Iterator[tuple[Any, bool]]]]:
        """Yield each part and method with the inputs of its curve, and whether all of an input was removed."""
        first_explanation = next(iter(explanations.values()))[index]
        for stream in self.select_streams(first_explanation.streams, first_explanation):
            units = get_visible_units(prepared, stream)
            for fill in self.fills:
                remover = make_remover(explainer.adapter, prepared.sample, units, fill)
                for method, method_explanations in explanations.items():
                    full_explanation = method_explanations[index][stream]
                    explanation = replace(full_explanation, units=units, scores=full_explanation.scores[: len(units)])
                    for direction in self.directions:
                        masks = self.iter_removal_masks(explanation, direction, remover, prepared.example)
                        perturbed = ((remover.remove(mask), remover.removes_everything(mask)) for mask in masks)
                        yield f"{stream}/{fill}/{direction}", method, perturbed

    def select_streams(self, streams: Sequence[str], explanation: Any) -> Sequence[str]:
        """Return the streams of an explanation from which this protocol removes units."""
        raise NotImplementedError

    def iter_removal_masks(
        self, explanation: Explanation, direction: str, remover: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "item"]]:
        """Yield the removed items at each fraction."""
        raise NotImplementedError

    def compute_counts(self, total: int) -> list[int]:
        """Return the number of removed units at each point of the curve after the first: one count per fraction.

        Without fractions, units are removed one by one, and the counts are 1 to `total`.
        """
        if self.fractions:
            return compute_removed_counts(self.fractions, total, self.rounding)
        if not total:
            raise InputError("the input has no removable units, so a step-by-step curve is undefined")
        return list(range(1, total + 1))

    def _iter_ranked_masks(
        self,
        scores: Float[np.ndarray, "candidate"],
        candidates: Sequence[int] | np.ndarray,
        size: int,
        direction: str,
        counts: Sequence[int],
        tie_break_key: Sequence[Any],
    ) -> Iterator[Bool[np.ndarray, "item"]]:
        """Yield masks of the first `count` candidates; the index −1 is padding, which counts but removes no unit."""
        if direction == "negative":
            scores = -scores
        order = np.asarray(candidates)[argsort_descending(scores, self.seed, *tie_break_key)]
        for count in counts:
            if direction == "keep":
                removed_units = order[count:]
            else:
                removed_units = order[:count]
            mask = np.zeros(size, dtype=bool)
            mask[removed_units[removed_units >= 0]] = True
            yield mask

    def _compute_metrics(
        self, tracker: "_ClassTracker", scores: Sequence[Float[np.ndarray, "label"]], direction: str
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Summarise the curves of the followed class; `keep` has no areas, as it does not start at the clean input."""
        num_steps = len(scores) - 1
        fractions = (0.0, *(self.fractions or (step / num_steps for step in range(1, num_steps + 1))))
        curves = tracker.compute_curves(scores)
        probability = np.asarray(curves["probability"])
        log_ratio = np.asarray(curves["log ratio"])
        metrics = {
            "aopc": float((probability[0] - probability[1:]).mean()),
            "absolute aopc": float(np.abs(probability[0] - probability[1:]).mean()),
            "log-odds": float(log_ratio[1:].mean()),
        }
        if tracker.is_correct is not None:
            metrics["correct"] = float(tracker.is_correct)
        if direction != "keep":  # along that curve units are added, so the clean input is not its first point
            for curve in ("accuracy", "probability"):
                metrics |= {
                    f"{curve} {convention}": compute_curve_area(fractions, curves[curve], convention)
                    for convention in AREA_CONVENTIONS
                }
        return metrics, {"fraction": fractions, **curves}


def get_visible_units(prepared: PreparedExample, stream: str) -> Units:
    """Return the units of a stream that the model sees; of a continuation, those before the explained token."""
    unit_groups = (group for axis in prepared.sample.axes.values() for group in axis.unit_groups)
    return next(group for group in unit_groups if group.stream == stream)


class _ClassTracker:
    """Selects the class that is followed along the curves, and decides whether a prediction is correct."""

    def __init__(self, prepared: PreparedExample, clean_scores: Float[np.ndarray, "label"], judged: str) -> None:
        self.label_lookup = prepared.label_lookup
        self.label = prepared.example.label
        class_scores = _select_prediction_scores(self.label_lookup, clean_scores)
        if len(class_scores) < 2 and not self.label_lookup.multi_label:
            raise InputError("the model outputs one number and no classes: a perturbation curve needs classes")
        predicted = int(class_scores.argmax())
        explained = prepared.target.find_classes(_to_tensor(clean_scores), self.label_lookup)[0]
        self.gold_class = self._find_gold_class(prepared, predicted, explained)
        if judged == "gold" and self.gold_class is None:
            raise InputError(f"judged='gold', but {prepared.example.id!r} has no true class: use judged='predicted'")
        followed = {"gold": self.gold_class, "predicted": predicted, "explained": explained}[judged]
        assert followed is not None
        self.followed_class = followed
        self.has_soft_labels = judged == "gold" and isinstance(self.label, Mapping)
        self.is_correct = self._check_correct(predicted)

    def _find_gold_class(self, prepared: PreparedExample, predicted: int, explained: int) -> int | None:
        """Return the true class (the explained one for an example with a target); None if the model lacks it."""
        if prepared.example.continuation is not None or prepared.example.target is not None:
            return explained  # the example's own target is its true class
        if not isinstance(self.label, Mapping):
            return self.label
        known_answers = {
            answer: score for answer, score in self.label.items() if answer in self.label_lookup.labels.values()
        }
        if not known_answers:
            return None
        return self.label_lookup.label_index(max(known_answers, key=lambda answer: known_answers[answer]))

    def _check_correct(self, predicted: int) -> bool | None:
        """Return whether the prediction is correct; None if the true class is unknown."""
        if isinstance(self.label, Mapping):
            return self._get_soft_score(predicted) > 0
        return None if self.gold_class is None else predicted == self.gold_class

    def _get_soft_score(self, predicted: int) -> float:
        """Return the label's score of the predicted answer; 0 for an answer that it does not list."""
        assert isinstance(self.label, Mapping)
        return float(self.label.get(self.label_lookup.label_name(predicted), 0.0))

    def compute_curves(self, scores: Sequence[Float[np.ndarray, "label"]]) -> dict[str, tuple[float, ...]]:
        """Compute the curves of the followed class from the class scores at every point."""
        y = self.followed_class
        log_probs = [compute_log_probabilities(row, self.label_lookup.multi_label) for row in scores]
        predictions = [int(_select_prediction_scores(self.label_lookup, row).argmax()) for row in scores]
        best_other = [np.delete(row, y).max(initial=-np.inf) for row in log_probs]
        if self.has_soft_labels:
            accuracy = tuple(self._get_soft_score(prediction) for prediction in predictions)
        else:
            accuracy = tuple(float(prediction == y) for prediction in predictions)
        return {
            "accuracy": accuracy,
            "probability": tuple(float(np.exp(row[y])) for row in log_probs),
            "logit": tuple(float(row[y]) for row in scores),
            "log ratio": tuple(float(row[y] - log_probs[0][y]) for row in log_probs),
            "log margin": tuple(float(row[y] - best) for row, best in zip(log_probs, best_other, strict=True)),
        }


def _to_tensor(scores: Float[np.ndarray, "label"]) -> Any:
    """Convert scores to the tensor that targets and adapters expect."""
    import torch

    return torch.as_tensor(scores)


def _select_prediction_scores(label_lookup: Any, scores: Float[np.ndarray, "label"]) -> Float[np.ndarray, "label"]:
    """Return the scores that a prediction is chosen from, as an array."""
    return np.asarray(label_lookup.select_prediction_scores(_to_tensor(scores)))
