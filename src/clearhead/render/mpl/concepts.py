"""Figures of TCAV: scores by layer with intervals and stars, maps over inputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from clearhead.render.images import grey
from clearhead.render.mpl.axis import COLOURS
from clearhead.render.mpl.explanation import _INK, _MAP, _SOFT, Drawing, labelled
from clearhead.render.text_layout import name

if TYPE_CHECKING:
    from clearhead.concepts.significance import Tested
    from clearhead.concepts.tcav import Inquiry


def bars(lines: "Sequence[Tested]", title: str = "") -> Figure:
    """Scores of each concept, grouped by layer; a star where a score is significant, a cross where it was refused."""
    layers = list(dict.fromkeys(line.layer for line in lines))
    concepts = list(dict.fromkeys(line.concept for line in lines))
    figure = Drawing(figsize=(max(4.5, 1.4 + 0.42 * len(lines)), 3.0), layout="constrained")
    axes = labelled(figure.subplots(), "layer", "TCAV score", name(title))
    width = 0.8 / len(concepts)
    for line in lines:
        i = concepts.index(line.concept)
        place = layers.index(line.layer) + (i - (len(concepts) - 1) / 2) * width
        if line.refused:
            axes.text(place, 0.02, "×", ha="center", fontsize=8, color=_SOFT)
            continue
        axes.bar(place, line.score, width * 0.9, color=COLOURS[i % len(COLOURS)])
        ends = [[max(0.0, line.score - line.low)], [max(0.0, line.high - line.score)]]
        axes.errorbar(place, line.score, yerr=ends, fmt="none", ecolor=_INK, linewidth=0.8)
        if line.significant:
            axes.text(place, min(line.high, 1.0) + 0.01, "*", ha="center", fontsize=11, color=_INK)
    keys = [Patch(color=COLOURS[i % len(COLOURS)], label=name(concept)) for i, concept in enumerate(concepts)]
    axes.axhline(0.5, color=_SOFT, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1.1)
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.legend(handles=keys, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def maps(inquiry: "Inquiry", layer: int, count: int = 3) -> Figure:
    """Where in the first inputs each concept's sensitivity sits; one scale for each concept, special units aside."""
    concepts = list(inquiry.maps)
    samples = inquiry.samples[:count]
    grid = samples[0].units.grid
    high = 1.5 if grid else 0.6
    figure = Drawing(figsize=(2.0 * len(samples) if grid else 8.0, (high + 0.25) * len(concepts)), layout="constrained")
    every = figure.subplots(len(concepts), len(samples) if grid else 1, squeeze=False)
    for row, concept in zip(every, concepts, strict=True):
        own = inquiry.maps[concept][layer][: len(samples)]
        kept = [[not special for special in sample.units.special] for sample in samples]
        full = max(float(np.abs(one[inside]).max()) for one, inside in zip(own, kept, strict=True)) or 1.0
        if grid is None:
            _text(row[0], samples[0].units, own[0] / full, concept)
            continue
        for i, (axes, sample, values, inside) in enumerate(zip(row, samples, own, kept, strict=True)):
            if sample.picture is not None:
                axes.imshow(grey(sample.picture), extent=(0, 1, 0, 1))
            plane = values[inside].reshape(grid) / full
            alpha = 1.0 if sample.picture is None else 0.6
            axes.imshow(plane, cmap=_MAP, vmin=-1, vmax=1, alpha=alpha, extent=(0, 1, 0, 1))
            axes.axis("off")
            if not i:
                axes.set_title(name(concept), fontsize=8, color=_INK, loc="left", parse_math=False)
    return figure


def _text(axes: Any, units: Any, values: Any, concept: str) -> None:
    axes.imshow(values[None], cmap=_MAP, vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(units)), [name(one) for one in units.names], fontsize=7, rotation=30, ha="right")
    axes.set_yticks([0], [name(concept)], fontsize=8)
    axes.tick_params(length=0, colors=_INK)
