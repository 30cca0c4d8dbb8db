"""`clearhead report`: a self-contained HTML page with the results of a run."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from clearhead.bench.chunk_explanations import CONTROL_METHODS, parse_method
from clearhead.bench.run_results import MetricTable, ProtocolResults, RunResults
from clearhead.bench.tables import MetricColumn, compute_column_agreement, sort_methods_by_mean, sort_methods_descending
from clearhead.errors import ClearheadError
from clearhead.explanation.explanation import to_json_value
from clearhead.render.charts import make_curve, make_line_chart
from clearhead.render.html import render_standalone_page
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, build_input_view_model, build_page_view_model, make_view_model
from clearhead.stats import ConfidenceInterval, compare_all_pairs, compute_mean_band, compute_rank_ranges

FOOTER_TEXT = (
    "Means over examples with 95 % intervals: Gaffke’s for rates, otherwise Student’s t with Hall’s correction for "
    "skewness. Ranks of the means by paired t tests with the same correction (and a sign-flip test) between every two "
    "methods, corrected by Holm: methods that the examples do not distinguish share a range of ranks."
)


def render_run_report(results: RunResults) -> str:
    """Render the report of a run as one HTML page.

    Args:
        results: Results of a finished run.

    Returns:
        The page.
    """
    manifest = results.manifest
    job = manifest["job"]
    sections = [
        *(_build_section(results, section) for section in results.protocol_results),
        *_build_method_costs(results),
        *_build_failures(results),
    ]
    origin = f"{job['model']} (weights {manifest['model']}), {job['data']}, {manifest['versions']}"
    notes = [escape_invisible(origin), sections[0].get("note")]
    sections[0]["note"] = ". ".join(note for note in notes if note)
    eyebrow = " · ".join(["clearhead", escape_invisible(str(job["model"])), escape_invisible(str(job["data"]))])
    return render_standalone_page(
        build_page_view_model(sections, "Which explanations are correct?", eyebrow, FOOTER_TEXT)
    )


def _build_section(results: RunResults, section: ProtocolResults) -> ViewModel:
    """Build the section of a protocol: rankings, agreement, curves, disagreements; the rest is collapsed."""
    tables = [table for metric in section.headline_metrics for table in section.iter_tables(metric)]
    tables_on_correct = [
        table
        for metric in section.headline_metrics
        for table in section.iter_tables(metric, section.correct_measurements)
    ]
    views = [
        *(_build_ranking(f"{table.metric}, {table.better_direction} is better", table) for table in tables),
        *(_build_ranking(f"{table.metric}, only examples predicted correctly", table) for table in tables_on_correct),
        *_build_column_agreement(tables),
        *_build_dataset_metrics(section),
        *_build_curves(section),
        *_build_disagreements(section),
    ]
    details = [*_build_stored_explanations(results, section), *_build_details(section, tables)]
    return make_view_model(
        "section",
        heading=escape_invisible(section.name),
        note=section.protocol.description,
        children=views,
        collapsed_children=details,
    )


def _build_ranking(title: str, table: MetricTable) -> ViewModel:
    """Build the methods by rank, with the mean and the interval of each column."""
    intervals_by_column = [column.compute_intervals() for column in table.columns]
    ranks_by_column = [
        compute_rank_ranges(column.values_by_method, table.smaller_is_better) for column in table.columns
    ]
    methods = list(dict.fromkeys(method for column in table.columns for method in column.values_by_method))
    rows = [
        {
            "name": escape_invisible(method),
            "is_control": method in CONTROL_METHODS,
            "cells": [
                _build_cell(intervals.get(method), ranks.get(method), len(column.examples))
                for column, intervals, ranks in zip(table.columns, intervals_by_column, ranks_by_column, strict=True)
            ],
        }
        for method in sort_methods_by_mean(methods, intervals_by_column, table.smaller_is_better)
    ]
    columns = [f"{escape_invisible(column.name)} ({_format_example_count(column)})" for column in table.columns]
    axis_limits = [_compute_axis_limits(intervals.values()) for intervals in intervals_by_column]
    return make_view_model(
        "ranking", title=escape_invisible(title), columns=columns, ranges=to_json_value(axis_limits), rows=rows
    )


def _build_column_agreement(tables: Sequence[MetricTable]) -> Iterator[ViewModel]:
    """Build a table of whether the ranking depends on the part: the fill of removed units, or the stream."""
    rows = [
        [f"{table.metric}, {table.better_direction} is better", first, second, _format_metric(tau)]
        for table in tables
        for (first, second), tau in compute_column_agreement(table.columns).items()
    ]
    if rows:
        heads = ["metric", "part", "compared with", "Kendall’s tau-b of the means"]
        yield _build_table("Do the parts rank the methods in the same order?", heads, rows)


def _build_cell(interval: ConfidenceInterval | None, rank: Any, num_examples: int) -> ViewModel | None:
    """Return mean, bounds, rank, and the count where it differs from the column's; None without examples."""
    if interval is None or not interval.count:
        return None
    values = [interval.mean]
    if interval.has_bounds:
        values += [interval.low, interval.high]
    numbers: ViewModel = to_json_value({"mean": interval.mean, "low": interval.low, "high": interval.high})
    cell: ViewModel = {**numbers, "texts": [_format_metric(value) for value in values], "rank": str(rank)}
    return {**cell, "count": interval.count} if interval.count < num_examples else cell


