"""Building blocks of report pages: sections with a note, tables, and panels of charts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.data.atomic_file import atomic_write
from clearhead.render.html import render_standalone_page
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, build_page_view_model, make_view_model
from clearhead.stats import ConfidenceInterval


def build_report_page(eyebrow: str, title: str, sections: Iterable[ViewModel | None], footer: str) -> ViewModel:
    """Build the view model of a report page.

    Args:
        eyebrow: The line above the title.
        title: The title of the page.
        sections: The sections; None entries are skipped.
        footer: The line at the end of the page.
    """
    return build_page_view_model(
        [section for section in sections if section],
        escape_invisible(title),
        escape_invisible(eyebrow),
        escape_invisible(footer),
    )


def write_report_page(path: str | Path, view: ViewModel) -> Path:
    """Write a self-contained HTML page and return its path."""
    with atomic_write(path) as partial:
        partial.write_text(render_standalone_page(view), encoding="utf-8")
    return Path(path)


def build_section(title: str, *children: ViewModel | None, note: str = "") -> ViewModel:
    """Build a section with a heading, a note and its content; None entries are skipped."""
    return make_view_model(
        "section",
        heading=escape_invisible(title),
        note=escape_invisible(note),
        children=[child for child in children if child],
        collapsed_children=[],
    )


def build_panel(*charts: ViewModel, title: str = "", note: str = "") -> ViewModel:
    """Build a panel of charts, shown side by side."""
    return make_view_model("panel", title=escape_invisible(title), note=escape_invisible(note), children=list(charts))


def build_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> ViewModel:
    """Build a table from column names and rows of values."""
    return make_view_model(
        "table",
        columns=[escape_invisible(column) for column in columns],
        rows=[[format_report_cell(value) for value in row] for row in rows],
    )


def format_report_cell(value: Any) -> str:
    """Format the value of a table cell: short numbers, intervals with their bounds, a dash for missing values.

    Example:
        >>> format_report_cell(0.12345), format_report_cell(None), format_report_cell(True), format_report_cell(2e-05)
        ('0.123', '–', 'yes', '2e-05')
    """
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, ConfidenceInterval):
        return "–" if not value.count else str(value).replace("-", "−")
    if isinstance(value, float):
        if 0 < abs(value) < 0.001:
            return f"{value:.1g}"
        return f"{value:.3f}".replace("-", "−")
    return escape_invisible(str(value))
