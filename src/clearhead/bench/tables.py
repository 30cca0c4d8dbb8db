"""Tables of methods × models: means with intervals, and ranks where the examples distinguish methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from clearhead.bench.protocols.base import Measurement
from clearhead.stats import ConfidenceInterval, compute_mean_interval, compute_rank_ranges


@dataclass
class MetricColumn:
    """One metric of one model (and stream).

    Attributes:
        name: Heading of the column.
        examples: Ids of the examples.
        values_by_method: Method → value for every example, NaN where it has none.
        failure_reasons: Method → why it was not measured.
        unranked: Methods measured on other examples: they have a mean, but no rank.
        bounds: Bounds of the metric if its values often lie at a bound (`RATE_BOUNDS`).
    """

    name: str
    examples: list[str]
    values_by_method: dict[str, Float[np.ndarray, "example"]]
    failure_reasons: Mapping[str, str] = field(default_factory=dict)
    unranked: Mapping[str, Float[np.ndarray, "other"]] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    def compute_intervals(self, seed: int = 0) -> dict[str, ConfidenceInterval]:
        """Compute the interval of every method's mean.

        Args:
            seed: Seed of the resampling.

        Returns:
            Method → interval.
        """
        return {
            method: compute_mean_interval(values, bounds=self.bounds, seed=seed)
            for method, values in [*self.values_by_method.items(), *self.unranked.items()]
        }


def build_columns(
    model: str,
    measurements: Iterable[Measurement],
    metric: str,
    failure_reasons: Mapping[str, str] | None = None,
    bounds: tuple[float, float] | None = None,
) -> list[MetricColumn]:
    """Build the columns of one metric of one model, one for each measured part.

    Args:
        model: Name of the model, part of the headings.
        measurements: Measurements of one protocol.
        metric: The metric.
        failure_reasons: Method → why it was not measured.
        bounds: Bounds of the metric (`BenchmarkProtocol.get_bounds`).

    Returns:
        The columns, in the order in which the parts appear.
    """
    values_by_part: dict[str, dict[str, dict[str, float]]] = {}
    for measurement in measurements:
        if metric in measurement.figures:
            values_by_method = values_by_part.setdefault(measurement.part, {})
            values_by_example = values_by_method.setdefault(measurement.method, {})
            values_by_example[measurement.example] = measurement.figures[metric]
    columns = []
    for part_name, values_by_method in values_by_part.items():
        examples = sorted({example for values in values_by_method.values() for example in values})
        arrays = {
            method: np.array([values.get(example, np.nan) for example in examples])
            for method, values in values_by_method.items()
        }
        name = model if len(values_by_part) == 1 else f"{model}, {part_name}"
        columns.append(MetricColumn(name, examples, arrays, failure_reasons or {}, bounds=bounds))
    return columns


def compute_column_agreement(columns: Sequence[MetricColumn]) -> dict[tuple[str, str], float]:
    """Compute Kendall's tau-b of the methods' means for every two columns.

    With one column per fill it shows whether the ranking depends on the replacement of removed units; if tau is small,
    the ranking under a single fill means little. Methods that one of both columns lacks are left out.

    Args:
        columns: The columns to compare.

    Returns:
        Names of two columns → tau-b, NaN with fewer than two shared methods.
    """
    from scipy.stats import kendalltau

    agreement = {}
    for index, first in enumerate(columns):
        for second in columns[index + 1 :]:
            shared = [method for method in first.values_by_method if method in second.values_by_method]
            means = [
                [float(np.nanmean(column.values_by_method[method])) for method in shared] for column in (first, second)
            ]
            tau = float(kendalltau(*means).statistic) if len(shared) > 1 else float("nan")
            agreement[first.name, second.name] = tau
    return agreement


def render_markdown_table(columns: Sequence[MetricColumn], smaller_is_better: bool = False) -> str:
    """Render methods × columns as Markdown: mean [interval] · rank.

    Methods that the examples do not distinguish share a range of ranks.

    Args:
        columns: The columns, of one metric.
        smaller_is_better: Direction of the metric.

    Returns:
        The table; its last line is the number of examples.
    """
    listed = [
        method for column in columns for method in [*column.values_by_method, *column.unranked, *column.failure_reasons]
    ]
    methods = list(dict.fromkeys(listed))
    intervals_by_column = [column.compute_intervals() for column in columns]
    ranks_by_column = [compute_rank_ranges(column.values_by_method, smaller_is_better) for column in columns]
    lines = ["| method | " + " | ".join(column.name for column in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for method in sort_methods_by_mean(methods, intervals_by_column, smaller_is_better):
        cells = [
            _format_cell(intervals.get(method), ranks.get(method), len(column.examples))
            for column, intervals, ranks in zip(columns, intervals_by_column, ranks_by_column, strict=True)
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    counts = " | ".join(str(len(column.examples)) for column in columns)
    return "\n".join([*lines, f"| examples | {counts} |"])


def _format_cell(interval: ConfidenceInterval | None, rank: str | None, num_examples: int) -> str:
    """Format a cell; the number of examples is shown where it differs from the column's.

    >>> interval = ConfidenceInterval(0.5, 0.4, 0.6, 9)
    >>> _format_cell(interval, "1–3", 9), _format_cell(interval, "1–3", 12)
    ('0.500 [0.400, 0.600] · 1–3', '0.500 [0.400, 0.600] (9) · 1–3')
    >>> _format_cell(interval, None, 9), _format_cell(None, None, 9)
    ('0.500 [0.400, 0.600] (9 others)', '–')
    """
    if interval is None:
        return "–"
    if rank is None:
        return f"{interval.format_without_count()} ({interval.count} others)"
    if interval.count < num_examples:
        return f"{interval.format_without_count()} ({interval.count}) · {rank}"
    return f"{interval.format_without_count()} · {rank}"


def render_metrics_markdown(metrics_by_method: Mapping[str, Mapping[str, float]]) -> str:
    """Render methods × metrics without intervals as Markdown, in descending order of the last metric.

    Args:
        metrics_by_method: Method → metrics over all examples.

    Returns:
        The table.

    Example:
        >>> print(render_metrics_markdown({"a": {"AP": 0.5, "AR": math.nan}, "b": {"AP": 0.75, "AR": math.nan}}))
        | method | AP | AR |
        | --- | --- | --- |
        | b | 0.750 | – |
        | a | 0.500 | – |
    """
    metrics = list(next(iter(metrics_by_method.values())))
    lines = [f"| method | {' | '.join(metrics)} |", "| --- |" + " --- |" * len(metrics)]
    for method, values in sort_methods_descending(metrics_by_method):
        lines.append(f"| {method} | {' | '.join(_format_metric(values[metric]) for metric in metrics)} |")
    return "\n".join(lines)


def sort_methods_descending(
    metrics_by_method: Mapping[str, Mapping[str, float]],
) -> list[tuple[str, Mapping[str, float]]]:
    """Sort methods by the last metric that is a number for all of them, the largest first."""
    sort_metric: str | None = None
    for metric in next(iter(metrics_by_method.values())):
        if not any(math.isnan(values[metric]) for values in metrics_by_method.values()):
            sort_metric = metric

    def sort_key(item: tuple[str, Mapping[str, float]]) -> tuple[float, str]:
        method, values = item
        return (0.0 if sort_metric is None else -values[sort_metric], method)

    return sorted(metrics_by_method.items(), key=sort_key)


def _format_metric(value: float) -> str:
    """Format a metric; NaN (such as the AP of large objects where there are none) is shown as –."""
    return "–" if math.isnan(value) else f"{value:.3f}"


def sort_methods_by_mean(
    methods: Sequence[str], intervals_by_column: Sequence[Mapping[str, ConfidenceInterval]], smaller_is_better: bool
) -> list[str]:
    """Sort methods by their mean over the columns that contain them: a display order, not a ranking."""

    def sort_key(method: str) -> tuple[float, str]:
        means = [intervals[method].mean for intervals in intervals_by_column if method in intervals]
        if not means:
            return (math.inf, method)
        mean = float(np.mean(means))
        return (mean if smaller_is_better else -mean, method)

    return sorted(methods, key=sort_key)
