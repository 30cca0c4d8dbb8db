"""Many explanations put together: which words matter most in a data set, and a table of everything."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import LEVELS

if TYPE_CHECKING:
    import pandas

By = Literal["word", "label", "position"]
How = Literal["sum", "mean"]


@dataclass(frozen=True)
class Aggregate:
    """One row per word, label or position, the largest first."""

    by: str
    how: str
    rows: tuple[tuple[str, float, int], ...]  # what, score, how often

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        return [(name, score) for name, score, _ in self.rows[:count]]

    def to_dict(self) -> dict[str, Any]:
        rows = [{"name": name, "score": score, "count": count} for name, score, count in self.rows]
        return {"schema": "clearhead/aggregate", "version": 1, "by": self.by, "how": self.how, "rows": rows}

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_aggregate

        return render_aggregate(self)


def aggregate(
    explanations: Sequence[AnyExplanation], by: By = "word", how: How = "sum", absolute: bool = False
) -> Aggregate:
    """Scores summed or averaged over many inputs, special tokens left out.

    by="word" adds up every occurrence of a word (case folded), "label" the whole of each explained label,
    "position" each place in the input (in each stream, where there are several)
    absolute: add up the sizes of scores, so that what speaks for and what speaks against do not cancel
    """
    explanations = _as_list(explanations)
    if not explanations:
        raise InputError("nothing to aggregate: the list is empty")
    if how not in ("sum", "mean"):
        raise unknown("how", how, ("sum", "mean"))
    methods = {explanation.method for explanation in explanations}
    if len(methods) > 1:
        raise InputError(f"scores of different methods do not add up: {', '.join(sorted(methods))}")
    scales = {str(explanation.target.get("scale")) for explanation in explanations}
    if len(scales) > 1:
        raise InputError(f"scores of targets on different scales do not add up: {', '.join(sorted(scales))}")
    if by not in _KEYS:
        raise unknown("by", by, _KEYS)
    found: dict[str, list[float]] = defaultdict(list)
    for explanation in explanations:
        for key, score in _KEYS[by](explanation, absolute):
            if not np.isnan(score):  # a unit that the method dropped
                found[key].append(score)
    total: Callable[[list[float]], float] = sum if how == "sum" else (lambda scores: float(np.mean(scores)))
    rows = [(key, float(total(scores)), len(scores)) for key, scores in found.items()]
    return Aggregate(by, how, tuple(sorted(rows, key=lambda row: (-row[1], row[0]))))


def _as_list(explanations: Sequence[AnyExplanation]) -> list[AnyExplanation]:
    given = [explanations] if isinstance(explanations, AnyExplanation) else list(explanations)
    for one in given:
        if not isinstance(one, AnyExplanation):
            raise InputError(f"expected a list of explanations, but it holds a {type(one).__name__}")
    return given


def _by_word(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    texts = [part for part in explanation.parts.values() if part.units.kind in LEVELS]
    words = [
        part.words(absolute) for part in texts or explanation.parts.values()
    ]  # where no part is a text, that is refused
    return [(part.units.names[i].casefold(), score) for part in words for i, score in _scores(part)]


def _by_label(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    scores = [score for part in explanation.parts.values() for _, score in _scores(part, absolute)]
    return [(str(explanation.target.get("name")), float(np.nansum(scores)))]


def _by_position(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    several = len(explanation.parts) > 1
    return [
        (f"{stream} {place}" if several else str(place), score)
        for stream, part in explanation.parts.items()
        for place, score in _scores(part, absolute)
    ]


def _scores(part: Explanation, absolute: bool = False) -> list[tuple[int, float]]:
    scores = np.abs(part.scores) if absolute else part.scores
    return [(int(place), float(scores[place])) for place in part.units.drop_special()]


_KEYS: dict[str, Callable[[AnyExplanation, bool], list[tuple[str, float]]]] = {
    "word": _by_word,
    "label": _by_label,
    "position": _by_position,
}


def to_frame(explanations: Sequence[AnyExplanation]) -> "pandas.DataFrame":
    """One row per unit of every explanation, as a pandas data frame (pandas is not a dependency: install it)."""
    try:
        import pandas
    except ImportError:
        raise InputError("a data frame needs pandas: pip install pandas") from None
    rows = [
        {
            "input": number,
            "stream": stream,
            "unit": place,
            "name": name,
            "special": part.units.special[place],
            "score": float(part.scores[place]),
            "method": explanation.method,
            "target": explanation.target.get("name"),
            "predicted": explanation.prediction.get("label"),
            "probability": explanation.prediction.get("probability"),
        }
        for number, explanation in enumerate(_as_list(explanations))
        for stream, part in explanation.parts.items()
        for place, name in enumerate(part.units.names)
    ]
    return pandas.DataFrame(rows)
