"""The pages that `clearhead concept` and `clearhead bias gender` end in."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.render.report_blocks import panel, said, section, sheet, table, write
from clearhead.render.view_model import Document
from clearhead.render.views import concepts
from clearhead.stats import Interval

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.tcav import Inquiry
    from clearhead.studies.gender.axis_maps import Flow
    from clearhead.studies.gender.study import OfSet, Study

BY_LAYER = (
    "The direction of each layer was found without a share of the words and tried on that share. Accuracy: how "
    "often the score has the sign of its class. An eigenvector has no sign of its own: here all point to the "
    "first side, so that a change of sign between layers is never a finding."
)
LIKENESS = (
    "Both are made absolute and of length one. The line is the distance of two independent profiles of the same "
    "lengths: only what lies below it, with a small p, is likeness."
)
RANKS = (
    "Mean reciprocal rank of listed words by size of the score (1: always first). Attention alone stands beside it as "
    "a control, and what words in random order would have."
)
PRONOUNS = (
    "Probabilities at the first mask of each sentence; apart is |ln p(a)/p(b)|, bias the log ratio less that of the "
    "same sentence with the filler masked, too. Change: apart after removing minus before, with its p."
)


def tcav_page(found: "Inquiry", path: str | Path) -> Path:
    return write(path, tcav_sheet(found))


def tcav_sheet(found: "Inquiry") -> Document:
    heads = ["concept", "layer", "TCAV", "interval", "accuracy", "mean S", "mean |S|", "effect", "p (random)", "p (½)"]
    rows = [
        [
            *(line.concept, line.layer, line.score, f"{said(line.low)} to {said(line.high)}", line.accuracy),
            *(line.magnitude, line.strength, line.effect, line.p_random, line.p_half, line.corrected),
            line.refused or line.significant,
        ]
        for line in found.lines
    ]
    layers = list(found.relative)
    parts = [
        section(
            "Does the concept drive the class?",
            panel(concepts.tcav_bars(found.lines, found.target)),
            table([*heads, "p (Holm)", "significant"], rows),
            note="The share of inputs whose answer grows towards the concept, mean over random counter-sets, with its "
            "exact binomial interval. A star: different from random concepts and from one half, after Holm’s "
            "correction over concepts and layers. A cross: the concept could not be told from random inputs.",
        ),
    ]
    if len(found.maps) > 1:
        relative = [concepts.against(found.relative[k], k) for k in layers]
        parts.append(section("Concept against concept", panel(*relative), note="TCAV(A, B) = 1 − TCAV(B, A)."))
    shown = [panel(*concepts.sensitivity(found, k)) for k in layers]
    parts.append(
        section(
            "Where in the input", *shown, note="g·v of every unit, the mean vector of each concept; below zero: away."
        )
    )
    return sheet(f"clearhead · {found.model}", f"Concepts behind {found.target}", parts, _settings(found.settings))


def directions_page(directions: "Directions", model: str, path: str | Path, settings: Mapping[str, Any]) -> Path:
    names = next(iter(directions.values())).names
    parts = [_by_layer(directions)]
    title = f"From {names[1]} to {names[0]}"
    return write(path, sheet(f"clearhead · {model}", title, parts, _settings(settings)))


def removal_page(
    costs: Mapping[str, Mapping[str, Interval]], model: str, path: str | Path, settings: Mapping[str, Any]
) -> Path:
    parts = [section("What removing costs on the model’s own task", _costs(costs))]
    return write(path, sheet(f"clearhead · {model}", "Without the direction", parts, _settings(settings)))


def axis_page(found: "Study", path: str | Path) -> Path:
    return write(path, axis_sheet(found))


def axis_sheet(found: "Study") -> Document:
    """Layers, maps, likeness, ranks, pronouns, pairs of people, costs."""
    parts: list[Document | None] = [
        _by_layer(found.directions),
        *([_likeness(found)] if found.sets else []),
        _ranks(found),
    ]
    parts += [_pronouns(found)] if found.sets else []
    if found.costs:
        note = "The loss at masked words of sentences that were kept apart, before and after."
        parts.append(section("What removing costs", _costs(found.costs), note=note))
    if found.people:
        keys = ("text", "dr subject", "dr object", "dr difference", "attdr difference")
        rows = [[line[key] for key in keys] for line in found.people]
        right = sum(line["dr subject"] > 0 > line["dr object"] for line in found.people)
        note = (
            f"Scores summed over layers. {right} of {len(rows)} have the subject on the first side and the object on "
        )
        parts.append(
            section("Subject and object", table(keys, rows), note=f"{note}the second; all of them are listed.")
        )
    parts += [
        _maps(name, shown) for name, shown in [("own sentences", found.shown), *((s.name, s.shown) for s in found.sets)]
    ]
    title = f"{found.names[0]} and {found.names[1]}, layer by layer"
    told = {**found.settings, "word pairs": found.pairs, "sentences": found.occurrences}
    return sheet(f"clearhead · {found.model}", title, parts, _settings(told))


def _by_layer(directions: "Directions") -> Document:
    rows = [[line["layer"], line["accuracy"], line["effect"], line["count"]] for line in directions.table()]
    figures = panel(*concepts.by_layer(directions))
    return section("By layer", figures, table(["layer", "accuracy", "effect size", "held out"], rows), note=BY_LAYER)


def _likeness(found: "Study") -> Document:
    heads = ["set", "sentences", "cosine", "Euclid/√n", "Manhattan/n", "haversine", "p", "Spearman", "Kendall"]
    rows = []
    for one in found.sets:
        s = one.similarity
        if s is not None:
            cells = [f"{said(s.distances[k])} (chance {said(s.chance[k])})" for k in s.distances]
            rows.append([one.name, one.count, *cells, s.p, s.spearman, s.kendall])
    figure = panel(concepts.likeness(found.sets))
    return section("Is AttCAT like DR?", figure, table(heads, rows), note=LIKENESS)


def _ranks(found: "Study") -> Document:
    heads = ["sentences", "AttDR", "DR", "attention alone", "chance", "AttDR − DR", "p", "share of filler", "largest"]
    rows: list[list[Any]] = []
    for name, ranks, share, largest in [
        ("running text", found.ranks, None, None),
        *((one.name, one.ranks, one.share, _largest(one)) for one in found.sets),
    ]:
        if ranks is not None:
            own = [ranks[key] for key in ("attdr", "dr", "attention", "chance", "difference", "p")]
            rows.append([name, *own, share, largest])
    return section("Does AttDR rank the listed words first?", table(heads, rows), note=RANKS)


def _largest(one: "OfSet") -> str | None:
    return f"{one.largest} of {one.share.count}" if one.share else None


def _pronouns(found: "Study") -> Document:
    a, b = found.words
    named = (
        f"First and second are {a} and {b}, or, in sets with words of their own, those (the stereotypical one first)."
    )
    heads = ["set", "removed", "p(first)", "p(second)", "apart", "leaning", "bias", "size of bias", "change", "p"]
    rows = []
    for one in found.sets:
        for way, own in one.pronouns.items():
            change = one.changes.get(way, (None, None))
            keys = ("first", "second", "apart", "leaning", "bias", "size of bias")
            rows.append([one.name, way or "nothing", *(own[key] for key in keys), *change])
    figures = [concepts.removal(found.sets)]
    if any(one.pronouns[""]["bias"].count for one in found.sets):
        figures.append(concepts.removal(found.sets, "size of bias"))
    note = f"{PRONOUNS} {named}"
    return section("At the mask, with and without the axis", panel(*figures), table(heads, rows), note=note)


def _maps(name: str, shown: "Mapping[str, Flow]") -> Document | None:
    drawings = [panel(*concepts.flow_maps(text, own)) for text, own in shown.items()]
    note = "Each map is divided by its norm."
    return section(f"Maps: {name}", *drawings, note=note) if drawings else None


def _costs(costs: Mapping[str, Mapping[str, Interval]]) -> Document:
    heads = list(next(iter(costs.values())))
    return table(["removed", *heads], [[way, *own.values()] for way, own in costs.items()])


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {said(value)}" for name, value in settings.items()) + "."
