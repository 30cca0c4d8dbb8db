"""Agreement: how far methods rank units alike, and like leave-one-out; against what chance would give.

Kendall's tau-b and Spearman's rho on the scores themselves (of argsorts they would mean nothing), and the share of the
k highest units in common. Special units are left out. Chance: 0 for the correlations, k/n for the share in common,
which stands beside it; `random` is in every table, too. Where units tie at the k-th place, each counts by its chance to
be drawn among the k, on each side by itself: drawn the same way on both sides, flat maps would agree wholly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float

from clearhead.bench.data import Example
from clearhead.bench.output_cache import Looks, read_whole
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, register
from clearhead.bench.protocols.perturbation import seen
from clearhead.bench.protocols.sensitivity import Drops, default_fill, removed_units
from clearhead.bench.protocols.unit_removal import removal
from clearhead.errors import unknown

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

LEAVE_ONE_OUT = "leave-one-out"


@register("agreement")
@dataclass(frozen=True)
class Agreement(Protocol):
    """`top` is a number of units; `leave_one_out` False saves its passes."""

    version: ClassVar[int] = 2
    headline: ClassVar[tuple[str, ...]] = ("tau",)
    together: ClassVar[bool] = True

    explained: Explained = "predicted"
    top: int = 5
    leave_one_out: bool = True
    fill: str | None = None

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        scores = {
            method: [{stream: part.scores for stream, part in one.parts.items()} for one in own]
            for method, own in explanations.items()
        }
        first = next(iter(explanations.values()))
        if self.leave_one_out:
            scores[LEAVE_ONE_OUT] = self._left_out(ex, examples, first, looks)
        made = []
        for place, example in enumerate(examples):
            for stream, part in first[place].parts.items():
                kept = part.units.drop_special()
                if len(kept) < 2:
                    continue
                for one in explanations:
                    for other in scores:
                        if one != other and stream in scores[other][place]:
                            pair = [scores[name][place][stream] for name in (one, other)]
                            figures = self.alike(_kept(pair[0], kept), _kept(pair[1], kept))
                            made.append(Measurement(example.id, one, f"{stream}/{other}", figures))
        return made

    def alike(self, one: Float[np.ndarray, "unit"], other: Float[np.ndarray, "unit"]) -> dict[str, float]:
        from scipy.stats import kendalltau, spearmanr

        moves = np.ptp(one) > 0 and np.ptp(other) > 0
        top = min(self.top, len(one))
        return {
            "tau": float(kendalltau(one, other).statistic) if moves else float("nan"),
            "rho": float(spearmanr(one, other).statistic) if moves else float("nan"),
            f"top {self.top}": float(among_highest(one, top) @ among_highest(other, top)) / top,
            f"top {self.top} by chance": top / len(one),
        }

    def _left_out(
        self, ex: "Explainer", examples: Sequence[Example], first: Sequence[Any], looks: Looks | None
    ) -> list[dict[str, Float[np.ndarray, "unit"]]]:
        """By stream, what each unit's absence costs."""
        drops, places = Drops(ex, looks), []
        for number, example in enumerate(examples):
            whole, own = read_whole(ex, example, self), {}
            for stream in first[number].streams:
                units = seen(whole, stream)
                kept = units.drop_special()
                if len(kept):
                    way = removal(ex.subject, whole.sample, units, self.fill or default_fill(units))
                    removed = (removed_units(way, units, np.arange(len(units)) == place) for place in kept)
                    drops.ask(f"{number}/{stream}", whole, way, removed)
                    own[stream] = (len(first[number][stream]), kept)
            places.append(own)
        found = []
        for number, own in enumerate(places):
            by_stream = {}
            for stream, (length, kept) in own.items():
                by_stream[stream] = np.zeros(length)
                by_stream[stream][kept] = drops[f"{number}/{stream}"]
            found.append(by_stream)
        return found


def among_highest(scores: Float[np.ndarray, "unit"], count: int) -> Float[np.ndarray, "unit"]:
    """The chance of each unit to be among the `count` highest, where ties at the last place are drawn.

    >>> among_highest(np.array([3.0, 1.0, 1.0, 0.0]), 2).tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    last = np.sort(scores)[-count]
    above, tied = scores > last, scores == last
    return above + tied * (count - above.sum()) / tied.sum()


def _kept(scores: Float[np.ndarray, "unit"], kept: Any) -> Float[np.ndarray, "unit"]:
    return np.nan_to_num(np.asarray(scores, dtype=float)[kept])


@register("classes")
@dataclass(frozen=True)
class Classes(Protocol):
    """Do explanations of two classes differ? Rank correlation between that of the true and that of another class.

    `other` "next" is the class with the next number (of two, the other one); "second" the second likeliest.
    """

    headline: ClassVar[tuple[str, ...]] = ("tau",)

    explained: Explained = "gold"
    other: str = "next"

    def check(self) -> None:
        super().check()
        if self.other not in ("next", "second"):
            raise unknown("other", self.other, ("next", "second"))

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        from clearhead.bench.chunk_explanations import given, method_of, seed_of

        self.check()
        first = next(iter(explanations.values()))
        targets = [self._against(ex, explanation) for explanation in first]
        methods = [method_of(name) for name in explanations]
        others = ex.explain(**given(examples), method=methods, target=targets, seed=seed_of(explanations))
        made = []
        for method, own in explanations.items():
            for example, one, other in zip(examples, own, others[method], strict=True):
                for stream, part in one.parts.items():
                    kept = part.units.drop_special()
                    if len(kept) > 1:
                        pair = [_kept(scores, kept) for scores in (part.scores, other[stream].scores)]
                        found = Agreement().alike(pair[0], pair[1])
                        figures = {"tau": found["tau"], "rho": found["rho"]}
                        made.append(Measurement(example.id, method, stream, figures))
        return made

    def smaller(self, figure: str, part: str) -> bool:
        return True

    def _against(self, ex: "Explainer", explanation: Any) -> int:
        explained = int(explanation.target["index"])
        if self.other == "second":
            return next(int(one["index"]) for one in explanation.prediction["top"] if one["index"] != explained)
        return (explained + 1) % len(ex.subject.labels)
