"""Plots of concepts and of an axis, for the renderer: scores by layer, concepts against one another, maps over inputs,
accuracy by layer, likeness beside chance, removal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clearhead.render import charts
from clearhead.render.array_codec import encode_array
from clearhead.render.mpl.axis import AXIS_MAP_TITLES
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, build_image_view_model, make_view_model

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions, LayerIndex
    from clearhead.concepts.significance import ConceptTest
    from clearhead.concepts.tcav import TcavResult
    from clearhead.sample import Sample
    from clearhead.studies.gender.axis_maps import AxisMaps
    from clearhead.studies.gender.study import SentenceSetResult

#: So many inputs of a class are shown with their maps.
MAX_SHOWN_INPUTS = 3


def make_tcav_chart(concept_tests: "Sequence[ConceptTest]", target: str) -> ViewModel:
    """Scores of each concept, grouped by layer; a star where a score is significant, a cross where it was refused."""
    layers = list(dict.fromkeys(line.layer for line in concept_tests))
    found = {(line.concept, line.layer): line for line in concept_tests}
    series = {
        concept: [_make_tcav_bar(found[concept, layer]) if (concept, layer) in found else None for layer in layers]
        for concept in dict.fromkeys(line.concept for line in concept_tests)
    }
    groups = [f"layer {layer}" for layer in layers]
    half = charts.make_reference_line(0.5, "one half")
    return charts.make_bar_chart(
        f"TCAV scores, {target}", groups, series, "TCAV score", y_range=(0, 1), reference_line=half
    )


def _make_tcav_bar(line: "ConceptTest") -> ViewModel:
    if line.rejection_reason:
        return {"value": 0.0, "mark": "×", "text": escape_invisible(f"refused: {line.rejection_reason}")}
    star = {"mark": "*"} if line.is_significant else {}
    return {"value": line.score, "low": line.low, "high": line.high, **star}


def make_relative_tcav_chart(scores: "dict[tuple[str, str], float]", layer: "LayerIndex") -> ViewModel:
    """TCAV of each concept (row) against each other one (column); the colour is how far from one half."""
    concepts = list(dict.fromkeys(a for a, _ in scores))
    values = np.array([[scores.get((a, b), np.nan) for b in concepts] for a in concepts])
    words = [["–" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values]
    more = {"texts": words, "vmax_label": "a distance of one half from one half", "show_texts": True, "small": True}
    return charts.make_heat_map_chart(
        f"layer {layer}", values - 0.5, concepts, concepts, "concept", "against concept", 0.5, **more
    )


def make_sensitivity_charts(result: "TcavResult", layer: "LayerIndex") -> list[ViewModel]:
    """Where in the first inputs each concept's sensitivity sits; one scale for each concept, special units aside."""
    samples = result.samples[:MAX_SHOWN_INPUTS]
    if samples[0].units.grid is None:
        return [_make_text_sensitivity_chart(result, layer, place, sample) for place, sample in enumerate(samples)]
    return [_make_image_sensitivity_chart(result, layer, concept, samples) for concept in result.sensitivity_maps]


def _make_text_sensitivity_chart(inquiry: "TcavResult", layer: "LayerIndex", place: int, sample: "Sample") -> ViewModel:
    values = np.stack(
        [
            own[layer][place] / _compute_maps_vmax(own[layer], inquiry.samples)
            for own in inquiry.sensitivity_maps.values()
        ]
    )
    title = f"layer {layer}, input {place + 1}; each concept scaled by its largest value"
    return charts.make_heat_map_chart(
        title, values, list(inquiry.sensitivity_maps), sample.units.names, "concept", "token", 1.0
    )


def _make_image_sensitivity_chart(
    inquiry: "TcavResult", layer: "LayerIndex", concept: str, samples: "Sequence[Sample]"
) -> ViewModel:
    own = inquiry.sensitivity_maps[concept][layer]
    full = _compute_maps_vmax(own, samples)
    maps = []
    for place, sample in enumerate(samples):
        grid, plane = sample.units.grid, own[place][_get_content_mask(sample)]
        assert grid is not None
        shown = {"image": None if sample.image is None else build_image_view_model(sample.image), "grid": list(grid)}
        height, width = grid if sample.image is None else sample.image.shape[:2]
        maps.append(
            shown | {"name": f"input {place + 1}", "size": [width, height], "values": encode_array(plane, full)}
        )
    return make_view_model("image_overlays", title=escape_invisible(f"{concept}, layer {layer}"), maps=maps)


