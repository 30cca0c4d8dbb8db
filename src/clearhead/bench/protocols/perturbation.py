"""Perturbation: what the model still says when the units with the highest (or the lowest) scores are removed.

For each example, method, fill and direction a curve over the removed share f, from the clean input at f = 0 on:

    accuracy     1 where the likeliest class is the judged one (its soft score, where labels are answers with scores)
    probability  p_f of the judged class;   logit  its score before softmax
    log ratio    ln p_f / p_0;              log margin  ln p_f of the judged class − that of the likeliest other

    area             of accuracy and probability by all conventions of `curves.area`
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
from clearhead.bench.output_cache import Looks, Whole, log_probabilities, read_whole
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, ranking
from clearhead.bench.protocols.curves import CONVENTIONS, ROUNDINGS, area, removed_counts
from clearhead.bench.protocols.unit_removal import OF_PICTURES, OF_REGIONS, OF_TEXTS, removal
from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

DIRECTIONS = ("positive", "negative", "keep")
#: Of anything; which of them a stream takes is known when it is seen.
FILLS = tuple(dict.fromkeys([*OF_TEXTS, *OF_REGIONS, *OF_PICTURES]))
TENTHS = tuple(tenth / 10 for tenth in range(1, 11))


@dataclass(frozen=True)
class Perturbation(Protocol):
    """What perturbation of pictures, texts and regions have in common.

    judged: whose accuracy and probability are followed, "gold", "predicted" (on the clean input) or "explained"
    examples: "all", those predicted "correct", or "wrong"
    fractions: how much is removed, apart from the clean input; none at all means one unit after the other
    fills: what stands where units were; each gives curves of its own
    """

    about: ClassVar[str] = (
        "What the model still says when units go, those with the highest scores first (positive) or the lowest "
        "(negative). “probability clearhead” is the mean height of the curve of the followed class’s probability, aopc "
        "how far it falls on average. Parts are named: stream / what stands instead / direction."
    )
    headline: ClassVar[tuple[str, ...]] = ("probability clearhead", "aopc")

    explained: Explained = "predicted"
    judged: str = "predicted"
    examples: str = "all"
    fractions: tuple[float, ...] = TENTHS
    rounding: str = "removed"
    directions: tuple[str, ...] = ("positive", "negative")
    fills: tuple[str, ...] = ()

    def smaller(self, figure: str, part: str) -> bool:
        direction = part.split("/")[-1]
        falls = figure in ("aopc", "absolute aopc")
        return (direction == "positive") != falls

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        return self.counted(ex, examples, explanations, looks)[0]

    def counted(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: Looks | None = None,
    ) -> tuple[list[Measurement], Looks]:
        """The measurements, and the table of altered inputs that tells how many went through the model."""
        self.check()
        looks = looks or Looks(ex)
        wholes = [read_whole(ex, example, self) for example in examples]
        clean = [looks.ask(whole.sample, whole.target) for whole in wholes]
        looks.finish()
        asked: list[tuple[int, str, str, list[bytes]]] = []
        judges: dict[int, _Judge] = {}
        for place, whole in enumerate(wholes):
            judge = _Judge(whole, looks[clean[place]], self.judged)
            if self.examples != "all" and judge.correct is None:
                raise InputError(f"examples={self.examples!r}, but {whole.example.id!r} has no true class")
            if self.examples != "all" and judge.correct != (self.examples == "correct"):
                continue
            judges[place] = judge
            for part, method, altered in self._altered(ex, whole, place, explanations):
                tickets = [looks.ask(sample, whole.target, bare) for sample, bare in altered]
                asked.append((place, method, part, [clean[place], *tickets]))
        looks.finish()
        made = []
        for place, method, part, tickets in asked:
            figures, curves = self._figures(judges[place], [looks[one] for one in tickets], part.split("/")[-1])
            made.append(Measurement(examples[place].id, method, part, figures, curves))
        return made, looks

    def altered(self, methods: int) -> int | None:
        if not self.fractions:
            return None
        return 1 + methods * len(self.fills) * len(self.directions) * len(self.fractions)

    def check(self) -> None:
        super().check()
        for what, given, accepted in (
            ("class to judge by", (self.judged,), ("gold", "predicted", "explained")),
            ("examples", (self.examples,), ("all", "correct", "wrong")),
            ("direction", self.directions, DIRECTIONS),
            ("rounding", (self.rounding,), ROUNDINGS),
            ("fill", self.fills, FILLS),
        ):
            if not given:
                raise InputError(f"no {what} was given: there are {', '.join(accepted)}")
            for one in given:
                if one not in accepted:
                    raise unknown(what, one, accepted)
        if list(self.fractions) != sorted(set(self.fractions)) or (self.fractions and self.fractions[0] <= 0):
            raise InputError(f"fractions must rise from above 0 (the clean input is always there): {self.fractions}")
        if max(self.fractions, default=0) > 1:
            raise InputError(f"fractions must lie between 0 and 1, but are {self.fractions}")

    def _altered(
        self, ex: "Explainer", whole: Whole, place: int, explanations: Explanations
    ) -> Iterator[tuple[str, str, Iterator[tuple[Any, bool]]]]:
        """Every part and method, with the altered inputs of its curve, and whether nothing is left of them."""
        first = next(iter(explanations.values()))[place]
        for stream in self.streams_of(first.streams, first):
            units = seen(whole, stream)
            for fill in self.fills:
                way = removal(ex.subject, whole.sample, units, fill)
                for method, own in explanations.items():
                    explained = own[place][stream]
                    part = replace(explained, units=units, scores=explained.scores[: len(units)])
                    for direction in self.directions:
                        masks = self.removed(part, direction, way, whole.example)
                        altered = ((way.without(gone), way.bare(gone)) for gone in masks)
                        yield f"{stream}/{fill}/{direction}", method, altered

    def streams_of(self, streams: Sequence[str], explanation: Any) -> Sequence[str]:
        """Of an explanation's streams those that this protocol removes from."""
        raise NotImplementedError

    def removed(
        self, part: Explanation, direction: str, way: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "item"]]:
        """What is removed at each fraction."""
        raise NotImplementedError

    def counts(self, whole: int) -> list[int]:
        """Of so many how many are removed at each fraction."""
        if not self.fractions and not whole:
            raise InputError("nothing of it may be removed: there is no curve of single steps")
        return removed_counts(self.fractions, whole, self.rounding) if self.fractions else list(range(1, whole + 1))

    def _masks(
        self,
        scores: Float[np.ndarray, "candidate"],
        places: Sequence[int] | np.ndarray,
        size: int,
        direction: str,
        counts: Sequence[int],
        key: Sequence[Any],
    ) -> Iterator[Bool[np.ndarray, "item"]]:
        """The first so many of the ranking; a candidate whose place is −1 is no unit (padding), and costs a step."""
        order = np.asarray(places)[ranking(-scores if direction == "negative" else scores, self.seed, *key)]
        for count in counts:
            gone = order[count:] if direction == "keep" else order[:count]
            removed = np.zeros(size, dtype=bool)
            removed[gone[gone >= 0]] = True
            yield removed

    def _figures(
        self, judge: "_Judge", scores: Sequence[Float[np.ndarray, "label"]], direction: str
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        steps = len(scores) - 1
        x = (0.0, *(self.fractions or (step / steps for step in range(1, steps + 1))))
        curves = judge.curves(scores)
        p, ratio = np.asarray(curves["probability"]), np.asarray(curves["log ratio"])
        figures = {
            "aopc": float((p[0] - p[1:]).mean()),
            "absolute aopc": float(np.abs(p[0] - p[1:]).mean()),
            "log-odds": float(ratio[1:].mean()),
        }
        if judge.correct is not None:
            figures["correct"] = float(judge.correct)
        if direction != "keep":  # what is kept grows along that curve, and the clean input is no end of it
            for curve in ("accuracy", "probability"):
                figures |= {f"{curve} {convention}": area(x, curves[curve], convention) for convention in CONVENTIONS}
        return figures, {"fraction": x, **curves}


def seen(whole: Whole, stream: str) -> Units:
    """The units that the model sees: of an answer, none that come after the word that is explained."""
    return next(part for axis in whole.sample.axes.values() for part in axis.parts if part.stream == stream)


class _Judge:
    """Which class is followed, and what counts as right."""

    def __init__(self, whole: Whole, clean: Float[np.ndarray, "label"], judged: str) -> None:
        self.classes, self.label = whole.classes, whole.example.label
        choices = _choices(self.classes, clean)
        if len(choices) < 2 and not self.classes.multi_label:
            raise InputError("the model gives one number and no classes: there is no curve to follow")
        predicted = int(choices.argmax())
        explained = whole.target.classes(_tensor(clean), self.classes)[0]
        self.gold = self._gold(whole, predicted, explained)
        if judged == "gold" and self.gold is None:
            raise InputError(f"judged='gold', but {whole.example.id!r} has no true class: say judged='predicted'")
        followed = {"gold": self.gold, "predicted": predicted, "explained": explained}[judged]
        assert followed is not None
        self.followed, self.soft = followed, judged == "gold" and isinstance(self.label, Mapping)
        self.correct = self._correct(predicted)

    def _gold(self, whole: Whole, predicted: int, explained: int) -> int | None:
        if whole.example.answer is not None or whole.example.target is not None:
            return explained  # what the example says is to be explained is its true class
        if isinstance(self.label, Mapping):
            scored = {answer: score for answer, score in self.label.items() if answer in self.classes.labels.values()}
            return self.classes.label_index(max(scored, key=lambda answer: scored[answer])) if scored else None
        return self.label

    def _correct(self, predicted: int) -> bool | None:
        """None where nobody says what is true."""
        if isinstance(self.label, Mapping):
            return self._soft(predicted) > 0
        return None if self.gold is None else predicted == self.gold

    def _soft(self, predicted: int) -> float:
        assert isinstance(self.label, Mapping)
        return float(self.label.get(self.classes.label_name(predicted), 0.0))

    def curves(self, scores: Sequence[Float[np.ndarray, "label"]]) -> dict[str, tuple[float, ...]]:
        y = self.followed
        logs = [log_probabilities(row, self.classes.multi_label) for row in scores]
        chosen = [int(_choices(self.classes, row).argmax()) for row in scores]
        others = [np.delete(own, y).max(initial=-np.inf) for own in logs]
        return {
            "accuracy": tuple(self._soft(one) if self.soft else float(one == y) for one in chosen),
            "probability": tuple(float(np.exp(own[y])) for own in logs),
            "logit": tuple(float(row[y]) for row in scores),
            "log ratio": tuple(float(own[y] - logs[0][y]) for own in logs),
            "log margin": tuple(float(own[y] - other) for own, other in zip(logs, others, strict=True)),
        }


def _tensor(scores: Float[np.ndarray, "label"]) -> Any:
    import torch

    return torch.as_tensor(scores)


def _choices(classes: Any, scores: Float[np.ndarray, "label"]) -> Float[np.ndarray, "label"]:
    return np.asarray(classes.choices(_tensor(scores)))
