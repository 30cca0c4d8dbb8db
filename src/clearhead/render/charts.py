"""View models of charts: lines, bars, box plots, scatter plots and heat maps. `assets/charts.js` draws them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.explanation.explanation import to_json_value
from clearhead.render.array_codec import encode_array
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, make_view_model
from clearhead.stats import ConfidenceInterval

#: The bounds of an axis.
AxisRange = tuple[float, float]
SeriesByName = Mapping[str, Sequence[ViewModel | None]]


def _make_chart(kind: str, title: str, **fields: Any) -> ViewModel:
    """A chart without the fields that are None or False."""
    fields = {key: value for key, value in fields.items() if value is not None and value is not False}
    return make_view_model(kind, title=escape_invisible(title), **to_json_value(fields))


def make_reference_line(value: float, label: str) -> ViewModel:
    """Make a reference line, such as the chance level."""
    return {"value": value, "name": label}


def make_curve(title: str, x: Sequence[float], y: Sequence[float] | np.ndarray, **extra_fields: Any) -> ViewModel:
    """Make one curve of a line chart.

    Args:
        title: The name of the curve.
        x: The positions of its points.
        y: The values of its points.
        **extra_fields: low and high (bounds of intervals), point_names, grey (for a control).

    Returns:
        One item of `curves` of `make_line_chart`.
    """
    return {"name": escape_invisible(title), "x": list(x), "y": np.asarray(y, dtype=float), **extra_fields}


def make_line_chart(
    title: str, curves: Sequence[ViewModel], x_label: str, y_label: str, **extra_fields: Any
) -> ViewModel:
    """Make a line chart, with bands for intervals.

    Args:
        title: The title of the chart.
        curves: Its curves (`make_curve`).
        x_label: The label of the horizontal axis.
        y_label: The label of the vertical axis.
        **extra_fields: y_range, reference_line, integer_axis (integer x, such as layers).

    Returns:
        The view model.
    """
    return _make_chart("line_chart", title, lines=curves, x_label=x_label, y_label=y_label, **extra_fields)


def make_bar(value: ConfidenceInterval | float | None, **extra_fields: Any) -> ViewModel | None:
    """Make one bar: a number, or a mean with its interval.

    Args:
        value: The value of the bar.
        **extra_fields: mark, text (instead of the value), reference_value.

    Returns:
        The bar; None if there is no measurement.
    """
    if isinstance(value, ConfidenceInterval):
        if not value.count:
            return None
        bounds = {"low": value.low, "high": value.high, "count": value.count} if value.has_bounds else {}
        return {"value": value.mean, **bounds, **extra_fields}
    if value is None or np.isnan(value):
        return None
    return {"value": float(value), **extra_fields}


def make_bar_chart(
    title: str, groups: Sequence[str], series: SeriesByName, y_label: str, grey: Sequence[str] = (), **extra_fields: Any
) -> ViewModel:
    """Make a bar chart with one bar of each series for each group.

    Args:
        title: The title of the chart.
        groups: The names of the groups.
        series: The bars of each series (`make_bar`), by name.
        y_label: The label of the vertical axis.
        grey: The names of series that are drawn in grey, such as controls.
        **extra_fields: y_range, reference_line, x_label, integer_axis (integer y), stacked, sparse_labels (labels of
            few groups only).
    """
    series_views = [
        {"name": escape_invisible(name), "cells": list(bars), "grey": name in grey} for name, bars in series.items()
    ]
    group_names = [escape_invisible(group) for group in groups]
    return _make_chart("bar_chart", title, groups=group_names, series=series_views, y_label=y_label, **extra_fields)


def make_histogram(
    title: str, values_by_name: Mapping[str, np.ndarray], edges: np.ndarray, x_label: str, **extra_fields: Any
) -> ViewModel:
    """Make a histogram.

    Args:
        title: The title of the chart.
        values_by_name: The values of each series.
        edges: The edges of the bins.
        x_label: The label of the horizontal axis.
        **extra_fields: As in `make_bar_chart`.
    """
    series = {
        name: [make_bar(float(count)) for count in np.histogram(values, edges)[0]]
        for name, values in values_by_name.items()
    }
    groups = [f"{low:.2f}".replace("-", "−") for low in edges[:-1]]
    return make_bar_chart(
        title,
        groups,
        series,
        "inputs",
        x_label=f"{x_label}, from",
        integer_axis=True,
        sparse_labels=True,
        **extra_fields,
    )


def compute_box_statistics(values: Float[np.ndarray, " value"]) -> ViewModel | None:
    """Compute the quartiles and whiskers (the last values within 1.5 interquartile ranges) of a box plot.

    Returns:
        The fields of a box; None if there is no finite value.
    """
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75))
    whisker_length = 1.5 * (q3 - q1)
    within_whiskers = values[(values >= q1 - whisker_length) & (values <= q3 + whisker_length)]
    return {
        "low": min(within_whiskers.min(), q1),
        "high": max(within_whiskers.max(), q3),
        "q1": q1,
        "median": median,
        "q3": q3,
        "count": len(values),
    }


def make_box_chart(
    title: str, groups: Sequence[str], series: SeriesByName, y_label: str, **extra_fields: Any
) -> ViewModel:
    """Make a box plot of each series for each group.

    Args:
        title: The title of the chart.
        groups: The names of the groups.
        series: The boxes of each series (`compute_box_statistics`), by name.
        y_label: The label of the vertical axis.
        **extra_fields: As in `make_bar_chart`.
    """
    series_views = [{"name": escape_invisible(name), "cells": list(boxes)} for name, boxes in series.items()]
    group_names = [escape_invisible(group) for group in groups]
    return _make_chart("box_chart", title, groups=group_names, series=series_views, y_label=y_label, **extra_fields)


def make_point_series(title: str, x: Any, y: Any, **extra_fields: Any) -> ViewModel:
    """Make one series of a scatter chart; extra fields: point_names, grey."""
    return {
        "name": escape_invisible(title),
        "x": np.asarray(x, dtype=float),
        "y": np.asarray(y, dtype=float),
        **extra_fields,
    }


def make_scatter_chart(
    title: str, series: Sequence[ViewModel], x_label: str, y_label: str, **extra_fields: Any
) -> ViewModel:
    """Make a scatter chart.

    Args:
        title: The title of the chart.
        series: Its series (`make_point_series`).
        x_label: The label of the horizontal axis.
        y_label: The label of the vertical axis.
        **extra_fields: mean_curve (a series joined by a line), y_range, x_range, reference_line, log_scale,
            integer_axis, small.
    """
    return _make_chart("scatter_chart", title, series=series, x_label=x_label, y_label=y_label, **extra_fields)


def make_heat_map_chart(
    title: str,
    values: Float[np.ndarray, "row column"],
    rows: Sequence[str],
    columns: Sequence[str],
    y_label: str,
    x_label: str,
    vmax: float | None = None,
    **extra_fields: Any,
) -> ViewModel:
    """Make a heat map of a matrix.

    Args:
        title: The title of the chart.
        values: The matrix.
        rows: The names of its rows.
        columns: The names of its columns.
        y_label: What the rows are.
        x_label: What the columns are.
        vmax: The value of full colour. Default: the largest absolute value.
        **extra_fields: unsigned (values without a sign), texts (of cells), show_texts, marks (cells with a dot),
            marks_note, vmax_label, small.
    """
    magnitudes = np.abs(values[np.isfinite(values)])
    largest = float(magnitudes.max()) if magnitudes.size else 0.0
    return _make_chart(
        "heat_map",
        title,
        rows=[escape_invisible(row) for row in rows],
        columns=[escape_invisible(column) for column in columns],
        values=encode_array(values, vmax or largest or 1.0),
        x_label=x_label,
        y_label=y_label,
        **extra_fields,
    )
