"""Figures of syntax in code models: attention by class and layer, who looks at whom, p by head, two groups."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from clearhead.render.mpl.explanation import _INK, Drawing, labelled

if TYPE_CHECKING:
    from clearhead.studies.code.attention import Measured
    from clearhead.studies.code.permutation_tests import Differences

_BLUE, _RED, _GREY = "#3b6fb6", "#b8562e", "#b4b6bd"
#: So many classes stand in one row of small figures.
WIDE = 5
#: Multiples beyond this (rare classes, single heads) lie outside the picture.
REACH = 16
#: p below this is drawn as this.
SURE = 1e-4


def _grid(figure: Figure, count: int) -> list[Any]:
    rows = -(-count // WIDE)
    every = figure.subplots(rows, min(WIDE, count), squeeze=False, sharex=True, sharey=True).ravel()
    for axes in every[count:]:
        axes.axis("off")
    return list(every[:count])


def _sheet(count: int, high: float = 1.9) -> Figure:
    rows = -(-count // WIDE)
    return Drawing(figsize=(2.1 * min(WIDE, count) + 0.6, high * rows + 0.5), layout="constrained")


def by_layer(measured: "Measured") -> Figure:
    """Every head a point, mean over questions; the line is the mean over heads; 1 is what uniform attention gives."""
    figure = _sheet(len(measured.classes))
    means = np.nanmean(measured.received, 0)
    layers, heads, _ = means.shape
    for place, axes in enumerate(_grid(figure, len(measured.classes))):
        labelled(axes, "layer", "", measured.classes[place])
        axes.axhline(1, color=_GREY, linewidth=0.8)
        axes.scatter(np.repeat(np.arange(layers), heads), means[..., place].ravel(), s=9, color=_BLUE, alpha=0.5)
        axes.plot(means[..., place].mean(1), color=_INK, linewidth=1.2)
        axes.set_yscale("log", base=2)
        axes.set_ylim(1 / REACH, REACH)
        axes.set_xticks(range(layers))
    figure.supylabel("attention received (uniform: 1)", fontsize=8, color=_INK)
    return figure


def looking(measured: "Measured") -> Figure:
    """Rows look at columns: how many times what chance gives, mean over questions and layers."""
    n = len(measured.classes)
    figure = Drawing(figsize=(2.4 + 0.42 * n, 1.4 + 0.36 * n), layout="constrained")
    axes = labelled(figure.subplots(), "looked at", "looks")
    paid = measured.paid.mean(1)
    count = (~np.isnan(paid)).sum(0)
    lifts = np.log2(np.where(count > 0, np.nansum(paid, 0) / np.maximum(count, 1), np.nan))
    shown = axes.imshow(lifts, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
    axes.set_xticks(range(n), measured.classes, rotation=60, ha="right")
    axes.set_yticks(range(n), measured.classes)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "1", "2", "4 ×"])
    return figure


def p_map(found: "Differences", classes: tuple[str, ...]) -> Figure:
    """Layer × head for each class: p of the permutation test; a dot where it stands after the correction."""
    figure = _sheet(len(classes))
    shown = None
    for place, axes in enumerate(_grid(figure, len(classes))):
        labelled(axes, "head", "layer", classes[place])
        own = np.clip(found.p[..., place], SURE, 1)
        shown = axes.imshow(-np.log10(own), cmap="Blues", vmin=0, vmax=-np.log10(SURE), origin="lower", aspect="auto")
        layer, head = np.nonzero(found.found[..., place])
        axes.scatter(head, layer, s=14, color=_RED)
        axes.set_xticks(range(own.shape[1]))
        axes.set_yticks(range(own.shape[0]))
    assert shown is not None
    bar = figure.colorbar(shown, ax=figure.axes, shrink=0.7)
    bar.set_ticks([0, 1, 2, 3, 4], labels=["1", "0.1", "0.01", "0.001", "≤ 0.0001"])
    return figure


def boxes(measured: "Measured") -> Figure:
    """One number a question, mean over layers and heads: right answers beside wrong ones, class by class."""
    n = len(measured.classes)
    figure = Drawing(figsize=(1.6 + 0.72 * n, 3.4), layout="constrained")
    axes = labelled(figure.subplots(), "", "attention received (uniform: 1)")
    own = measured.received.mean((1, 2))
    for shift, (said, group, colour) in enumerate(
        (("right", measured.correct, _BLUE), ("wrong", ~measured.correct, _RED))
    ):
        columns = [column[~np.isnan(column)] for column in own[group].T]
        at = np.arange(n) + (shift - 0.5) * 0.36
        drawn = axes.boxplot(columns, positions=at, widths=0.3, showfliers=False, patch_artist=True, manage_ticks=False)
        for box in drawn["boxes"]:
            box.set(facecolor=colour, alpha=0.55, linewidth=0.6)
        for line in drawn["medians"]:
            line.set(color=_INK)
        axes.plot([], [], color=colour, linewidth=5, alpha=0.55, label=f"{said} ({int(group.sum())})")
    axes.axhline(1, color=_GREY, linewidth=0.8)
    axes.set_xticks(range(n), measured.classes, rotation=45, ha="right")
    axes.legend(fontsize=7, frameon=False)
    return figure
