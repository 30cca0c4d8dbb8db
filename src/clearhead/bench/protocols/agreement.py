"""Agreement between methods: do they rank units in the same order, and in the order of leave-one-out?

Kendall's tau-b and Spearman's rho of the scores themselves (correlations of argsorts would be meaningless), and the
overlap of the k highest units. Special units are excluded. Chance level: 0 for the correlations, k/n for the overlap,
which is reported next to it; `random` is part of every table. Where units tie at rank k, each counts by its
probability of being drawn into the top k, independently on both sides: a shared draw would give flat maps a perfect
overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float

from clearhead.bench.data import Example
from clearhead.bench.output_cache import OutputCache, prepare_example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    register_protocol,
)
from clearhead.bench.protocols.perturbation import get_visible_units
from clearhead.bench.protocols.sensitivity import OutputDrops, choose_default_fill, to_removal_mask
from clearhead.bench.protocols.unit_removal import make_remover
from clearhead.errors import unknown_value_error

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

LEAVE_ONE_OUT = "leave-one-out"


@register_protocol("agreement")
@dataclass(frozen=True)
class MethodAgreement(BenchmarkProtocol):
    """Rank agreement of every two methods, and of each method with leave-one-out.

    Attributes:
        top: Number of highest-ranked units whose overlap is measured.
        leave_one_out: Whether methods are compared with leave-one-out, which takes a forward pass per unit.
        fill: What replaces a unit that is left out; None for the default of its stream.
    """

    version: ClassVar[int] = 2
    headline_metrics: ClassVar[tuple[str, ...]] = ("tau",)
    depends_on_other_methods: ClassVar[bool] = True

    explained: ExplainedClass = "predicted"
    top: int = 5
    leave_one_out: bool = True
    fill: str | None = None

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Compare every ordered pair of methods on each stream with at least two content units."""
        scores = {
            method: [
                {stream: explanation.scores for stream, explanation in example_explanation.by_stream.items()}
                for example_explanation in method_explanations
            ]
            for method, method_explanations in explanations.items()
        }
        first_method_explanations = next(iter(explanations.values()))
        if self.leave_one_out:
            scores[LEAVE_ONE_OUT] = self._compute_leave_one_out(
                explainer, examples, first_method_explanations, output_cache
            )
        measurements = []
        for index, example in enumerate(examples):
            for stream, explanation in first_method_explanations[index].by_stream.items():
                content = explanation.units.content_indices()
                if len(content) < 2:
                    continue
                for method in explanations:
                    for compared_method in scores:
                        if method != compared_method and stream in scores[compared_method][index]:
                            metrics = self.compute_rank_agreement(
                                _select_scores(scores[method][index][stream], content),
                                _select_scores(scores[compared_method][index][stream], content),
                            )
                            part_name = f"{stream}/{compared_method}"
                            measurements.append(Measurement(example.id, method, part_name, metrics))
        return measurements

    def compute_rank_agreement(
        self, first: Float[np.ndarray, "unit"], second: Float[np.ndarray, "unit"]
    ) -> dict[str, float]:
        """Compute tau-b, rho and top-k overlap of two score vectors; correlations are NaN where one is constant."""
        from scipy.stats import kendalltau, spearmanr

        tau = rho = float("nan")
        if np.ptp(first) > 0 and np.ptp(second) > 0:
            tau = float(kendalltau(first, second).statistic)
            rho = float(spearmanr(first, second).statistic)
        top = min(self.top, len(first))
        overlap = float(compute_top_k_probabilities(first, top) @ compute_top_k_probabilities(second, top))
        return {
            "tau": tau,
            "rho": rho,
            f"top {self.top}": overlap / top,
            f"top {self.top} by chance": top / len(first),
        }

    def _compute_leave_one_out(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: Sequence[Any],
        output_cache: OutputCache | None,
    ) -> list[dict[str, Float[np.ndarray, "unit"]]]:
        """Compute by example and stream how far the output falls when each unit is removed."""
        drops = OutputDrops(explainer, output_cache)
        measured_units = []
        for index, example in enumerate(examples):
            prepared = prepare_example(explainer, example, self)
            units_by_stream = {}
            for stream in explanations[index].streams:
                units = get_visible_units(prepared, stream)
                content = units.content_indices()
                if len(content):
                    fill = self.fill or choose_default_fill(units)
                    remover = make_remover(explainer.adapter, prepared.sample, units, fill)
                    masks = (to_removal_mask(remover, units, np.arange(len(units)) == unit) for unit in content)
                    drops.request(f"{index}/{stream}", prepared, remover, masks)
                    units_by_stream[stream] = (len(explanations[index][stream]), content)
            measured_units.append(units_by_stream)
        scores = []
        for index, units_by_stream in enumerate(measured_units):
            scores_by_stream = {}
            for stream, (length, content) in units_by_stream.items():
                scores_by_stream[stream] = np.zeros(length)
                scores_by_stream[stream][content] = drops[f"{index}/{stream}"]
            scores.append(scores_by_stream)
        return scores


