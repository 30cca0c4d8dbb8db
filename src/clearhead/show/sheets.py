"""Pages of results: figures as pictures inside the page, plain tables, and panels with a note."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead.bench.statistics import Interval
from clearhead.files import whole
from clearhead.show.figures import _INK, _SOFT
from clearhead.show.html import around
from clearhead.show.layout import name
from clearhead.show.markup import Markup, Part, tag

STYLES = (
    ".clearhead .ch-drawn img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; }"
)


def write(path: str | Path, eyebrow: str, title: str, sections: Iterable[Markup | None], foot: str) -> Path:
    """One self-contained page with the look of all pages."""
    page = around(name(eyebrow), name(title), [part for part in sections if part], name(foot), STYLES)
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return Path(path)


def section(title: str, *parts: Part, note: str = "") -> Markup:
    told = tag("p", name(note), class_="ch-note") if note else None
    return tag("section", tag("h2", name(title)), tag("div", told, *parts, class_="ch-panel"), class_="ch-input")


def drawn(figure: Figure, words: str) -> Markup:
    """A figure inside the page; `words` say what it shows to those who do not see it."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    source = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
    wide, high = (round(inches * 96) for inches in figure.get_size_inches())
    return tag("figure", tag("img", src=source, alt=name(words), width=wide, height=high), class_="ch-drawn")


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", name(words), scope="col") for words in heads)))
    made = [
        tag("tr", tag("th", said(first), scope="row"), *(tag("td", said(value)) for value in rest))
        for first, *rest in rows
    ]
    body = tag("table", head, tag("tbody", *made), class_="ch-figures")
    return tag("div", body, class_="ch-scroll", tabindex=0, role="region", aria_label=name(heads[0]))


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


def labelled(axes: Axes, x: str, y: str, title: str = "") -> Axes:
    axes.set_xlabel(x, fontsize=8, color=_SOFT)
    axes.set_ylabel(y, fontsize=8, color=_SOFT)
    axes.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
    axes.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def gaps(intervals: Sequence[Interval]) -> Any:
    """How far the ends of intervals are from their means, as matplotlib's error bars take them."""
    ends = np.array([[one.mean - one.low, one.high - one.mean] for one in intervals]).T
    return np.clip(np.nan_to_num(ends), 0, None)
