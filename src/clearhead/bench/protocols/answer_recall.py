"""Recall of answer tokens: how many tokens of the marked answer are among the k highest scores (AttCAT's test).

found     answer tokens among the first k; `perfect` is the largest possible number (at most k)
share     their quotient; `chance` is its expectation for random scores
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clearhead.bench.data import Example, find_evidence_units
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    argsort_descending,
    register_protocol,
)

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer


@register_protocol("answers")
@dataclass(frozen=True)
class AnswerRecall(BenchmarkProtocol):
    """Recall of the tokens of a marked answer among the highest scores.

    Attributes:
        top: Number of highest scores.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("share",)
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ("share", "chance")

    explained: ExplainedClass = "predicted"
    top: int = 20

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure the recall on the first evidence stream; examples whose answer was truncated are skipped."""
        measurements = []
        for method, method_explanations in explanations.items():
            for example, explanation in zip(examples, method_explanations, strict=True):
                streams = example.streams or explanation.streams
                stream_explanation = explanation[streams[0]]
                is_answer = find_evidence_units(example, stream_explanation.units)
                if not is_answer.any():
                    continue  # the answer was truncated
                candidates = stream_explanation.units.content_indices()
                ranking = argsort_descending(stream_explanation.scores[candidates], self.seed, example.id)
                top_units = candidates[ranking[: self.top]]
                num_found = float(is_answer[top_units].sum())
                max_found = float(min(self.top, is_answer.sum()))
                metrics = {
                    "found": num_found,
                    "perfect": max_found,
                    "share": num_found / max_found,
                    "chance": min(1.0, self.top / len(candidates)) * float(is_answer.sum()) / max_found,
                }
                measurements.append(Measurement(example.id, method, stream_explanation.stream, metrics))
        return measurements
