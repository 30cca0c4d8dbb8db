"""The pieces of a page: one explanation's text or picture, its bars, tables, certificate and recipe, as HTML."""

from collections.abc import Iterable, Sequence

import numpy as np

from clearhead.comparison import Comparison
from clearhead.explanation import Explanation
from clearhead.show import pictures, recipe, wording
from clearhead.show.colours import LEVELS, NO_SCORE, largest, levels
from clearhead.show.layout import Piece, lines, name
from clearhead.show.markup import Markup, Part, joined, tag

#: The level of every bar: its length says how much, its colour only the sign.
BAR = LEVELS * 3 // 4


def card(explanation: Explanation, title: str | None = None) -> Markup:
    """One method's answer, from the coloured input down to how to get it again."""
    return tag(
        "article",
        tag("h3", title or explanation.method),
        _note(wording.method_line(explanation)),
        views(explanation) if explanation.units.grid is not None else text(explanation),
        legend(explanation),
        scores(explanation, wording.strongest(explanation, 6), "Strongest units"),
        tag("div", *_folded(explanation), class_="ch-more"),
        class_="ch-card",
    )


def _folded(explanation: Explanation) -> Iterable[Markup]:
    count = len(explanation)
    every = scores(explanation, range(count), "Raw scores in the order of the input")
    yield _details("The one score" if count == 1 else f"All {count} scores", every)
    if explanation.per_layer is not None and len(explanation.per_layer) > 1 and explanation.per_layer.size < 50_000:
        yield _details("Layer by layer", layers(explanation))
    yield _details("Certificate", facts(wording.certificate_rows(explanation)))
    yield _details("Get it again", recipes(explanation))


def _details(summary: str, *children: Part) -> Markup:
    return tag("details", tag("summary", summary), *children)


def _note(words: str) -> Markup:
    return tag("p", words, class_="ch-note") if words else Markup()


def level_class(level: int) -> str:
    return "chn" if level == NO_SCORE else f"ch{level}"


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


def legend(explanation: Explanation) -> Markup:
    """What the colours stand for."""
    full = wording.number(largest(explanation), 3)
    start = -LEVELS if explanation.signed else 0
    ramp = tag("span", *(tag("i", class_=level_class(i)) for i in range(start, LEVELS + 1, 2)), class_="ch-ramp")
    low, high = (f"−{full} against", f"{full} for") if explanation.signed else ("0", full)
    special = any(explanation.units.special) and explanation.units.grid is None
    notes = ["underlined: special tokens, outside the scale"] if special else []
    notes += ["hatched: no score"] if np.isnan(explanation.scores).any() else []
    scale = tag("div", tag("span", low), ramp, tag("span", high), class_="ch-legend")
    return tag("div", scale, tag("p", "; ".join(notes), class_="ch-note") if notes else None)


def scores(explanation: Explanation, places: Iterable[int], caption: str) -> Markup:
    """Units as bars, their raw scores as text."""
    places, full = list(places), largest(explanation)
    signed = bool((explanation.scores[places] < 0).any())
    words, rows = wording.words_of(explanation), []
    for place in places:
        value = float(explanation.scores[place])
        off = "ch-off" if explanation.units.special[place] else None
        inside = joined(" ", tag("bdi", words[place], class_="ch-in")) if place in words else None
        rows.append(
            tag(
                "tr",
                tag("th", tag("bdi", wording.unit_label(explanation, place)), inside, scope="row", class_=off),
                tag("td", bar(value / full, signed, level_class(BAR if value > 0 else -BAR))),
                tag("td", wording.aligned(value, full), title=wording.number(value, 6)),
            )
        )
    return tag("table", tag("caption", caption), tag("tbody", *rows), class_="ch-scores")


def bar(value: float, signed: bool, classes: str = "") -> Markup:
    """A bar from the zero line, to the right or to the left; nothing for no score."""
    zero, room = (50.0, 50.0) if signed else (0.0, 100.0)
    width = 0.0 if np.isnan(value) else room * min(abs(value), 1.0)
    left = zero - width if value < 0 else zero
    inner = tag("i", class_=classes or None, style=f"left:{left:.3g}%;width:{width:.3g}%") if width else Markup()
    return tag("div", inner, class_="ch-bar", style="--zero:50%" if signed else None, aria_hidden="true")


def prediction(explanation: Explanation) -> Markup:
    """The five labels with the largest probabilities (or outputs), the explained one marked."""
    said = wording.predictions(explanation)
    if not said:
        return Markup()
    explained = name(str(explanation.target.get("name")))
    rows = [
        tag(
            "tr",
            tag("th", tag("bdi", label), scope="row"),
            tag("td", bar(share, signed=False) if share is not None else ""),
            tag("td", shown),
            class_=label == explained and "ch-chosen",
        )
        for label, share, shown in said
    ]
    return tag("table", tag("caption", "Prediction"), tag("tbody", *rows), class_="ch-scores")


