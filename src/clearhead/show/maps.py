"""Rows of scores as HTML: step × unit and layer × unit as a table, for pictures one small map per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from clearhead.explanation import Explanation
from clearhead.joint import AnyExplanation
from clearhead.show import pictures, views, wording
from clearhead.show.colours import largest, levels
from clearhead.show.layout import name, shape
from clearhead.show.markup import Markup, Part, joined, tag
from clearhead.show.views import level_class

#: With more cells than this a table becomes one strip of pixels per row.
CELLS = 20_000
#: Up to so many units the cells of steps are large.
FEW = 32
#: With more numbers than this the rows of units and of layers are left to the file.
LARGE = 50_000


@dataclass(frozen=True)
class Rows:
    """Rows of scores with their names; `corner` says what they are. Steps can be chosen, layers cannot."""

    scores: Float[np.ndarray, "row unit"]
    names: Sequence[str]
    corner: str
    titles: Sequence[str] = ()

    def step(self, place: int) -> int | None:
        return place if self.titles else None


def answer(explanation: AnyExplanation) -> Markup:
    """The steps that were explained together, one after another. A script lets one be chosen."""
    if explanation.steps is None:
        return Markup()
    chips = [
        tag("button", tag("bdi", name(step)), type="button", class_="ch-chip", data_step=i, title=title)
        for i, (step, title) in enumerate(zip(explanation.steps, wording.step_titles(explanation), strict=True))
    ]
    hint = tag("span", ": point at one to see it alone, choose it to keep it", class_="ch-hint")
    return tag("div", tag("p", f"{len(chips)} steps", hint, class_="ch-label"), tag("p", *chips, class_="ch-answer"))


def steps(explanation: Explanation) -> Markup:
    """Step × unit; for a picture, one small map per step, with the box of what was found."""
    if explanation.steps is None or explanation.matrix is None or not _is_input(explanation):
        return Markup()
    rows = Rows(explanation.matrix, wording.row_names(explanation), "step", wording.step_titles(explanation))
    full = largest(explanation, explanation.matrix)
    caption = _caption("Step by step", full)
    if shape(explanation) == "grid":
        return tag("div", caption, _step_maps(explanation, rows, full))
    return tag("div", caption, _table(explanation, rows, full))


def _is_input(explanation: Explanation) -> bool:
    return bool(len(explanation.units.drop_special()))


def every_row(explanation: Explanation) -> Markup | None:
    """Unit × unit, where every row was read."""
    matrix = explanation.matrix
    if matrix is None or explanation.steps is not None or matrix.size > LARGE or len(matrix) != len(explanation):
        return None
    full = largest(explanation, matrix)
    names = wording.row_names(explanation)
    return joined(_caption("The scores of each row", full), _table(explanation, Rows(matrix, names, "row"), full))


def layers(explanation: Explanation) -> Markup | None:
    """Layer × unit; for a picture, one small map per layer."""
    part = explanation.per_layer
    if part is None or len(part) < 2 or part.size > LARGE:
        return None
    full = largest(explanation, part)
    rows = Rows(part, wording.layer_names(explanation, len(part)), "layer")
    draw = _layer_maps if shape(explanation) == "grid" else _table
    return joined(_caption(wording.layer_caption(explanation), full), draw(explanation, rows, full))


def _caption(what: str, full: float) -> Markup:
    return tag("p", f"{what}; full colour is {wording.number(full, 3)}", class_="ch-label")


def _layer_maps(explanation: Explanation, rows: Rows, full: float) -> Markup:
    height, width = pictures.size(explanation, 112)
    made = []
    for layer, heat in zip(rows.names, _on_grid(explanation, rows.scores), strict=True):
        address = pictures.patch_address(heat, full)
        image = tag("img", src=address, alt="", width=width, height=height, class_="ch-pixels")
        made.append(tag("figure", image, tag("figcaption", f"layer {layer}")))
    return tag("div", *made, class_="ch-small")


def _step_maps(explanation: Explanation, rows: Rows, full: float) -> Markup:
    """The picture lies below each map: it stands in the page once, and every map shows it."""
    height, width = pictures.size(explanation, 112)
    made = []
    for i, heat in enumerate(_on_grid(explanation, rows.scores)):
        image = tag("img", src=pictures.glaze_address(heat, full), alt="", width=width, height=height, class_="ch-heat")
        style = f"aspect-ratio:{width}/{height}"
        stack = tag("div", image, views.found(explanation, only=i), class_="ch-stack ch-below", style=style)
        caption = tag("figcaption", tag("bdi", rows.names[i]))
        made.append(tag("figure", stack, caption, data_step=i, title=rows.titles[i]))
    below = None
    if explanation.picture is not None:
        grey = pictures.grey(explanation.picture)
        below = f"--below:url({pictures.picture_address(grey, *pictures.size(explanation, 168))})"
    return tag("div", *made, class_="ch-small ch-steps", style=below)


def _on_grid(explanation: Explanation, scores: Float[np.ndarray, "row unit"]) -> list[np.ndarray]:
    assert explanation.units.grid is not None
    kept = explanation.units.drop_special()
    return [row[kept].reshape(explanation.units.grid) for row in scores]


def _table(explanation: Explanation, rows: Rows, full: float) -> Markup:
    """Cells with their names and figures or, where there are very many, one strip of pixels per row."""
    strips = rows.scores.size > CELLS or explanation.units.kind == "frame"
    names = [wording.unit_label(explanation, i) for i in range(len(explanation))]
    head = [] if strips else [tag("th", tag("span", label), scope="col") for label in names]
    shades = levels(rows.scores, full)
    made = []
    for i, row in enumerate(rows.names):
        cells: Sequence[Part]
        if strips:
            address = pictures.patch_address(rows.scores[i : i + 1], full)
            cells = [tag("td", tag("img", src=address, alt="", class_="ch-pixels"), class_="ch-strip")]
        else:
            titles = (f"{row} ← {label}: " if rows.titles else "" for label in names)
            cells = [
                tag("td", class_=level_class(int(level)), title=f"{title}{wording.number(float(value), 3)}")
                for level, value, title in zip(shades[i], rows.scores[i], titles, strict=True)
            ]
        label = tag("bdi", wording.short(row, 24)) if rows.titles else row
        named = tag("th", label, scope="row", title=row if len(row) > 24 else None)
        made.append(tag("tr", named, *cells, data_step=rows.step(i)))
    table = tag(
        "table",
        tag("thead", tag("tr", tag("th", rows.corner, scope="col"), *head)),
        tag("tbody", *made),
        class_="ch-map ch-roomy" if rows.titles and len(names) <= FEW else "ch-map",
    )
    label = f"{rows.corner.capitalize()} by unit"
    return tag("div", table, class_="ch-scroll", tabindex=0, role="region", aria_label=label)
