"""Pages of results: sections with a note, tables, and panels of plots, for the renderer."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.data.atomic_file import whole
from clearhead.render.html import alone
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, view, whole_page
from clearhead.stats import Interval


def sheet(eyebrow: str, title: str, sections: Iterable[Document | None], foot: str) -> Document:
    """The sections of one page."""
    return whole_page([part for part in sections if part], name(title), name(eyebrow), name(foot))


def write(path: str | Path, given: Document) -> Path:
    """One self-contained page with the look of all pages."""
    with whole(path) as partial:
        partial.write_text(alone(given), encoding="utf-8")
    return Path(path)


def section(title: str, *parts: Document | None, note: str = "") -> Document:
    return view("section", heading=name(title), note=name(note), parts=[part for part in parts if part], more=[])


def panel(*plots: Document, title: str = "", note: str = "") -> Document:
    """Plots beside one another."""
    return view("panel", title=name(title), note=name(note), parts=list(plots))


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Document:
    return view("table", heads=[name(words) for words in heads], rows=[[said(value) for value in row] for row in rows])


def said(value: Any) -> str:
    """A cell: numbers short, intervals with their ends, what is missing as a dash.

    >>> said(0.12345), said(None), said(True), said(0.00002)
    ('0.123', '–', 'yes', '2e-05')
    """
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, Interval):
        return "–" if not value.count else str(value).replace("-", "−")
    if isinstance(value, float):
        return f"{value:.1g}" if 0 < abs(value) < 0.001 else f"{value:.3f}".replace("-", "−")
    return name(str(value))