def _format_example_count(column: MetricColumn) -> str:
    """Format the number of examples of a column, with the right plural."""
    return "1 example" if len(column.examples) == 1 else f"{len(column.examples)} examples"


def _compute_axis_limits(intervals: Iterable[ConfidenceInterval]) -> tuple[float, float]:
    """Return the smallest and the largest of all means and bounds; (0, 1) if there are none."""
    values = [value for interval in intervals for value in (interval.mean, interval.low, interval.high)]
    finite_values = [value for value in values if not math.isnan(value)]
    return (min(finite_values), max(finite_values)) if finite_values else (0.0, 1.0)


def _format_metric(value: float) -> str:
    """Format a metric; NaN (such as the AP of large objects where there are none) is shown as –."""
    return "–" if math.isnan(value) else f"{value:.3f}".replace("-", "−")


def _build_dataset_metrics(section: ProtocolResults) -> Iterator[ViewModel]:
    """Yield a table for each part with metrics over all examples at once, which have no mean or interval."""
    for part_name, metrics_by_method in section.compute_dataset_metrics().items():
        metrics = list(next(iter(metrics_by_method.values())))
        rows = [
            [method, *(_format_metric(values[metric]) for metric in metrics)]
            for method, values in sort_methods_descending(metrics_by_method)
        ]
        yield _build_table(f"{part_name}: over all examples at once", ["method", *metrics], rows)


def _build_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> ViewModel:
    """Build a table view with the invisible characters of all its text escaped."""
    return make_view_model(
        "table",
        title=escape_invisible(title),
        columns=[escape_invisible(head) for head in heads],
        rows=[[escape_invisible(cell) for cell in row] for row in rows],
    )


def _build_curves(section: ProtocolResults) -> Iterator[ViewModel]:
    """Build the charts of mean curves with their intervals."""
    charts = []
    for curve_set in section.build_curve_sets():
        curves = []
        for method, values in curve_set.y_by_method.items():
            low, high = compute_mean_band(values)
            band: dict[str, Any] = {"low": low, "high": high} if len(values) > 1 else {}
            x = curve_set.x_by_method[method]
            curves.append(make_curve(method, x, values.mean(0), **band, grey=method in CONTROL_METHODS))
        counts = sorted({len(values) for values in curve_set.y_by_method.values()})
        count = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        title = f"{curve_set.part}: {curve_set.y_name} by {curve_set.x_name} ({count})"
        charts.append(make_line_chart(title, curves, curve_set.x_name, curve_set.y_name))
    if charts:
        yield make_view_model("panel", title="Curves, means over examples with 95 % intervals", children=charts)


def _build_disagreements(section: ProtocolResults) -> Iterator[ViewModel]:
    """Yield a table of the examples where methods differ most, by the first headline metric only."""
    for metric in section.headline_metrics[:1]:
        disagreements = section.find_disagreements(metric)
        if disagreements:
            rows = [
                [
                    disagreement.example,
                    disagreement.part,
                    *(f"{method} {_format_metric(value)}" for method, value in (disagreement.best, disagreement.worst)),
                ]
                for disagreement in disagreements
            ]
            heads = ["example", "part", f"best by {metric}", "worst"]
            yield _build_table("Where methods disagree most", heads, rows)


