"""The lecture as one figure and as a table in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.render import text_labels
from clearhead.render.colours import LEVELS, hexed, of_level
from clearhead.render.mpl.explanation import _INK, _RULE, _SOFT, Drawing
from clearhead.render.text_layout import name
from clearhead.studies.lecture import METHODS

if TYPE_CHECKING:
    from clearhead.studies.lecture import Beside, Lecture

_FOR, _AGAINST = (hexed(of_level(sign * LEVELS * 3 // 4)) for sign in (1, -1))
_GREY = "#b4b6bd"


def plot(lecture: "Lecture") -> Figure:
    """A row for each sentence, Grad-SAM at the left and SHAP at the right; below, the shares of special tokens."""
    heights = [0.55 + 0.2 * len(one.grad_sam) for one in lecture.sentences]
    figure = Drawing(figsize=(9.2, sum(heights) + 2.6), layout="constrained")
    said = "Grad-SAM beside SHAP: what each token has; in front, its rank by size among tokens that are not special"
    figure.suptitle(said, fontsize=10, color=_INK, x=0.01, ha="left")
    grid = figure.add_gridspec(len(heights) + 1, 2, height_ratios=[*heights, 1.6])
    for row, one in enumerate(lecture.sentences):
        left, right = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        title = f"“{one.text}” → {name(one.label)}"
        left.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
        agreement = f"rank correlation {_figure(one.correlation)}, without special tokens"
        right.set_title(agreement, fontsize=9, color=_SOFT, loc="left")
        _bars(left, one, "Grad-SAM")
        _bars(right, one, "SHAP")
    _shares(figure.add_subplot(grid[-1, :]), lecture)
    return figure


def _bars(axes: Axes, one: "Beside", method: str) -> None:
    e = one.by_method[method]
    scores, special = e.scores.astype(float), np.array(e.units.special)
    full, rows = float(one.sizes(method).max()) or 1.0, np.arange(len(e))
    colours = [_GREY if special[i] else _FOR if scores[i] >= 0 else _AGAINST for i in range(len(e))]
    axes.barh(rows, scores, height=0.66, color=colours)
    axes.axvline(0, color=_SOFT, linewidth=0.8)
    ranks = {place: rank for rank, place in enumerate(_ranked(one, method), 1)}
    labels = [f"{ranks[i]}  {name(e.tokens[i])}" if i in ranks else name(e.tokens[i]) for i in range(len(e))]
    axes.set_yticks(rows, labels, parse_math=False)
    for label, is_special in zip(axes.get_yticklabels(), special, strict=True):
        label.set_color(_SOFT if is_special else _INK)
    axes.set_xlim(-full * 1.05 if (scores < 0).any() else 0, full * 1.05)
    axes.set_ylim(len(e) - 0.4, -0.6)
    for row, value in enumerate(scores):
        said = text_labels.aligned(value, full)
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=_SOFT)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=7, colors=_SOFT, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(method, fontsize=8, color=_SOFT, labelpad=1)
    _frame(axes, "bottom")


def _ranked(one: "Beside", method: str) -> list[int]:
    sizes = one.sizes(method)
    return sorted(one.words.tolist(), key=lambda place: (-sizes[place], place))


def _shares(axes: Axes, lecture: "Lecture") -> None:
    """What the first special token has of all that is given out, sentence by sentence."""
    count, colours = len(lecture.sentences), (_FOR, "#e6b48f", _AGAINST, "#9fc8ee")
    places, width = np.arange(count), 0.8 / len(METHODS)
    for i, (method, colour) in enumerate(zip(METHODS, colours, strict=True)):
        shares = [one.first_share(method) for one in lecture.sentences]
        at = places + (i - (len(METHODS) - 1) / 2) * width
        axes.bar(at, shares, width=width * 0.92, color=colour, label=method)
        for x, share in zip(at, shares, strict=True):
            axes.annotate(f"{share:.2f}", (x, share), ha="center", va="bottom", fontsize=6.5, color=_SOFT)
    axes.set_xticks(places, [f"“{one.text}”" for one in lecture.sentences], fontsize=7, parse_math=False)
    title = f"What becomes of {name(lecture.first_special)}: its share of the sizes of all scores"
    axes.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
    axes.set_ylim(0, max(0.1, max(one.first_share(m) for one in lecture.sentences for m in METHODS)) * 1.2)
    axes.legend(fontsize=7, frameon=False, ncols=len(METHODS), loc="upper left", bbox_to_anchor=(0, -0.14))
    axes.tick_params(axis="y", labelsize=7, colors=_SOFT, length=2)
    axes.tick_params(axis="x", length=0)
    _frame(axes, "bottom", "left")


def _frame(axes: Axes, *kept: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in kept)
        spine.set_color(_RULE)


def render(lecture: "Lecture") -> RenderableType:
    """The rankings side by side, how far they agree, and what becomes of special tokens."""
    parts: list[RenderableType] = []
    for one in lecture.sentences:
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for method in ("Grad-SAM", "SHAP"):
            table.add_column(method)
            table.add_column("", justify="right", style="dim")
        for row in _rows(one):
            table.add_row(*map(Text, row))
        agreement = f"rank correlation {_figure(one.correlation)}, first tokens shared {one.overlap:.0%}"
        parts += [Text(f"“{one.text}” → {name(one.label)}", style="bold"), table, Text(agreement, style="dim"), ""]
    parts.append(_special(lecture))
    first = name(lecture.first_special)
    wins = sum(one.first_wins for one in lecture.sentences)
    parts.append(
        Text(
            f"\nMean rank correlation {_figure(lecture.mean_correlation)}. By Grad-SAM {first} has the largest score "
            f"of all in {wins} of {len(lecture.sentences)} sentences. It has much by construction: where a classifier "
            f"reads {first}, no other row has a gradient in the last layer. SHAP takes tokens out of the text, and "
            f"{first} is in no text: it has nothing to lose and gets nothing. With one context alone, as in the "
            "lecture (and there for class 1, whatever is predicted), it gets part of what groups have beyond their "
            "halves.",
            style="dim",
        )
    )
    return Group(*parts)


def _rows(one: "Beside") -> list[list[str]]:
    """Rank, then token and score of each method; special tokens below, without a rank."""
    special = [place for place, is_special in enumerate(one.grad_sam.units.special) if is_special]
    orders: list[Sequence[int]] = [[*_ranked(one, method), *special] for method in ("Grad-SAM", "SHAP")]
    rows = []
    for rank, places in enumerate(zip(*orders, strict=True), 1):
        row = [str(rank) if rank <= len(one.words) else ""]
        for method, place in zip(("Grad-SAM", "SHAP"), places, strict=True):
            e = one.by_method[method]
            row += [
                name(e.tokens[place]),
                text_labels.aligned(float(e.scores[place]), float(np.abs(e.scores).max()) or 1.0),
            ]
        rows.append(row)
    return rows


def _special(lecture: "Lecture") -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"{name(lecture.first_special)}: its share of the sizes of all scores"
    table.add_column("")
    for method in METHODS:
        table.add_column(method, justify="right")
    for one in lecture.sentences:
        table.add_row(Text(one.text), *(f"{one.first_share(method):.2f}" for method in METHODS))
    return table


def _figure(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")
