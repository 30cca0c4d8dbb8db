"""Answers in texts: how many tokens of the marked answer are among the k highest scores (AttCAT's test of questions).

found     tokens of the answer among the first k; `perfect` is how many it has (k at most)
share     their quotient; `chance` is what it would be for scores drawn at random
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clearhead.bench.data import Example, evidence_units
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, ranking, register

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer


@register("answers")
@dataclass(frozen=True)
class Answers(Protocol):
    headline: ClassVar[tuple[str, ...]] = ("share",)

    explained: Explained = "predicted"
    top: int = 20

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        made = []
        for method, own in explanations.items():
            for example, explanation in zip(examples, own, strict=True):
                part = explanation[example.streams[0] if example.streams else explanation.streams[0]]
                answer = evidence_units(example, part.units)
                if not answer.any():
                    continue  # it was cut off
                kept = part.units.drop_special()
                first = kept[ranking(part.scores[kept], self.seed, example.id)[: self.top]]
                found, perfect = float(answer[first].sum()), float(min(self.top, answer.sum()))
                chance = min(1.0, self.top / len(kept)) * float(answer.sum()) / perfect
                figures = {"found": found, "perfect": perfect, "share": found / perfect, "chance": chance}
                made.append(Measurement(example.id, method, part.stream, figures))
        return made
