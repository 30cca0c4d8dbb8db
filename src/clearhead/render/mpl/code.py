"""Figures of syntax in code models: attention by class and layer, who looks at whom, p by head, two groups."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from clearhead.render.mpl.explanation import TEXT_COLOUR, InlineFigure, label_axes

if TYPE_CHECKING:
    from clearhead.studies.code.attention import CodeAttention
    from clearhead.studies.code.permutation_tests import GroupDifferences

_BLUE, _RED, _GREY = "#3b6fb6", "#b8562e", "#b4b6bd"
#: So many classes stand in one row of small figures.
CLASSES_PER_ROW = 5
#: Multiples beyond this (rare classes, single heads) lie outside the picture.
MAX_ATTENTION_RATIO = 16
#: p below this is drawn as this.
MIN_DRAWN_P_VALUE = 1e-4


def _make_axes_grid(figure: Figure, count: int) -> list[Any]:
    rows = -(-count // CLASSES_PER_ROW)
    every = figure.subplots(rows, min(CLASSES_PER_ROW, count), squeeze=False, sharex=True, sharey=True).ravel()
    for axes in every[count:]:
        axes.axis("off")
    return list(every[:count])


def _make_grid_figure(count: int, high: float = 1.9) -> Figure:
    rows = -(-count // CLASSES_PER_ROW)
    return InlineFigure(figsize=(2.1 * min(CLASSES_PER_ROW, count) + 0.6, high * rows + 0.5), layout="constrained")


def plot_class_attention(code_attention: "CodeAttention") -> Figure:
    """Every head a point, mean over questions; the line is the mean over heads; 1 is what uniform attention gives."""
    figure = _make_grid_figure(len(code_attention.classes))
    means = np.nanmean(code_attention.received_attention, 0)
    layers, heads, _ = means.shape
    for place, axes in enumerate(_make_axes_grid(figure, len(code_attention.classes))):
        label_axes(axes, "layer", "", code_attention.classes[place])
        axes.axhline(1, color=_GREY, linewidth=0.8)
        axes.scatter(np.repeat(np.arange(layers), heads), means[..., place].ravel(), s=9, color=_BLUE, alpha=0.5)
        axes.plot(means[..., place].mean(1), color=TEXT_COLOUR, linewidth=1.2)
        axes.set_yscale("log", base=2)
        axes.set_ylim(1 / MAX_ATTENTION_RATIO, MAX_ATTENTION_RATIO)
        axes.set_xticks(range(layers))
    figure.supylabel("attention received (uniform: 1)", fontsize=8, color=TEXT_COLOUR)
    return figure


def plot_class_to_class_attention(code_attention: "CodeAttention") -> Figure:
    """Rows look at columns: how many times what chance gives, mean over questions and layers."""
    n = len(code_attention.classes)
    figure = InlineFigure(figsize=(2.4 + 0.42 * n, 1.4 + 0.36 * n), layout="constrained")
    axes = label_axes(figure.subplots(), "key", "query")
    paid = code_attention.paid_attention.mean(1)
    count = (~np.isnan(paid)).sum(0)
    lifts = np.log2(np.where(count > 0, np.nansum(paid, 0) / np.maximum(count, 1), np.nan))
    shown = axes.imshow(lifts, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
    axes.set_xticks(range(n), code_attention.classes, rotation=60, ha="right")
    axes.set_yticks(range(n), code_attention.classes)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "1", "2", "4 ×"])
    return figure


def plot_p_values(differences: "GroupDifferences", classes: tuple[str, ...]) -> Figure:
    """Layer × head for each class: p of the permutation test; a dot where it stands after the correction."""
    figure = _make_grid_figure(len(classes))
    shown = None
    for place, axes in enumerate(_make_axes_grid(figure, len(classes))):
        label_axes(axes, "head", "layer", classes[place])
        own = np.clip(differences.p_values[..., place], MIN_DRAWN_P_VALUE, 1)
        shown = axes.imshow(
            -np.log10(own), cmap="Blues", vmin=0, vmax=-np.log10(MIN_DRAWN_P_VALUE), origin="lower", aspect="auto"
        )
        layer, head = np.nonzero(differences.is_significant[..., place])
        axes.scatter(head, layer, s=14, color=_RED)
        axes.set_xticks(range(own.shape[1]))
        axes.set_yticks(range(own.shape[0]))
    assert shown is not None
    bar = figure.colorbar(shown, ax=figure.axes, shrink=0.7)
    bar.set_ticks([0, 1, 2, 3, 4], labels=["1", "0.1", "0.01", "0.001", "≤ 0.0001"])
    return figure


def plot_correctness_boxes(code_attention: "CodeAttention") -> Figure:
    """One number a question, mean over layers and heads: right answers beside wrong ones, class by class."""
    n = len(code_attention.classes)
    figure = InlineFigure(figsize=(1.6 + 0.72 * n, 3.4), layout="constrained")
    axes = label_axes(figure.subplots(), "", "attention received (uniform: 1)")
    own = code_attention.received_attention.mean((1, 2))
    for shift, (said, group, colour) in enumerate(
        (("right", code_attention.is_correct, _BLUE), ("wrong", ~code_attention.is_correct, _RED))
    ):
        columns = [column[~np.isnan(column)] for column in own[group].T]
        at = np.arange(n) + (shift - 0.5) * 0.36
        drawn = axes.boxplot(columns, positions=at, widths=0.3, showfliers=False, patch_artist=True, manage_ticks=False)
        for box in drawn["boxes"]:
            box.set(facecolor=colour, alpha=0.55, linewidth=0.6)
        for line in drawn["medians"]:
            line.set(color=TEXT_COLOUR)
        axes.plot([], [], color=colour, linewidth=5, alpha=0.55, label=f"{said} ({int(group.sum())})")
    axes.axhline(1, color=_GREY, linewidth=0.8)
    axes.set_xticks(range(n), code_attention.classes, rotation=45, ha="right")
    axes.legend(fontsize=7, frameon=False)
    return figure
