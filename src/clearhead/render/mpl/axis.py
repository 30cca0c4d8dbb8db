"""Figures of an axis such as gender: layer × token maps, accuracy by layer, distance of maps against chance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead.render.mpl.explanation import (
    MUTED_COLOUR,
    SIGNED_COLOUR_MAP,
    TEXT_COLOUR,
    InlineFigure,
    compute_error_bars,
    label_axes,
)
from clearhead.render.text_layout import escape_invisible
from clearhead.stats import ConfidenceInterval

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions
    from clearhead.studies.gender.axis_maps import AxisMaps
    from clearhead.studies.gender.study import SentenceSetResult

SERIES_COLOURS = ("#3b6fb6", "#d07a2d", "#7a9e4e", "#9a6fb0", "#b4b6bd")
#: What the maps of a sentence are called.
AXIS_MAP_TITLES = {
    "dr": "DR",
    "attdr": "AttDR",
    "cat": "CAT",
    "attcat": "AttCAT",
    "drcat": "DR × CAT",
    "dr_attcat": "DR × AttCAT",
}


def plot_axis_maps(axis_maps: "AxisMaps", title: str = "", map_names: Sequence[str] = tuple(AXIS_MAP_TITLES)) -> Figure:
    """Layer × token maps with their sums over layers below, each divided by its norm; white is zero in all of them."""
    there = [which for which in map_names if getattr(axis_maps, which) is not None]
    layers, tokens = axis_maps.dr.shape
    columns = min(2, len(there))
    rows = -(-len(there) // columns)
    size = (1.0 + 0.52 * tokens, 0.8 + 0.24 * (layers + 1))
    figure = InlineFigure(figsize=(columns * max(size[0], 3.2), rows * size[1] + 0.4), layout="constrained")
    figure.suptitle(escape_invisible(title), fontsize=9, color=TEXT_COLOUR, x=0.01, ha="left", parse_math=False)
    every = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, which in zip(every, there, strict=False):
        _draw_layer_token_map(axes, axis_maps.build_map_with_sum(which), axis_maps.tokens, AXIS_MAP_TITLES[which])
    for axes in every[len(there) :]:
        axes.axis("off")
    return figure


def _draw_layer_token_map(axes: Axes, values: Any, tokens: Sequence[str], title: str) -> None:
    full = float(np.abs(values).max()) or 1.0
    axes.imshow(values, cmap=SIGNED_COLOUR_MAP, vmin=-full, vmax=full, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9, color=TEXT_COLOUR, loc="left")
    axes.set_xticks(
        range(len(tokens)), [escape_invisible(token) for token in tokens], fontsize=7, rotation=30, ha="right"
    )
    layers = len(values) - 1
    axes.set_yticks(range(layers + 1), [*(f"L{layer}" for layer in range(layers)), "Sum"], fontsize=7)
    axes.axhline(layers - 0.5, color=TEXT_COLOUR, linewidth=0.8)
    axes.tick_params(length=0, colors=TEXT_COLOUR)
    for (row, column), value in np.ndenumerate(values):
        shade = "#fff" if abs(value) > 0.75 * full else TEXT_COLOUR
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=5.5, color=shade)


def plot_direction_quality(directions: "Directions", title: str = "") -> Figure:
    """How well the direction of each layer tells its classes apart on what was held out."""
    lines = [line for line in directions.to_table() if line["count"]]
    figure = InlineFigure(figsize=(7.4, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = list(range(len(lines)))  # positions: a layer may be "embeddings"
    label_axes(left, "layer", "held-out accuracy", escape_invisible(title))
    left.plot(
        layers, [np.nan if line["accuracy"] is None else line["accuracy"] for line in lines], "o-", c=SERIES_COLOURS[0]
    )
    left.axhline(0.5, color=MUTED_COLOUR, linewidth=0.8, linestyle="--")
    left.set_ylim(0.4, 1.02)
    label_axes(right, "layer", "effect size (Cohen’s d)")
    right.plot(layers, [line["effect"] for line in lines], "o-", color=SERIES_COLOURS[0])
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xticks(layers, [str(line["layer"]) for line in lines])
    return figure


def plot_map_similarity(sets: Sequence["SentenceSetResult"]) -> Figure:
    """Cosine distance of AttCAT and DR, set by set, beside that of independent profiles; p over the bars."""
    figure = InlineFigure(figsize=(7.4, 2.9), layout="constrained")
    axes = label_axes(figure.subplots(), "", "cosine distance of AttCAT and DR")
    places = list(range(len(sets)))
    found = [one.similarity for one in sets]
    axes.bar(places, [0.0 if s is None else s.distances["cosine"] for s in found], 0.6, color=SERIES_COLOURS[0])
    for place, s in zip(places, found, strict=True):
        if s is not None:
            level = s.chance["cosine"]
            axes.plot([place - 0.4, place + 0.4], [level, level], color=TEXT_COLOUR, linewidth=1.4)
            axes.text(place, max(level, s.distances["cosine"]) + 0.01, f"p {s.p:.2g}", ha="center", fontsize=7)
    axes.set_xticks(places, [escape_invisible(one.name) for one in sets], rotation=20, ha="right", fontsize=8)
    axes.plot([], [], color=TEXT_COLOUR, label="chance")
    axes.margins(y=0.12)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_ablation_effect(sets: Sequence["SentenceSetResult"], metric: str = "apart") -> Figure:
    """The size of a preference at the mask, before and after each way of removing the axis, with intervals.

    which: "apart", or "size of bias", of the sets that have a filler to mask
    """
    sets = [one for one in sets if one.pronouns[""][metric].count]
    ways = list(sets[0].pronouns)
    figure = InlineFigure(figsize=(7.4, 3.0), layout="constrained")
    said = {"apart": "|ln p(a) / p(b)|", "size of bias": "the same minus the prior"}[metric]
    axes = label_axes(figure.subplots(), "", said)
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        values: list[ConfidenceInterval] = [one.pronouns[way][metric] for one in sets]
        places = np.arange(len(sets)) + (i - (len(ways) - 1) / 2) * width
        means = np.nan_to_num([value.mean for value in values])
        axes.bar(
            places,
            means,
            width * 0.9,
            color=SERIES_COLOURS[-1] if not way else SERIES_COLOURS[i - 1],
            label=way or "original",
        )
        axes.errorbar(places, means, yerr=compute_error_bars(values), fmt="none", ecolor=TEXT_COLOUR, linewidth=0.8)
    axes.set_xticks(
        np.arange(len(sets)),
        [f"{escape_invisible(one.name)}\nn = {one.pronouns[''][metric].count}" for one in sets],
        rotation=20,
        ha="right",
        fontsize=8,
    )
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