def _get_content_mask(sample: "Sample") -> np.ndarray:
    return ~np.asarray(sample.units.special, dtype=bool)


def _compute_maps_vmax(maps: "Sequence[np.ndarray]", samples: "Sequence[Sample]") -> float:
    """The largest value of the maps that are shown: special units count where the others have none (last layer)."""
    shown = list(zip(maps, samples, strict=False))[:MAX_SHOWN_INPUTS]
    inside = max(float(np.abs(own[_get_content_mask(sample)]).max(initial=0)) for own, sample in shown)
    return inside or max(float(np.abs(own).max()) for own, _ in shown) or 1.0


def make_direction_charts(directions: "Directions") -> list[ViewModel]:
    """How well the direction of each layer tells its classes apart on what was held out."""
    lines = [line for line in directions.to_table() if line["count"]]
    layers = [-1 if line["layer"] == "embeddings" else line["layer"] for line in lines]  # an axis of numbers
    axis = "layer (−1: embeddings)" if -1 in layers else "layer"
    accuracy = [np.nan if line["accuracy"] is None else line["accuracy"] for line in lines]
    half = charts.make_reference_line(0.5, "chance")
    told = charts.make_curve("held-out accuracy", layers, accuracy)
    effect = charts.make_curve("effect size", layers, [line["effect"] for line in lines])
    return [
        charts.make_line_chart(
            "Held-out accuracy", [told], axis, "accuracy", y_range=(0, 1), reference_line=half, integer_axis=True
        ),
        charts.make_line_chart("Effect size", [effect], axis, "Cohen’s d", integer_axis=True),
    ]


def make_map_similarity_chart(sets: "Sequence[SentenceSetResult]") -> ViewModel:
    """Cosine distance of AttCAT and DR, set by set; a line across each bar is that of independent profiles."""
    cells = [
        None
        if one.similarity is None
        else charts.make_bar(
            one.similarity.distances["cosine"],
            reference_value=one.similarity.chance["cosine"],
            mark=f"p {one.similarity.p:.2g}",
        )
        for one in sets
    ]
    title = "Cosine distance of AttCAT and DR; the dashed line across a bar is chance"
    return charts.make_bar_chart(title, [one.name for one in sets], {"": cells}, "cosine distance")


def make_ablation_chart(sets: "Sequence[SentenceSetResult]", metric: str = "apart") -> ViewModel:
    """The size of a preference at the mask, before and after each way of removing the axis, with intervals.

    which: "apart", or "size of bias", of the sets that have a filler to mask
    """
    sets = [one for one in sets if one.pronouns[""][metric].count]
    series = {
        way or "original": [charts.make_bar(one.pronouns[way][metric]) for one in sets] for way in sets[0].pronouns
    }
    up = {"apart": "|ln p(a) / p(b)|", "size of bias": "the same minus the prior"}[metric]
    title = {"apart": "Preference at the mask", "size of bias": "Preference minus the prior"}[metric]
    return charts.make_bar_chart(title, [one.name for one in sets], series, up, grey=["original"])


def make_axis_map_charts(text: str, axis_maps: "AxisMaps") -> list[ViewModel]:
    """Layer × token maps with their sums over layers below, each divided by its norm."""
    rows = [*(f"layer {layer}" for layer in range(len(axis_maps.dr))), "sum"]
    there = [which for which in AXIS_MAP_TITLES if getattr(axis_maps, which) is not None]
    return [
        charts.make_heat_map_chart(
            f"{AXIS_MAP_TITLES[which]}: {text}",
            axis_maps.build_map_with_sum(which),
            rows,
            axis_maps.tokens,
            "layer",
            "token",
        )
        for which in there
    ]
