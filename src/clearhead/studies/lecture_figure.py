"""Draw the lecture's comparison as a matplotlib figure, and as a table for terminals."""

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
from clearhead.render.colours import COLOUR_LEVELS_PER_SIGN, format_hex_colour, get_level_colour
from clearhead.render.mpl.explanation import MUTED_COLOUR, SPINE_COLOUR, TEXT_COLOUR, InlineFigure
from clearhead.render.text_layout import escape_invisible
from clearhead.studies.lecture import LECTURE_METHODS

if TYPE_CHECKING:
    from clearhead.studies.lecture import LectureResult, SentenceComparison

_POSITIVE_COLOUR, _NEGATIVE_COLOUR = (
    format_hex_colour(get_level_colour(sign * COLOUR_LEVELS_PER_SIGN * 3 // 4)) for sign in (1, -1)
)
_GREY = "#b4b6bd"


def plot_lecture(lecture: "LectureResult") -> Figure:
    """Draw one row per sentence, Grad-SAM left and SHAP right, and below the fractions of special tokens."""
    heights = [0.55 + 0.2 * len(sentence.grad_sam) for sentence in lecture.sentences]
    figure = InlineFigure(figsize=(9.2, sum(heights) + 2.6), layout="constrained")
    title = "Grad-SAM and SHAP: score of each token, preceded by its rank by |score| among tokens that are not special"
    figure.suptitle(title, fontsize=10, color=TEXT_COLOUR, x=0.01, ha="left")
    grid = figure.add_gridspec(len(heights) + 1, 2, height_ratios=[*heights, 1.6])
    for row, sentence in enumerate(lecture.sentences):
        left_axes = figure.add_subplot(grid[row, 0])
        right_axes = figure.add_subplot(grid[row, 1])
        left_axes.set_title(_format_sentence(sentence), fontsize=9, color=TEXT_COLOUR, loc="left", parse_math=False)
        agreement = f"rank correlation {_format_correlation(sentence.rank_correlation)}, without special tokens"
        right_axes.set_title(agreement, fontsize=9, color=MUTED_COLOUR, loc="left")
        _draw_score_bars(left_axes, sentence, "Grad-SAM")
        _draw_score_bars(right_axes, sentence, "SHAP")
    _draw_special_fractions(figure.add_subplot(grid[-1, :]), lecture)
    return figure


def _draw_score_bars(axes: Axes, sentence: "SentenceComparison", method: str) -> None:
    """Draw the scores of one method as horizontal bars, one per token."""
    e = sentence.by_method[method]
    scores = e.scores.astype(float)
    special = np.array(e.units.special)
    largest = float(sentence.compute_abs_scores(method).max()) or 1.0
    rows = np.arange(len(e))
    colours = np.where(special, _GREY, np.where(scores >= 0, _POSITIVE_COLOUR, _NEGATIVE_COLOUR)).tolist()
    axes.barh(rows, scores, height=0.66, color=colours)
    axes.axvline(0, color=MUTED_COLOUR, linewidth=0.8)
    labels = [escape_invisible(token) for token in e.tokens]
    for rank, index in enumerate(_rank_content_tokens(sentence, method), 1):
        labels[index] = f"{rank}  {labels[index]}"
    axes.set_yticks(rows, labels, parse_math=False)
    for label, is_special in zip(axes.get_yticklabels(), special, strict=True):
        label.set_color(MUTED_COLOUR if is_special else TEXT_COLOUR)
    axes.set_xlim(-largest * 1.05 if (scores < 0).any() else 0, largest * 1.05)
    axes.set_ylim(len(e) - 0.4, -0.6)
    for row, value in enumerate(scores):
        axes.annotate(
            text_labels.format_aligned_number(value, largest),
            (1.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7,
            color=MUTED_COLOUR,
        )
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=7, colors=MUTED_COLOUR, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(method, fontsize=8, color=MUTED_COLOUR, labelpad=1)
    _style_spines(axes, "bottom")


def _rank_content_tokens(sentence: "SentenceComparison", method: str) -> list[int]:
    """Return the indices of the content tokens by decreasing absolute score; ties in text order."""
    abs_scores = sentence.compute_abs_scores(method)
    return sorted(sentence.content_indices.tolist(), key=lambda index: (-abs_scores[index], index))


def _draw_special_fractions(axes: Axes, lecture: "LectureResult") -> None:
    """Draw the fraction of Σ|score| that the first special token holds, by sentence and method."""
    colours = (_POSITIVE_COLOUR, "#e6b48f", _NEGATIVE_COLOUR, "#9fc8ee")
    positions = np.arange(len(lecture.sentences))
    width = 0.8 / len(LECTURE_METHODS)
    largest = 0.1
    for method_index, (method, colour) in enumerate(zip(LECTURE_METHODS, colours, strict=True)):
        fractions = [sentence.compute_first_special_fraction(method) for sentence in lecture.sentences]
        largest = max(largest, *fractions)
        bar_positions = positions + (method_index - (len(LECTURE_METHODS) - 1) / 2) * width
        axes.bar(bar_positions, fractions, width=width * 0.92, color=colour, label=method)
        for x, fraction in zip(bar_positions, fractions, strict=True):
            axes.annotate(f"{fraction:.2f}", (x, fraction), ha="center", va="bottom", fontsize=6.5, color=MUTED_COLOUR)
    axes.set_xticks(positions, [f"“{sentence.text}”" for sentence in lecture.sentences], fontsize=7, parse_math=False)
    axes.set_title(_format_special_title(lecture), fontsize=9, color=TEXT_COLOUR, loc="left", parse_math=False)
    axes.set_ylim(0, largest * 1.2)
    axes.legend(fontsize=7, frameon=False, ncols=len(LECTURE_METHODS), loc="upper left", bbox_to_anchor=(0, -0.14))
    axes.tick_params(axis="y", labelsize=7, colors=MUTED_COLOUR, length=2)
    axes.tick_params(axis="x", length=0)
    _style_spines(axes, "bottom", "left")


def _style_spines(axes: Axes, *visible_sides: str) -> None:
    """Show only these sides of the frame, in the common colour of frames."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in visible_sides)
        spine.set_color(SPINE_COLOUR)


def render_lecture(lecture: "LectureResult") -> RenderableType:
    """Render the rankings of both methods, their agreement, and the fractions of special tokens for a terminal."""
    blocks: list[RenderableType] = []
    for sentence in lecture.sentences:
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for method in ("Grad-SAM", "SHAP"):
            table.add_column(method)
            table.add_column("", justify="right", style="dim")
        for row in _build_ranking_rows(sentence):
            table.add_row(*map(Text, row))
        correlation = _format_correlation(sentence.rank_correlation)
        agreement = f"rank correlation {correlation}, overlap of the top-ranked tokens {sentence.top_overlap:.0%}"
        blocks += [Text(_format_sentence(sentence), style="bold"), table, Text(agreement, style="dim"), ""]
    blocks.append(_build_special_token_table(lecture))
    token = escape_invisible(lecture.first_special_token)
    num_largest = sum(sentence.is_first_special_largest for sentence in lecture.sentences)
    blocks.append(
        Text(
            f"\nMean rank correlation {_format_correlation(lecture.mean_rank_correlation)}. By Grad-SAM, {token} has "
            f"the largest score in {num_largest} of {len(lecture.sentences)} sentences. This is by construction: if "
            f"the classifier reads {token}, no other row has a gradient in the last layer. SHAP removes tokens of the "
            f"text; {token} is not part of the text and is never removed, so its score is 0. With a single context, as "
            "in the lecture (where class 1 is explained, whatever the prediction), it gets part of the interaction "
            "effects of groups.",
            style="dim",
        )
    )
    return Group(*blocks)


def _build_ranking_rows(sentence: "SentenceComparison") -> list[list[str]]:
    """Build rows of rank, then token and score by method; special tokens come last, without a rank."""
    methods = ("Grad-SAM", "SHAP")
    special_indices = [index for index, is_special in enumerate(sentence.grad_sam.units.special) if is_special]
    orders: list[Sequence[int]] = [[*_rank_content_tokens(sentence, method), *special_indices] for method in methods]
    rows = []
    for rank, indices in enumerate(zip(*orders, strict=True), 1):
        row = [str(rank) if rank <= len(sentence.content_indices) else ""]
        for method, index in zip(methods, indices, strict=True):
            e = sentence.by_method[method]
            largest = float(np.abs(e.scores).max()) or 1.0
            row.append(escape_invisible(e.tokens[index]))
            row.append(text_labels.format_aligned_number(float(e.scores[index]), largest))
        rows.append(row)
    return rows


def _build_special_token_table(lecture: "LectureResult") -> Table:
    """Build a table with a row for each sentence: the first special token's share, by method."""
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    table.title = _format_special_title(lecture)
    table.add_column("")
    for method in LECTURE_METHODS:
        table.add_column(method, justify="right")
    for sentence in lecture.sentences:
        fractions = [f"{sentence.compute_first_special_fraction(method):.2f}" for method in LECTURE_METHODS]
        table.add_row(Text(sentence.text), *fractions)
    return table


def _format_sentence(sentence: "SentenceComparison") -> str:
    """Format a sentence in quotation marks, with the predicted label after an arrow."""
    return f"“{sentence.text}” → {escape_invisible(sentence.label)}"


def _format_special_title(lecture: "LectureResult") -> str:
    """Title that says of what the first special token's share is."""
    return f"Share of {escape_invisible(lecture.first_special_token)} in the sum of absolute scores"


def _format_correlation(value: float) -> str:
    """Format a correlation to two decimals with a true minus sign; – for NaN."""
    return "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")
