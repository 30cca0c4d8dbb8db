"""Plots for the renderer: lines, bars, boxes, points and maps as documents. They are drawn by `assets/plots.js`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.explanation.explanation import plain
from clearhead.render.array_codec import packed
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, view
from clearhead.stats import Interval

#: The ends of an axis.
Range = tuple[float, float]
Series = Mapping[str, Sequence[Document | None]]


def _drawn(kind: str, title: str, **parts: Any) -> Document:
    kept = {key: value for key, value in parts.items() if value is not None and value is not False}
    return view(kind, title=name(title), **plain(kept))


def level(at: float, said: str) -> Document:
    """A line to measure by, such as chance."""
    return {"at": at, "name": said}


def line(title: str, x: Sequence[float], y: Sequence[float] | np.ndarray, **more: Any) -> Document:
    """One line of `curves`; more: low and high, the ends of intervals; names of its points; grey, for a control."""
    return {"name": name(title), "x": list(x), "y": np.asarray(y, dtype=float), **more}


def curves(title: str, lines: Sequence[Document], across: str, up: str, **more: Any) -> Document:
    """Lines over numbers, with bands where they have intervals; more: range, level, whole (numbers of layers)."""
    return _drawn("curves", title, lines=lines, across=across, up=up, **more)


def cell(value: Interval | float | None, **more: Any) -> Document | None:
    """One bar: a number, or a mean with its interval; more: mark, said, level. None where nothing was measured."""
    if isinstance(value, Interval):
        ends = {"low": value.low, "high": value.high} if value.known else {}
        return {"value": value.mean, **ends, **more} if value.count else None
    return None if value is None or np.isnan(value) else {"value": float(value), **more}


def bars(title: str, groups: Sequence[str], series: Series, up: str, grey: Sequence[str] = (), **more: Any) -> Document:
    """A bar of each series for each group; more: range, level, across, whole, stacked, sparse (few names)."""
    made = [{"name": name(key), "cells": list(cells), "grey": key in grey} for key, cells in series.items()]
    return _drawn("bars", title, groups=[name(group) for group in groups], series=made, up=up, **more)


def histogram(title: str, counted: Mapping[str, np.ndarray], edges: np.ndarray, across: str, **more: Any) -> Document:
    """How many values of each kind lie between two edges."""
    series = {key: [cell(float(n)) for n in np.histogram(own, edges)[0]] for key, own in counted.items()}
    groups = [f"{low:.2f}".replace("-", "−") for low in edges[:-1]]
    return bars(title, groups, series, "inputs", across=f"{across}, from", whole=True, sparse=True, **more)


def box(values: Float[np.ndarray, " value"]) -> Document | None:
    """Quartiles, and whiskers to the last values within one and a half times their distance; None of no values."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    first, median, third = np.quantile(values, (0.25, 0.5, 0.75))
    reach = 1.5 * (third - first)
    inside = values[(values >= first - reach) & (values <= third + reach)]
    ends = {"low": min(inside.min(), first), "high": max(inside.max(), third)}
    return {**ends, "first": first, "median": median, "third": third, "count": len(values)}


def boxes(title: str, groups: Sequence[str], series: Series, up: str, **more: Any) -> Document:
    made = [{"name": name(key), "cells": list(cells)} for key, cells in series.items()]
    return _drawn("boxes", title, groups=[name(group) for group in groups], series=made, up=up, **more)


def cloud(title: str, x: Any, y: Any, **more: Any) -> Document:
    """One series of `points`; more: names of single ones, grey."""
    return {"name": name(title), "x": np.asarray(x, dtype=float), "y": np.asarray(y, dtype=float), **more}


def points(title: str, series: Sequence[Document], across: str, up: str, **more: Any) -> Document:
    """Every one a point; more: means (a `cloud`, joined by a line), range, across_range, level, log, whole, small."""
    return _drawn("points", title, series=series, across=across, up=up, **more)


def heat(
    title: str,
    values: Float[np.ndarray, "row column"],
    rows: Sequence[str],
    columns: Sequence[str],
    up: str,
    across: str,
    full: float | None = None,
    **more: Any,
) -> Document:
    """Rows × columns as colours; more: weights (no sign), words of cells, written (into them), marks, marked."""
    known = np.abs(values[np.isfinite(values)])
    full = full or (float(known.max()) if known.size else 0.0) or 1.0
    names = {"rows": [name(row) for row in rows], "columns": [name(column) for column in columns]}
    return _drawn("map", title, **names, values=packed(values, full), up=up, across=across, **more)