def compute_top_k_probabilities(scores: Float[np.ndarray, "unit"], k: int) -> Float[np.ndarray, "unit"]:
    """Return each unit's probability of being among the `k` highest, where ties at rank k are drawn at random.

    >>> compute_top_k_probabilities(np.array([3.0, 1.0, 1.0, 0.0]), 2).tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    kth_score = np.sort(scores)[-k]
    is_above = scores > kth_score
    is_tied = scores == kth_score
    return is_above + is_tied * (k - is_above.sum()) / is_tied.sum()


def _select_scores(scores: Float[np.ndarray, "unit"], indices: Any) -> Float[np.ndarray, "unit"]:
    """Select the scores of units by index; units without a score (NaN) count as 0."""
    return np.nan_to_num(np.asarray(scores, dtype=float)[indices])


@register_protocol("classes")
@dataclass(frozen=True)
class ClassSensitivity(BenchmarkProtocol):
    """Class sensitivity: rank correlation between the explanations of the true and of another class.

    Attributes:
        other: The second class: "next" is the class with the next index (of two, the other one), "second" the class
            with the second-highest probability.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("tau",)

    explained: ExplainedClass = "gold"
    other: str = "next"

    def check_settings(self) -> None:
        """Check the settings of all protocols, and that `other` is "next" or "second"."""
        super().check_settings()
        if self.other not in ("next", "second"):
            raise unknown_value_error("value for other=", self.other, ("next", "second"))

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Explain the second class of each example and correlate both explanations."""
        from clearhead.bench.chunk_explanations import build_explain_kwargs, get_explanation_seed, parse_method

        self.check_settings()
        first_method_explanations = next(iter(explanations.values()))
        targets = [self._select_other_class(explainer, explanation) for explanation in first_method_explanations]
        other_explanations = explainer.explain(
            **build_explain_kwargs(examples),
            method=[parse_method(name) for name in explanations],
            target=targets,
            seed=get_explanation_seed(explanations),
        )
        measurements = []
        for method, method_explanations in explanations.items():
            pairs = zip(examples, method_explanations, other_explanations[method], strict=True)
            for example, explanation, other_explanation in pairs:
                for stream, stream_explanation in explanation.by_stream.items():
                    content = stream_explanation.units.content_indices()
                    if len(content) > 1:
                        agreement = MethodAgreement().compute_rank_agreement(
                            _select_scores(stream_explanation.scores, content),
                            _select_scores(other_explanation[stream].scores, content),
                        )
                        metrics = {"tau": agreement["tau"], "rho": agreement["rho"]}
                        measurements.append(Measurement(example.id, method, stream, metrics))
        return measurements

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return True: explanations of different classes should differ."""
        return True

    def _select_other_class(self, explainer: "Explainer", explanation: Any) -> int:
        """Return the class predicted second (or first, if another is explained), or the next class index."""
        explained = int(explanation.target["index"])
        if self.other == "second":
            top_classes = explanation.prediction["top"]
            return next(int(entry["index"]) for entry in top_classes if entry["index"] != explained)
        return (explained + 1) % len(explainer.adapter.labels)