def layers(explanation: Explanation) -> Markup:
    """Layer × unit; for a picture, one small map per layer."""
    assert explanation.per_layer is not None
    full = largest(explanation, explanation.per_layer)
    caption = tag(
        "p", f"{wording.layer_caption(explanation)}; full colour is {wording.number(full, 3)}", class_="ch-label"
    )
    if explanation.units.grid is not None:
        return joined(caption, _small_maps(explanation, full))
    return joined(caption, _scroll(_layer_table(explanation, full), "Layer by unit"))


def _small_maps(explanation: Explanation, full: float) -> Markup:
    height, width = pictures.size(explanation, 112)
    kept = explanation.units.drop_special()
    assert explanation.per_layer is not None and explanation.units.grid is not None
    made = []
    names = wording.layer_names(explanation, len(explanation.per_layer))
    for layer, part in zip(names, explanation.per_layer, strict=True):
        address = pictures.patch_address(part[kept].reshape(explanation.units.grid), full)
        image = tag("img", src=address, alt="", width=width, height=height, class_="ch-pixels")
        made.append(tag("figure", image, tag("figcaption", f"layer {layer}")))
    return tag("div", *made, class_="ch-small")


def _layer_table(explanation: Explanation, full: float) -> Markup:
    assert explanation.per_layer is not None
    steps = levels(explanation.per_layer, full)
    heads = (tag("th", tag("span", wording.unit_label(explanation, i)), scope="col") for i in range(len(explanation)))
    rows = [
        tag(
            "tr",
            tag("th", layer, scope="row"),
            *(
                tag("td", class_=level_class(int(step)), title=wording.number(float(value), 3))
                for step, value in zip(steps[i], explanation.per_layer[i], strict=True)
            ),
        )
        for i, layer in enumerate(wording.layer_names(explanation, len(explanation.per_layer)))
    ]
    head = tag("thead", tag("tr", tag("th", "layer", scope="col"), *heads))
    return tag("table", head, tag("tbody", *rows), class_="ch-map")


def _scroll(table: Markup, label: str) -> Markup:
    return tag("div", table, class_="ch-scroll", tabindex=0, role="region", aria_label=label)


def facts(rows: Sequence[tuple[str, str]]) -> Markup:
    made = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in rows]
    return tag("table", tag("tbody", *made), class_="ch-facts")


def recipes(explanation: Explanation) -> Markup:
    line = recipe.command(explanation)
    return joined(tag("pre", tag("code", name_lines(recipe.snippet(explanation)))), _command(line))


def _command(line: str | None) -> Part:
    return tag("pre", tag("code", name_lines(line))) if line else None


def name_lines(code: str) -> str:
    """Code with nothing invisible in it but its line breaks."""
    return "\n".join(name(line) for line in code.split("\n"))


def agreement(comparison: Comparison) -> Markup:
    """Kendall's tau-b between every two methods."""
    tau, methods = comparison.agreement, [name(method) for method in comparison.methods]
    steps = levels(tau, 1.0)
    rows = [
        tag(
            "tr",
            tag("th", method, scope="row"),
            *(
                tag("td", "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−"), class_=level_class(int(step)))
                for step, value in zip(steps[i], tau[i], strict=True)
            ),
        )
        for i, method in enumerate(methods)
    ]
    head = tag("thead", tag("tr", tag("th"), *(tag("th", method, scope="col") for method in methods)))
    caption = tag("h3", "How far the methods agree")
    table = _scroll(tag("table", head, tag("tbody", *rows), class_="ch-agree"), "Agreement of methods")
    note = _note("Kendall’s τ-b of the scores, special tokens left out: 1 is the same order, 0 none, −1 the opposite.")
    return tag("section", caption, table, note, class_="ch-agreement")


def picture(explanation: Explanation) -> Markup:
    """The picture as the model saw it."""
    if explanation.picture is None:
        return Markup()
    caption = tag("figcaption", "What the model saw", class_="ch-note")
    return tag("figure", _image(explanation.picture, "The picture"), caption, class_="ch-picture")


def _image(picture: pictures.Pixels, alt: str) -> Markup:
    height, width = pictures.fitted(*picture.shape[:2])
    address = pictures.picture_address(picture, height, width)
    classes = "ch-pixels" if pictures.is_small(picture) else None
    return tag("img", src=address, alt=alt, width=width, height=height, class_=classes)


def views(explanation: Explanation) -> Markup:
    """The heat map over the grey picture with a slider, and the patches as they are."""
    height, width = pictures.size(explanation)
    below = _image(pictures.grey(explanation.picture), "") if explanation.picture is not None else None
    most = wording.strongest(explanation, 1)
    said = f"Heat map; strongest patch: {wording.hover(explanation, most[0])}" if most else "Heat map"
    address = pictures.heat_address(explanation, height, width)
    heat = tag("img", src=address, alt=said, width=width, height=height, class_="ch-heat")
    frame = None if explanation.picture is not None else f"aspect-ratio:{width}/{height}"
    slider = tag(
        "input", type="range", min=0, max=100, value=85, class_="ch-opacity", aria_label="Opacity of the heat map"
    )
    stack = tag("div", below, heat, class_="ch-stack", style=frame)
    smooth = tag("figure", stack, tag("figcaption", "Heat map ", slider))
    return tag("div", smooth, _patches(explanation, height, width), class_="ch-views")


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
