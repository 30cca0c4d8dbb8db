"""The units of one stream where they lie, as HTML: in their text, on their picture, in boxes over it, along time."""

import numpy as np

from clearhead.explanation import Explanation
from clearhead.joint import AnyExplanation
from clearhead.show import pictures, wording
from clearhead.show.colours import LEVELS, NO_SCORE, largest, levels
from clearhead.show.layout import Piece, lines, name, shape
from clearhead.show.markup import Markup, Part, joined, tag
from clearhead.units import Box

#: How many moments of a sound are drawn beside one another.
MOMENTS = 400


def level_class(level: int) -> str:
    return "chn" if level == NO_SCORE else f"ch{level}"


def view(explanation: Explanation) -> Markup:
    """The units where they lie; nothing for a mere list of them, which the bars show."""
    draw = {"grid": on_grid, "boxes": in_boxes, "time": over_time, "text": text}.get(shape(explanation))
    return Markup() if draw is None else draw(explanation)


def text(explanation: Explanation) -> Markup:
    """The text as it was written, each unit on its colour."""
    steps = levels(explanation.scores, largest(explanation))
    classes = "ch-text" if explanation.units.offsets is not None else "ch-text ch-names"
    made = [
        tag("p", *(_piece(explanation, piece, steps) for piece in line), class_=classes, dir="auto", lang="")
        for line in lines(explanation.units)
    ]
    return tag("div", *made)


def _piece(explanation: Explanation, piece: Piece, steps: np.ndarray) -> Part:
    if piece.unit is None:
        if not piece.unseen:
            return piece.text
        return tag("span", piece.text, class_="ch-cut", title="the model never saw this")
    more = " ch-x" if piece.special else " ch-h" if piece.hidden else ""
    classes = f"ch-u {level_class(int(steps[piece.unit]))}{more}"
    return tag("span", piece.text, class_=classes, title=wording.hover(explanation, piece.unit))


def picture(explanation: AnyExplanation) -> Markup:
    """The picture as the model saw it, with what was found in it."""
    if explanation.picture is None:
        return Markup()
    caption = tag("figcaption", "What the model saw", class_="ch-note")
    stack = tag("div", image(explanation.picture, "The picture"), found(explanation, named=True), class_="ch-stack")
    return tag("figure", stack, caption, class_="ch-picture")


def image(picture: pictures.Pixels, alt: str) -> Markup:
    height, width = pictures.fitted(*picture.shape[:2])
    address = pictures.picture_address(picture, height, width)
    classes = "ch-pixels" if pictures.is_small(picture) else None
    return tag("img", src=address, alt=alt, width=width, height=height, class_=classes)


def found(explanation: AnyExplanation, only: int | None = None, named: bool = False) -> Markup:
    """The box of each step, or of one alone."""
    made = []
    for step, (label, box) in wording.boxes(explanation).items():
        if only in (None, step):
            inside = tag("b", label) if named else None
            made.append(tag("i", inside, class_="ch-box", style=_place(box), title=label, data_step=step))
    return joined(*made)


def _place(box: Box) -> str:
    """Where a box lies over its picture; what reaches beyond the picture is cut off."""
    left, top, right, bottom = (100 * min(max(float(edge), 0.0), 1.0) for edge in box)
    return f"left:{left:.4g}%;top:{top:.4g}%;width:{right - left:.4g}%;height:{bottom - top:.4g}%"


def on_grid(explanation: Explanation) -> Markup:
    """The heat map over the grey picture with a slider, and the patches as they are."""
    height, width = pictures.size(explanation)
    most = wording.strongest(explanation, 1)
    said = f"Heat map; strongest patch: {wording.hover(explanation, most[0])}" if most else "Heat map"
    address = pictures.heat_address(explanation, height, width)
    heat = tag("img", src=address, alt=said, width=width, height=height, class_="ch-heat")
    frame = None if explanation.picture is not None else f"aspect-ratio:{width}/{height}"
    slider = tag(
        "input", type="range", min=0, max=100, value=85, class_="ch-opacity", aria_label="Opacity of the heat map"
    )
    stack = tag("div", _below(explanation), heat, found(explanation), class_="ch-stack", style=frame)
    smooth = tag("figure", stack, tag("figcaption", "Heat map ", slider))
    return tag("div", smooth, _patches(explanation, height, width), class_="ch-views")


def _below(explanation: Explanation) -> Part:
    return None if explanation.picture is None else image(pictures.grey(explanation.picture), "")


def _patches(explanation: Explanation, height: int, width: int) -> Markup:
    _, columns = explanation.units.grid or (1, 1)
    steps = levels(explanation.scores, largest(explanation))
    cells = (
        tag("i", class_=level_class(int(steps[i])), title=wording.hover(explanation, int(i)))
        for i in explanation.units.drop_special()
    )
    shape = f"grid-template-columns:repeat({columns},1fr);aspect-ratio:{width}/{height}"
    return tag(
        "figure",
        tag("div", *cells, class_="ch-grid", style=shape, role="img", aria_label="The score of each patch"),
        tag("figcaption", "Patch by patch"),
    )


def in_boxes(explanation: Explanation) -> Markup:
    """Regions as boxes over the grey picture; the strongest lie on top, and those that stand out say their names."""
    steps = levels(explanation.scores, largest(explanation))
    made = []
    for place, box in enumerate(explanation.units.boxes or ()):
        if box is None:
            continue
        strength = 0 if steps[place] == NO_SCORE else abs(int(steps[place]))
        style = f"{_place(box)};--s:{max(strength / LEVELS, 0.15):.2g};z-index:{strength}"
        inside = tag("b", wording.unit_label(explanation, place)) if strength > LEVELS // 2 else None
        classes = f"ch-region {level_class(int(steps[place]))}"
        made.append(tag("i", inside, class_=classes, style=style, title=wording.hover(explanation, place)))
    stack = tag("div", _below(explanation), *made, class_="ch-stack")
    return tag("figure", stack, tag("figcaption", "Regions, the strongest on top"), class_="ch-regions")


def over_time(explanation: Explanation) -> Markup:
    """A sound's frames as bars over time, up for the target and down against it."""
    moments, full = wording.moments(explanation, MOMENTS), largest(explanation)
    made = []
    for label, value in moments:
        level = int(levels(np.asarray(value), full))
        high = 0.0 if np.isnan(value) else min(abs(value) / full, 1.0)
        style = f"--h:{high:.3g}"
        side = "ch-moment ch-down" if value < 0 else "ch-moment"
        title = f"{label}: {wording.number(value, 6)}"
        made.append(tag("i", class_=f"{side} {level_class(level)}", style=style, title=title))
    signed = " ch-both" if explanation.signed else ""
    ends = (name(explanation.units.names[place]) for place in (0, len(explanation) // 2, -1))
    return tag(
        "figure",
        tag("div", *made, class_=f"ch-time{signed}", role="img", aria_label="The score of each moment"),
        tag("figcaption", *(tag("span", end) for end in ends)),
        class_="ch-frames",
    )
