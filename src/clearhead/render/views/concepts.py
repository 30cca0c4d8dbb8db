"""Plots of concepts and of an axis, for the renderer: scores by layer, concepts against one another, maps over inputs,
accuracy by layer, likeness beside chance, removal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clearhead.render import charts
from clearhead.render.array_codec import packed
from clearhead.render.mpl.axis import MAPS
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, picture_of, view

if TYPE_CHECKING:
    from clearhead.adapters.base import Sample
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.significance import Tested
    from clearhead.concepts.tcav import Inquiry
    from clearhead.studies.gender.axis_maps import Flow
    from clearhead.studies.gender.study import OfSet

#: So many inputs of a class are shown with their maps.
SHOWN = 3


def tcav_bars(lines: "Sequence[Tested]", target: str) -> Document:
    """Scores of each concept, grouped by layer; a star where a score is significant, a cross where it was refused."""
    layers = list(dict.fromkeys(line.layer for line in lines))
    found = {(line.concept, line.layer): line for line in lines}
    series = {
        concept: [_tested(found[concept, layer]) if (concept, layer) in found else None for layer in layers]
        for concept in dict.fromkeys(line.concept for line in lines)
    }
    groups = [f"layer {layer}" for layer in layers]
    half = charts.level(0.5, "one half")
    return charts.bars(f"TCAV scores, {target}", groups, series, "TCAV score", range=(0, 1), level=half)


def _tested(line: "Tested") -> Document:
    if line.refused:
        return {"value": 0.0, "mark": "×", "said": name(f"refused: {line.refused}")}
    star = {"mark": "*"} if line.significant else {}
    return {"value": line.score, "low": line.low, "high": line.high, **star}


def against(scores: "dict[tuple[str, str], float]", layer: int) -> Document:
    """TCAV of each concept (row) against each other one (column); the colour is how far from one half."""
    concepts = list(dict.fromkeys(a for a, _ in scores))
    values = np.array([[scores.get((a, b), np.nan) for b in concepts] for a in concepts])
    words = [["–" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values]
    more = {"words": words, "full_said": "one half away from one half", "written": True, "small": True}
    return charts.heat(f"layer {layer}", values - 0.5, concepts, concepts, "concept", "against concept", 0.5, **more)


def sensitivity(inquiry: "Inquiry", layer: int) -> list[Document]:
    """Where in the first inputs each concept's sensitivity sits; one scale for each concept, special units aside."""
    samples = inquiry.samples[:SHOWN]
    if samples[0].units.grid is None:
        return [_in_text(inquiry, layer, place, sample) for place, sample in enumerate(samples)]
    return [_on_pictures(inquiry, layer, concept, samples) for concept in inquiry.maps]


def _in_text(inquiry: "Inquiry", layer: int, place: int, sample: "Sample") -> Document:
    values = np.stack([own[layer][place] / _full(own[layer], inquiry.samples) for own in inquiry.maps.values()])
    title = f"layer {layer}, input {place + 1}; each concept by its largest"
    return charts.heat(title, values, list(inquiry.maps), sample.units.names, "concept", "token", 1.0)


def _on_pictures(inquiry: "Inquiry", layer: int, concept: str, samples: "Sequence[Sample]") -> Document:
    own = inquiry.maps[concept][layer]
    full = _full(own, samples)
    maps = []
    for place, sample in enumerate(samples):
        grid, plane = sample.units.grid, own[place][_inside(sample)]
        assert grid is not None
        shown = {"picture": None if sample.picture is None else picture_of(sample.picture), "grid": list(grid)}
        height, width = grid if sample.picture is None else sample.picture.shape[:2]
        maps.append(shown | {"name": f"input {place + 1}", "size": [width, height], "values": packed(plane, full)})
    return view("overlays", title=name(f"{concept}, layer {layer}"), maps=maps)


def _inside(sample: "Sample") -> np.ndarray:
    return ~np.asarray(sample.units.special, dtype=bool)


def _full(maps: "Sequence[np.ndarray]", samples: "Sequence[Sample]") -> float:
    """The largest value of the maps that are shown: special units count where the others have none (last layer)."""
    shown = list(zip(maps, samples, strict=False))[:SHOWN]
    inside = max(float(np.abs(own[_inside(sample)]).max(initial=0)) for own, sample in shown)
    return inside or max(float(np.abs(own).max()) for own, _ in shown) or 1.0


def by_layer(directions: "Directions") -> list[Document]:
    """How well the direction of each layer tells its classes apart on what was held out."""
    lines = [line for line in directions.table() if line["count"]]
    layers = [line["layer"] for line in lines]
    accuracy = [np.nan if line["accuracy"] is None else line["accuracy"] for line in lines]
    half = charts.level(0.5, "chance")
    told = charts.line("held-out accuracy", layers, accuracy)
    effect = charts.line("effect size", layers, [line["effect"] for line in lines])
    return [
        charts.curves("Held-out accuracy", [told], "layer", "accuracy", range=(0, 1), level=half, whole=True),
        charts.curves("Effect size", [effect], "layer", "Cohen’s d", whole=True),
    ]


def likeness(sets: "Sequence[OfSet]") -> Document:
    """Cosine distance of AttCAT and DR, set by set; a line across each bar is that of independent profiles."""
    cells = [
        None
        if one.similarity is None
        else charts.cell(
            one.similarity.distances["cosine"],
            level=one.similarity.chance["cosine"],
            mark=f"p {one.similarity.p:.2g}",
        )
        for one in sets
    ]
    title = "Cosine distance of AttCAT and DR; the dashed line across a bar is chance"
    return charts.bars(title, [one.name for one in sets], {"": cells}, "cosine distance")


def removal(sets: "Sequence[OfSet]", which: str = "apart") -> Document:
    """The size of a preference at the mask, before and after each way of removing the axis, with intervals.

    which: "apart", or "size of bias", of the sets that have a filler to mask
    """
    sets = [one for one in sets if one.pronouns[""][which].count]
    series = {way or "as it is": [charts.cell(one.pronouns[way][which]) for one in sets] for way in sets[0].pronouns}
    up = {"apart": "|ln p(a) / p(b)|", "size of bias": "the same, less the prior"}[which]
    title = {"apart": "Preference at the mask", "size of bias": "Preference, less the prior"}[which]
    return charts.bars(title, [one.name for one in sets], series, up, grey=["as it is"])


def flow_maps(text: str, one: "Flow") -> list[Document]:
    """Layer × token maps with their sums over layers below, each divided by its norm."""
    rows = [*(f"layer {layer}" for layer in range(1, len(one.dr) + 1)), "sum"]
    there = [which for which in MAPS if getattr(one, which) is not None]
    return [
        charts.heat(f"{MAPS[which]}: {text}", one.with_sum(which), rows, one.tokens, "layer", "token")
        for which in there
    ]
