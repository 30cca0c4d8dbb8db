"""Figures of TCAV: scores by layer with intervals and stars, maps over inputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from clearhead.render.images import to_light_greyscale
from clearhead.render.mpl.axis import SERIES_COLOURS
from clearhead.render.mpl.explanation import MUTED_COLOUR, SIGNED_COLOUR_MAP, TEXT_COLOUR, InlineFigure, label_axes
from clearhead.render.text_layout import escape_invisible

if TYPE_CHECKING:
    from clearhead.concepts.directions import LayerIndex
    from clearhead.concepts.significance import ConceptTest
    from clearhead.concepts.tcav import TcavResult


def plot_tcav_scores(concept_tests: "Sequence[ConceptTest]", title: str = "") -> Figure:
    """Scores of each concept, grouped by layer; a star where a score is significant, a cross where it was refused."""
    layers = list(dict.fromkeys(line.layer for line in concept_tests))
    concepts = list(dict.fromkeys(line.concept for line in concept_tests))
    figure = InlineFigure(figsize=(max(4.5, 1.4 + 0.42 * len(concept_tests)), 3.0), layout="constrained")
    axes = label_axes(figure.subplots(), "layer", "TCAV score", escape_invisible(title))
    width = 0.8 / len(concepts)
    for line in concept_tests:
        i = concepts.index(line.concept)
        place = layers.index(line.layer) + (i - (len(concepts) - 1) / 2) * width
        if line.rejection_reason:
            axes.text(place, 0.02, "×", ha="center", fontsize=8, color=MUTED_COLOUR)
            continue
        axes.bar(place, line.score, width * 0.9, color=SERIES_COLOURS[i % len(SERIES_COLOURS)])
        ends = [[max(0.0, line.score - line.low)], [max(0.0, line.high - line.score)]]
        axes.errorbar(place, line.score, yerr=ends, fmt="none", ecolor=TEXT_COLOUR, linewidth=0.8)
        if line.is_significant:
            axes.text(place, min(line.high, 1.0) + 0.01, "*", ha="center", fontsize=11, color=TEXT_COLOUR)
    keys = [
        Patch(color=SERIES_COLOURS[i % len(SERIES_COLOURS)], label=escape_invisible(concept))
        for i, concept in enumerate(concepts)
    ]
    axes.axhline(0.5, color=MUTED_COLOUR, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1.1)
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.legend(handles=keys, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_concept_sensitivity(result: "TcavResult", layer: "LayerIndex", max_inputs: int = 3) -> Figure:
    """Where in the first inputs each concept's sensitivity sits; one scale for each concept, special units aside."""
    concepts = list(result.sensitivity_maps)
    samples = result.samples[:max_inputs]
    grid = samples[0].units.grid
    high = 1.5 if grid else 0.6
    figure = InlineFigure(
        figsize=(2.0 * len(samples) if grid else 8.0, (high + 0.25) * len(concepts)), layout="constrained"
    )
    every = figure.subplots(len(concepts), len(samples) if grid else 1, squeeze=False)
    for row, concept in zip(every, concepts, strict=True):
        own = result.sensitivity_maps[concept][layer][: len(samples)]
        kept = [[not special for special in sample.units.special] for sample in samples]
        full = max(float(np.abs(one[inside]).max()) for one, inside in zip(own, kept, strict=True)) or 1.0
        if grid is None:
            _draw_text_map(row[0], samples[0].units, own[0] / full, concept)
            continue
        for i, (axes, sample, values, inside) in enumerate(zip(row, samples, own, kept, strict=True)):
            if sample.image is not None:
                axes.imshow(to_light_greyscale(sample.image), extent=(0, 1, 0, 1))
            plane = values[inside].reshape(grid) / full
            alpha = 1.0 if sample.image is None else 0.6
            axes.imshow(plane, cmap=SIGNED_COLOUR_MAP, vmin=-1, vmax=1, alpha=alpha, extent=(0, 1, 0, 1))
            axes.axis("off")
            if not i:
                axes.set_title(escape_invisible(concept), fontsize=8, color=TEXT_COLOUR, loc="left", parse_math=False)
    return figure


def _draw_text_map(axes: Any, units: Any, values: Any, concept: str) -> None:
    axes.imshow(values[None], cmap=SIGNED_COLOUR_MAP, vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(
        range(len(units)), [escape_invisible(one) for one in units.names], fontsize=7, rotation=30, ha="right"
    )
    axes.set_yticks([0], [escape_invisible(concept)], fontsize=8)
    axes.tick_params(length=0, colors=TEXT_COLOUR)