def _build_stored_explanations(results: RunResults, section: ProtocolResults) -> Iterator[ViewModel]:
    """Build the best and the worst explanation of each example on which methods disagree, if the run stored them."""
    disagreements = [
        disagreement for metric in section.headline_metrics[:1] for disagreement in section.find_disagreements(metric)
    ]
    pairs = dict.fromkeys((item.example, (item.best[0], item.worst[0])) for item in disagreements)
    stored = results.load_explanations({(example, method) for example, methods in pairs for method in methods})
    annotations = results.load_annotations({example for example, _ in pairs})
    for example, methods in pairs:
        explanations = [stored[example, method] for method in methods if (example, method) in stored]
        if explanations:
            view_model = build_input_view_model(explanations, annotations.get(example))
            yield {**view_model, "title": escape_invisible(f"{example}, explained by {' and '.join(methods)}")}


def _build_details(section: ProtocolResults, tables: Sequence[MetricTable]) -> Iterator[ViewModel]:
    """Yield pairwise tests of the methods for each metric and column, then the settings of the protocol."""
    for table in tables:
        for column in table.columns:
            if len(column.values_by_method) > 1:
                yield _build_pairwise_tests(f"Every two methods: {table.metric}, {column.name}", column)
    rows = [[key, json.dumps(value, ensure_ascii=False)] for key, value in section.settings.items()]
    yield _build_table(f"Settings ({section.hash})", ["setting", "value"], rows)


def _build_pairwise_tests(title: str, column: MetricColumn) -> ViewModel:
    """Build the differences with their tests, and how many more examples would decide the undecided ones."""
    pairs = sorted(
        compare_all_pairs(column.values_by_method),
        key=lambda pair: (pair.holm_p_value, -abs(pair.effect_size), pair.first, pair.second),
    )
    rows = []
    for pair in pairs:
        if pair.is_significant:
            verdict = "decided"
        elif pair.extra_examples_needed is None:
            verdict = "no difference"
        else:
            verdict = f"{pair.extra_examples_needed:,} more"
        effect_size = "∞" if math.isinf(pair.effect_size) else f"{pair.effect_size:.2f}".replace("-", "−")
        difference = str(pair.difference).replace("-", "−")
        rows.append([f"{pair.first} − {pair.second}", difference, f"{pair.holm_p_value:.2g}", effect_size, verdict])
    return _build_table(title, ["pair", "difference", "p (Holm)", "effect size", "examples"], rows)


def _build_method_costs(results: RunResults) -> Iterator[ViewModel]:
    """Build a table of each method's declared cost, and the seconds of a single explanation if they were measured."""
    methods = sorted(
        {measurement.method for section in results.protocol_results for measurement in section.measurements}
    )
    seconds_by_method = results.seconds_by_method
    cheapest = min((seconds for seconds in seconds_by_method.values() if seconds > 0), default=math.nan)
    rows = []
    for method in methods:
        seconds = seconds_by_method.get(method, math.nan)
        cells = ["–", "–"] if np.isnan(seconds) else [f"{seconds:.3f} s", f"{seconds / cheapest:.1f} ×"]
        rows.append([method, _format_declared_cost(method), *cells])
    heads = ["method", "requirements", "single explanation", "relative to the cheapest"]
    note = None
    if results.total_seconds:
        note = f"All chunks together took {results.total_seconds:,.1f} s; methods share their passes within a chunk."
    yield make_view_model(
        "section", heading="Cost per method", children=[_build_table("", heads, rows)], note=note, collapsed_children=[]
    )


def _format_declared_cost(method: str) -> str:
    """Return the cost of a method with its options; a dash if the method is not registered here."""
    try:
        return str(parse_method(method).cost)
    except (KeyError, ClearheadError):
        return "–"


def _build_failures(results: RunResults) -> Iterator[ViewModel]:
    """Yield a section with the reason of everything that was not measured; nothing if all was."""
    if results.failure_reasons:
        rows = [[name, reason] for name, reason in sorted(results.failure_reasons.items())]
        yield make_view_model(
            "section",
            heading="Not measured",
            children=[_build_table("", ["protocol: method", "reason"], rows)],
            collapsed_children=[],
        )
