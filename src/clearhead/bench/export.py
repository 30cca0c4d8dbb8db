"""Renders the tables of a run as LaTeX and CSV text, for papers and other programs."""

import csv
import io
import math
from collections.abc import Iterator, Mapping

from clearhead.bench.run_results import MetricTable, ProtocolResults, RunResults
from clearhead.bench.tables import sort_methods_by_mean, sort_methods_descending
from clearhead.stats import ConfidenceInterval, compute_rank_ranges

CSV_COLUMNS = ("protocol", "settings", "part", "figure", "better", "method", "mean", "low", "high", "examples", "rank")
_LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "→": r"$\to$",
    "<": "$<$",
    ">": "$>$",
}


def render_csv_table(results: RunResults) -> str:
    """Render every metric of every method as CSV, with its interval and its rank.

    Metrics over all examples at once (mIoU, COCO AP) have neither.

    Args:
        results: Results of a finished run.

    Returns:
        The table, with a header line.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for section in results.protocol_results:
        writer.writerows(_iter_csv_rows(section))
    return out.getvalue()


def _iter_csv_rows(section: ProtocolResults) -> Iterator[list[object]]:
    """Yield a row for each metric, column and method, then the metrics over all examples at once."""
    for metric in section.metrics:
        for table in section.iter_tables(metric):
            for column in table.columns:
                ranks = compute_rank_ranges(column.values_by_method, table.smaller_is_better)
                for method, interval in sorted(column.compute_intervals().items()):
                    bounds = (repr(interval.low), repr(interval.high)) if interval.has_bounds else ("", "")
                    yield [
                        *(section.name, section.hash, column.name, metric, table.better_direction, method),
                        *(repr(interval.mean), *bounds, interval.count, ranks[method]),
                    ]
    for part_name, metrics_by_method in section.compute_dataset_metrics().items():
        for method, metrics in metrics_by_method.items():
            for metric, value in metrics.items():
                name = f"{metric} (over all examples)"
                yield [section.name, section.hash, part_name, name, "larger", method, repr(value), "", "", "", ""]


def render_latex_tables(results: RunResults) -> str:
    """Render the headline metrics and the metrics over all examples as LaTeX tables (package booktabs).

    Args:
        results: Results of a finished run.

    Returns:
        One tabular for each table; ranks follow the bar.
    """
    tabulars = []
    for section in results.protocol_results:
        tabulars += [
            _render_tabular(section, table)
            for metric in section.headline_metrics
            for table in section.iter_tables(metric)
        ]
        tabulars += [
            _render_dataset_metrics(section, part_name, metrics_by_method)
            for part_name, metrics_by_method in section.compute_dataset_metrics().items()
        ]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tabulars)


def _render_tabular(section: ProtocolResults, table: MetricTable) -> str:
    """Render one metric as a LaTeX tabular with booktabs rules, the best method first."""
    head = " & ".join(["method", *(escape_latex_cell(column.name) for column in table.columns)])
    intervals_by_column = [column.compute_intervals() for column in table.columns]
    ranks_by_column = [
        compute_rank_ranges(column.values_by_method, table.smaller_is_better) for column in table.columns
    ]
    methods = list(dict.fromkeys(method for column in table.columns for method in column.values_by_method))
    lines = [
        f"% {section.name}: {table.metric} ({table.better_direction} is better); mean [95% interval] | rank",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
    ]
    for method in sort_methods_by_mean(methods, intervals_by_column, table.smaller_is_better):
        cells = [
            _render_cell(intervals.get(method), ranks.get(method), len(column.examples))
            for column, intervals, ranks in zip(table.columns, intervals_by_column, ranks_by_column, strict=True)
        ]
        lines.append(rf"{' & '.join([escape_latex_cell(method), *cells])} \\")
    counts = " & ".join(["examples", *(str(len(column.examples)) for column in table.columns)])
    return "\n".join([*lines, r"\midrule", rf"{counts} \\", r"\bottomrule", r"\end{tabular}", ""])


def _render_cell(interval: ConfidenceInterval | None, rank: str | None, num_examples: int) -> str:
    """Format mean, interval and rank for LaTeX, with n where it differs from the column's; -- if not measured."""
    if interval is None or rank is None:
        return "--"
    count = f" ({interval.count})" if interval.count < num_examples else ""
    return f"{interval.format_without_count().replace('-', '$-$')}{count} $|$ {escape_latex_cell(rank)}"


def _render_dataset_metrics(
    section: ProtocolResults, part_name: str, metrics_by_method: Mapping[str, Mapping[str, float]]
) -> str:
    """Render metrics over all examples at once, such as mIoU and COCO AP, which have no interval."""
    metrics = list(next(iter(metrics_by_method.values())))
    lines = [
        f"% {section.name}: {part_name}, over all examples at once",
        rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}",
        r"\toprule",
        rf"{' & '.join(['method', *map(escape_latex_cell, metrics)])} \\",
        r"\midrule",
    ]
    for method, values in sort_methods_descending(metrics_by_method):
        cells = ["--" if math.isnan(values[metric]) else f"{values[metric]:.3f}" for metric in metrics]
        lines.append(rf"{' & '.join([escape_latex_cell(method), *cells])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex_cell(text: str) -> str:
    """Escape LaTeX's special characters in a table cell.

    >>> escape_latex_cell("attention_x & 10 %")
    'attention\\\\_x \\\\& 10 \\\\%'
    """
    return "".join(_LATEX_ESCAPES.get(character, character) for character in text)
