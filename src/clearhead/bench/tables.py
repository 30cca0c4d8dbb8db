"""Tables of methods × models from measurements: means with intervals, ranks only where the examples decide them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from clearhead.bench.protocols.base import Measurement
from clearhead.stats import Interval, interval, ranks


@dataclass
class Column:
    """One model (and stream): for each method the figure of every example, NaN where it has none.

    apart: methods that were measured on other examples than these: they have a mean, and no rank among the others
    """

    name: str
    examples: list[str]
    values: dict[str, Float[np.ndarray, "example"]]
    refused: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, Float[np.ndarray, "other"]] = field(default_factory=dict)

    def intervals(self, seed: int = 0) -> dict[str, Interval]:
        return {method: interval(own, seed=seed) for method, own in [*self.values.items(), *self.apart.items()]}


def columns(
    model: str, measurements: Iterable[Measurement], figure: str, refused: Mapping[str, str] | None = None
) -> list[Column]:
    """One figure of one model's measurements, a column for each stream that was measured."""
    by_part: dict[str, dict[str, dict[str, float]]] = {}
    for one in measurements:
        if figure in one.figures:
            by_part.setdefault(one.part, {}).setdefault(one.method, {})[one.example] = one.figures[figure]
    made = []
    for part, by_method in by_part.items():
        examples = sorted({example for own in by_method.values() for example in own})
        values = {
            method: np.array([own.get(example, np.nan) for example in examples]) for method, own in by_method.items()
        }
        name = model if len(by_part) == 1 else f"{model}, {part}"
        made.append(Column(name, examples, values, refused or {}))
    return made


def agreement_of_parts(table: Sequence[Column]) -> dict[tuple[str, str], float]:
    """How far two columns put methods in the same order: Kendall's tau-b of their means.

    With a column for each fill it says whether the verdict depends on what stands where units were removed; a small
    value means that a ranking by one fill alone says little. Methods that one of the two lacks are left out.
    """
    from scipy.stats import kendalltau

    found = {}
    for place, one in enumerate(table):
        for other in table[place + 1 :]:
            shared = [method for method in one.values if method in other.values]
            means = [[float(np.nanmean(column.values[method])) for method in shared] for column in (one, other)]
            found[one.name, other.name] = float(kendalltau(*means).statistic) if len(shared) > 1 else float("nan")
    return found


def markdown(table: Sequence[Column], smaller_is_better: bool = False) -> str:
    """Methods × columns: mean [interval], and the rank; methods that cannot be told apart share a range of ranks."""
    listed = [method for column in table for method in [*column.values, *column.apart, *column.refused]]
    methods = list(dict.fromkeys(listed))
    shown = [(column.intervals(), ranks(column.values, smaller_is_better)) for column in table]
    lines = ["| method | " + " | ".join(column.name for column in table) + " |", "| --- |" + " --- |" * len(table)]
    for method in ordered(methods, [own for own, _ in shown], smaller_is_better):
        cells = [
            _cell(intervals.get(method), places.get(method), len(column.examples))
            for column, (intervals, places) in zip(table, shown, strict=True)
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    counts = " | ".join(str(len(column.examples)) for column in table)
    return "\n".join([*lines, f"| examples | {counts} |"])


def _cell(found: Interval | None, rank: str | None, examples: int) -> str:
    """
    >>> _cell(Interval(0.5, 0.4, 0.6, 9), "1–3", 9), _cell(Interval(0.5, 0.4, 0.6, 4), "1–3", 9)
    ('0.500 [0.400, 0.600] · 1–3', '0.500 [0.400, 0.600] (4) · 1–3')
    >>> _cell(Interval(0.5, 0.4, 0.6, 4), None, 9), _cell(None, None, 9)
    ('0.500 [0.400, 0.600] (4 others)', '–')
    """
    if found is None:
        return "–"
    if rank is None:
        return f"{found} ({found.count} others)"
    return f"{found} ({found.count}) · {rank}" if found.count < examples else f"{found} · {rank}"


def plain(by_method: Mapping[str, Mapping[str, float]]) -> str:
    """Methods × figures that have no interval, those with the largest of the last figure first.

    >>> print(plain({"a": {"AP": 0.5, "AP large": math.nan}, "b": {"AP": 0.75, "AP large": math.nan}}))
    | method | AP | AP large |
    | --- | --- | --- |
    | b | 0.750 | – |
    | a | 0.500 | – |
    """
    figures = list(next(iter(by_method.values())))
    lines = [f"| method | {' | '.join(figures)} |", "| --- |" + " --- |" * len(figures)]
    for method, own in largest_first(by_method):
        lines.append(f"| {method} | {' | '.join(_figure(own[figure]) for figure in figures)} |")
    return "\n".join(lines)


def largest_first(by_method: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Methods in the order of the last figure that is a number for all of them."""
    known = [figure for figure in next(iter(by_method.values())) if not any(map(math.isnan, _all(by_method, figure)))]
    return sorted(by_method.items(), key=lambda one: (-one[1][known[-1]] if known else 0.0, one[0]))


def _all(by_method: Mapping[str, Mapping[str, float]], figure: str) -> list[float]:
    return [own[figure] for own in by_method.values()]


def _figure(value: float) -> str:
    """Nothing to measure, as the AP of large objects where there is none, is no number."""
    return "–" if math.isnan(value) else f"{value:.3f}"


def ordered(methods: Sequence[str], shown: Sequence[Mapping[str, Interval]], smaller_is_better: bool) -> list[str]:
    """By the mean over those columns that a method has: an order to read by, not a ranking."""

    def mean(method: str) -> float:
        own = [intervals[method].mean for intervals in shown if method in intervals]
        return float(np.mean(own)) if own else (np.inf if smaller_is_better else -np.inf)

    return sorted(methods, key=lambda method: (mean(method) if smaller_is_better else -mean(method), method))
