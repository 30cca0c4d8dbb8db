"""Plots of syntax in code models, for the renderer: attention by class and layer, who looks at whom, p, two groups."""

from typing import TYPE_CHECKING

import numpy as np

from clearhead.render import charts
from clearhead.render.mpl.code import REACH, SURE
from clearhead.render.view_model import Document

if TYPE_CHECKING:
    from clearhead.studies.code.attention import Measured
    from clearhead.studies.code.permutation_tests import Differences

UNIFORM = charts.level(1.0, "uniform attention")
RECEIVED = "attention received"


def by_layer(measured: "Measured") -> list[Document]:
    """Every head a point, mean over questions; the line is the mean over heads; 1 is what uniform attention gives."""
    means = np.nanmean(measured.received, 0)
    layers, heads, _ = means.shape
    across = np.repeat(np.arange(layers), heads)
    names = [f"layer {layer}, head {head}" for layer in range(layers) for head in range(heads)]
    return [
        charts.points(
            own,
            [charts.cloud("heads", across, means[..., place].ravel(), names=names)],
            "layer",
            RECEIVED,
            means=charts.cloud("mean", range(layers), means[..., place].mean(1)),
            range=(1 / REACH, REACH),
            log=True,
            level=UNIFORM,
            whole=True,
            small=True,
        )
        for place, own in enumerate(measured.classes)
    ]


def looking(measured: "Measured") -> Document:
    """Rows look at columns: how many times what chance gives, mean over questions and layers."""
    paid = measured.paid.mean(1)
    count = (~np.isnan(paid)).sum(0)
    times = np.where(count > 0, np.nansum(paid, 0) / np.maximum(count, 1), np.nan)
    words = [["–" if np.isnan(value) else f"{value:.2f}×" for value in row] for row in times]
    with np.errstate(divide="ignore"):
        doublings = np.log2(times)
    more = {"words": words, "written": True, "full_said": "four times what chance gives, or a quarter"}
    classes = measured.classes
    return charts.heat("Who looks at whom", doublings, classes, classes, "looks", "looked at", 2.0, **more)


def p_maps(found: "Differences", classes: tuple[str, ...]) -> list[Document]:
    """Layer × head for each class: p of the permutation test; a dot where it stands after the correction."""
    layers, heads, _ = found.p.shape
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    made = []
    for place, own in enumerate(classes):
        p, stands = found.p[..., place], found.found[..., place]
        words = [
            [_probability(p[row, column]) + (" ●" if stands[row, column] else "") for column in range(heads)]
            for row in range(layers)
        ]
        more = {
            "words": words,
            "marks": np.argwhere(stands),
            "marked": "a dot: p stands after the correction",
            "full_said": "p ≤ 0.0001",
        }
        strength, sure = -np.log10(np.clip(p, SURE, 1)), -float(np.log10(SURE))
        made.append(charts.heat(own, strength, rows, columns, "layer", "head", sure, weights=True, small=True, **more))
    return made


def _probability(p: float) -> str:
    return "–" if np.isnan(p) else f"p {p:.2g}"


def boxes(measured: "Measured") -> Document:
    """One number a question, mean over layers and heads: right answers beside wrong ones, class by class."""
    own = measured.received.mean((1, 2))
    series = {
        f"{said} ({int(group.sum())})": [charts.box(column) for column in own[group].T]
        for said, group in (("right", measured.correct), ("wrong", ~measured.correct))
    }
    return charts.boxes("Right answers beside wrong ones", measured.classes, series, RECEIVED, level=UNIFORM)
