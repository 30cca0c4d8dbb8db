"""Figures of attention: all heads at a glance, single maps, the read row by depth, and the layered graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from clearhead.errors import InputError
from clearhead.render.mpl.explanation import MUTED_COLOUR, TEXT_COLOUR, InlineFigure
from clearhead.render.text_layout import escape_invisible

if TYPE_CHECKING:
    from clearhead.probes.attention_view import AttentionView

_BLUE = "#3b6fb6"
#: Weights below this are not drawn in the graph.
MIN_DRAWN_WEIGHT = 0.02


def plot_attention_overview(view: "AttentionView") -> Figure:
    """Draw a small map for each head, the deepest layer on top, each with the name of its pattern.

    Args:
        view: The attention of one input.

    Returns:
        The figure.
    """
    layers, heads, rows, columns = view.attention.shape
    high, wide = rows + max(2, rows // 4), columns + max(1, columns // 10)  # room for a name above each map
    sheet = np.full((layers * high, heads * wide), np.nan)
    figure = InlineFigure(figsize=(0.8 + 1.05 * heads, 0.4 + 1.2 * layers))
    axes = figure.add_axes((0.5 / figure.get_figwidth(), 0.01, 1 - 0.6 / figure.get_figwidth(), 0.98))
    for layer in range(layers):
        top = (layers - 1 - layer) * high + high - rows
        axes.text(
            -wide / 10,
            top + rows / 2,
            f"layer {layer}",
            fontsize=7,
            color=TEXT_COLOUR,
            rotation=90,
            va="center",
            ha="right",
        )
        for head in range(heads):
            sheet[top : top + rows, head * wide : head * wide + columns] = view.attention[layer, head]
            axes.text(head * wide, top - 1, view.format_head_pattern(layer, head), fontsize=6, color=MUTED_COLOUR)
    axes.imshow(sheet, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.axis("off")
    return figure


def plot_attention_maps(view: "AttentionView", heads: Sequence[tuple[int, int]]) -> Figure:
    """Draw the maps of selected heads, query × key, each with its pattern on this input and on average over others.

    Args:
        view: The attention of one input.
        heads: Pairs of layer and head; negative indices count from the end.

    Returns:
        The figure.

    Raises:
        InputError: If a layer or head does not exist.
    """
    width, height = (1.2 + 0.26 * len(units) for units in (view.key_names or view.tokens, view.tokens))
    figure = InlineFigure(figsize=(max(width, 2.4) * len(heads), max(height, 2.0) + 0.4), layout="constrained")
    every = figure.subplots(1, len(heads), squeeze=False)[0]
    for axes, (layer, head) in zip(every, heads, strict=True):
        axes.imshow(view.get_map(layer, head), cmap="Blues", vmin=0, vmax=1)
        said = view.format_head_pattern(layer, head)
        said += (
            ""
            if view.mean_head_statistics is None
            else f"; average over other inputs: {view.format_head_pattern(layer, head, True)}"
        )
        axes.set_title(f"layer {layer}, head {head}: {said}", fontsize=8, color=TEXT_COLOUR)
        _set_unit_labels(axes, view, "x")
        _set_unit_labels(axes, view, "y")
    return figure


def plot_attention_by_layer(view: "AttentionView") -> Figure:
    """Draw what the read-out position attends to in each layer: attention, rollout, flow, candidates' probabilities.

    Args:
        view: The attention of one input; what it lacks is left out.

    Returns:
        The figure, the deepest layer on top.
    """
    width, count = 1.0 + 0.3 * len(view.key_names or view.tokens), len(view.scores_by_depth)
    read = "" if view.readout_row is None else f", row of {escape_invisible(view.tokens[view.readout_row])}"
    ratios = [width] * count + [0.8 + 0.4 * len(view.candidate_probabilities)] * bool(view.candidate_probabilities)
    figure = InlineFigure(figsize=(sum(ratios), 1.6 + 0.26 * len(view.attention)), layout="constrained")
    every = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    if view.candidate_probabilities:
        bars = every[-1]
        bars.bar(range(len(view.candidate_probabilities)), list(view.candidate_probabilities.values()), color=_BLUE)
        bars.set_xticks(
            range(len(view.candidate_probabilities)),
            [escape_invisible(word) for word in view.candidate_probabilities],
            parse_math=False,
        )
        bars.set_title("probability", fontsize=8, color=TEXT_COLOUR)
        bars.tick_params(labelsize=7)
    for axes, (kind, rows) in zip(every[:count], view.scores_by_depth.items(), strict=True):
        axes.imshow(rows, cmap="Blues", origin="lower", aspect="auto", vmin=0)
        axes.set_title(f"{kind}{read}", fontsize=8, color=TEXT_COLOUR, parse_math=False)
        axes.set_ylabel("layer", fontsize=7, color=MUTED_COLOUR)
        axes.set_yticks(range(len(rows)), [str(layer) for layer in range(len(rows))], fontsize=7)
        _set_unit_labels(axes, view, "x")
    return figure


def plot_attention_graph(view: "AttentionView") -> Figure:
    """Draw attention as a graph: a column per layer, a node per unit, lines as strong as the mean over heads.

    Args:
        view: The attention of one input.

    Returns:
        The figure.

    Raises:
        InputError: If queries and keys are units of different streams.
    """
    if view.key_names is not None:
        raise InputError(
            "a layered graph needs units that attend to each other; these attend to units of another stream"
        )
    layers, n = len(view.attention), len(view.tokens)
    figure = InlineFigure(figsize=(2.0 + 1.1 * layers, 0.8 + 0.24 * n), layout="constrained")
    axes = figure.subplots()
    weights = view.attention.mean(1)
    layer, query, key = np.nonzero(weights >= MIN_DRAWN_WEIGHT)
    lines = [[(x, k), (x + 1, q)] for x, q, k in zip(layer, query, key, strict=True)]
    strengths = weights[layer, query, key]
    shades = [(0.23, 0.44, 0.71, min(1.0, float(strength))) for strength in strengths]
    axes.add_collection(LineCollection(lines, linewidths=2.5 * strengths, colors=shades))
    axes.scatter(np.repeat(np.arange(layers + 1), n), np.tile(np.arange(n), layers + 1), s=6, color=TEXT_COLOUR)
    axes.set_xlim(-0.2, layers + 0.2)
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xticks(range(layers + 1), ["input", *(f"layer {number}" for number in range(layers))], fontsize=7)
    _set_unit_labels(axes, view, "y")
    return figure


def _set_unit_labels(axes: Axes, view: "AttentionView", side: str) -> None:
    labels = [escape_invisible(token) for token in (view.key_names or view.tokens if side == "x" else view.tokens)]
    ticks = range(len(labels))
    if side == "x":
        axes.set_xticks(ticks, labels, rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_yticks(ticks, labels, fontsize=7, parse_math=False)
