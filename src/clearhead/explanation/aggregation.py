"""Aggregation of many explanations: the most important words of a data set, and a data frame of all scores."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import TEXT_LEVELS

if TYPE_CHECKING:
    import pandas

GroupBy = Literal["word", "label", "position"]
ScoreReduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class AggregatedScores:
    """Aggregated scores: one row per word, label or position, in descending order.

    Attributes:
        group_by: "word", "label" or "position".
        reduction: "sum" or "mean".
        rows: Triples of name, aggregated score and number of occurrences.
    """

    group_by: str
    reduction: str
    rows: tuple[tuple[str, float, int], ...]

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the names with the largest scores.

        Args:
            count: Number of rows.

        Returns:
            Pairs of name and score.

        Example:
            >>> AggregatedScores("word", "sum", (("good", 0.7, 3), ("film", 0.1, 5))).top(1)
            [('good', 0.7)]
        """
        return [(name, score) for name, score, _ in self.rows[:count]]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form.

        Returns:
            A dict of plain Python values.

        Example:
            >>> AggregatedScores("word", "sum", (("good", 0.7, 3),)).to_dict()["rows"]
            [{'name': 'good', 'score': 0.7, 'count': 3}]
        """
        rows = [{"name": name, "score": score, "count": count} for name, score, count in self.rows]
        return {"schema": "clearhead/aggregate", "version": 1, "by": self.group_by, "how": self.reduction, "rows": rows}

    def _repr_html_(self) -> str:
        """Return an HTML fragment, which notebooks display."""
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_aggregate

        return render_aggregate(self)


def aggregate(
    explanations: Sequence[AnyExplanation],
    by: GroupBy = "word",
    reduction: ScoreReduction = "sum",
    absolute: bool = False,
) -> AggregatedScores:
    """Sum or average the scores of many explanations by word, label or position, without special tokens.

    Args:
        explanations: Explanations of one method and one target scale.
        by: "word" adds up all occurrences of a word (case-folded), "label" all scores of each explained label,
            "position" the scores at each index of the input (per stream, where there are several).
        reduction: "sum" or "mean" over occurrences.
        absolute: Add up absolute values, so that positive and negative scores do not cancel.

    Returns:
        The aggregated scores, the largest first.

    Raises:
        InputError: If the list is empty, or mixes methods or target scales, or an option is unknown.

    Example:
        >>> explanations = ex.explain(texts)  # doctest: +SKIP
        >>> clearhead.aggregate(explanations, by="word", reduction="mean").top(5)  # doctest: +SKIP
    """
    explanations = _check_explanations(explanations)
    if not explanations:
        raise InputError("nothing to aggregate: the list is empty")
    if reduction not in ("sum", "mean"):
        raise unknown_value_error("reduction", reduction, ("sum", "mean"))
    methods = {explanation.method for explanation in explanations}
    if len(methods) > 1:
        raise InputError(f"scores of different methods cannot be added up: {', '.join(sorted(methods))}")
    scales = {str(explanation.target.get("scale")) for explanation in explanations}
    if len(scales) > 1:
        raise InputError(f"scores of targets on different scales cannot be added up: {', '.join(sorted(scales))}")
    if by not in _COLLECTORS:
        raise unknown_value_error("value for by=", by, _COLLECTORS)
    scores_by_key: dict[str, list[float]] = defaultdict(list)
    for explanation in explanations:
        for key, score in _COLLECTORS[by](explanation, absolute):
            if not np.isnan(score):  # NaN: the method has no score for this unit
                scores_by_key[key].append(score)
    rows = [(key, _reduce_scores(scores, reduction), len(scores)) for key, scores in scores_by_key.items()]
    return AggregatedScores(by, reduction, tuple(sorted(rows, key=lambda row: (-row[1], row[0]))))


def _reduce_scores(scores: list[float], reduction: ScoreReduction) -> float:
    """Add up or average the scores of all occurrences."""
    if reduction == "sum":
        return float(sum(scores))
    return float(np.mean(scores))


def _check_explanations(explanations: Sequence[AnyExplanation]) -> list[AnyExplanation]:
    """Return a list of explanations; a single one becomes a list."""
    if isinstance(explanations, AnyExplanation):
        return [explanations]
    checked = list(explanations)
    for explanation in checked:
        if not isinstance(explanation, AnyExplanation):
            raise InputError(f"expected a list of explanations, but it contains a {type(explanation).__name__}")
    return checked


def _collect_scores_by_word(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    """Return the score of each occurrence of a word, case-folded; only of texts if there are any."""
    streams = list(explanation.by_stream.values())
    texts = [stream for stream in streams if stream.units.kind in TEXT_LEVELS]
    word_explanations = [stream.words(absolute) for stream in texts or streams]  # raises an error if none is a text
    return [
        (words.units.names[i].casefold(), score)
        for words in word_explanations
        for i, score in _collect_content_scores(words)
    ]


def _collect_scores_by_label(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    """Return the label of the target with the sum of all scores without special tokens."""
    scores = [
        score for stream in explanation.by_stream.values() for _, score in _collect_content_scores(stream, absolute)
    ]
    return [(str(explanation.target.get("name")), float(np.nansum(scores)))]


def _collect_scores_by_position(explanation: AnyExplanation, absolute: bool) -> list[tuple[str, float]]:
    """Return the score at each index, prefixed with the stream if there are several."""
    scores_by_position = []
    for name, stream in explanation.by_stream.items():
        prefix = f"{name} " if len(explanation.by_stream) > 1 else ""
        scores_by_position += [(f"{prefix}{i}", score) for i, score in _collect_content_scores(stream, absolute)]
    return scores_by_position


def _collect_content_scores(explanation: Explanation, absolute: bool = False) -> list[tuple[int, float]]:
    """Return index and score of every unit that is not special."""
    scores = np.abs(explanation.scores) if absolute else explanation.scores
    return [(int(i), float(scores[i])) for i in explanation.units.content_indices()]


_COLLECTORS: dict[str, Callable[[AnyExplanation, bool], list[tuple[str, float]]]] = {
    "word": _collect_scores_by_word,
    "label": _collect_scores_by_label,
    "position": _collect_scores_by_position,
}


def to_frame(explanations: Sequence[AnyExplanation]) -> "pandas.DataFrame":
    """Collect the scores of many explanations in a pandas data frame.

    Args:
        explanations: Explanations of any methods and targets.

    Returns:
        One row per unit, with the columns input, stream, unit, name, special, score, method, target, predicted and
        probability.

    Raises:
        InputError: If pandas is not installed (it is not a dependency), or the list holds something else.

    Example:
        >>> frame = clearhead.to_frame(ex.explain(texts))  # doctest: +SKIP
        >>> frame[~frame["special"]].groupby("name")["score"].mean()  # doctest: +SKIP
    """
    try:
        import pandas
    except ImportError:
        raise InputError("a data frame needs pandas: pip install pandas") from None
    rows = [
        {
            "input": input_index,
            "stream": stream,
            "unit": unit_index,
            "name": name,
            "special": stream_explanation.units.special[unit_index],
            "score": float(stream_explanation.scores[unit_index]),
            "method": explanation.method,
            "target": explanation.target.get("name"),
            "predicted": explanation.prediction.get("label"),
            "probability": explanation.prediction.get("probability"),
        }
        for input_index, explanation in enumerate(_check_explanations(explanations))
        for stream, stream_explanation in explanation.by_stream.items()
        for unit_index, name in enumerate(stream_explanation.units.names)
    ]
    return pandas.DataFrame(rows)
