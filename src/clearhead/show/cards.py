"""The pieces of a page: one explanation's streams, its bars, tables, certificate and recipe, as HTML."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from clearhead.comparison import Comparison
from clearhead.explanation import Explanation
from clearhead.joint import AnyExplanation
from clearhead.show import maps, recipe, wording
from clearhead.show.colours import LEVELS, largest, levels
from clearhead.show.layout import name, shape
from clearhead.show.markup import Markup, Part, joined, tag
from clearhead.show.views import level_class, view

#: The level of every bar: its length says how much, its colour only the sign.
BAR = LEVELS * 3 // 4


def card(explanation: AnyExplanation, title: str | None = None) -> Markup:
    """One method's answer, from the coloured input down to how to get it again; streams stand side by side."""
    inputs, rest = wording.streams(explanation)
    return tag(
        "article",
        tag("h3", title or explanation.method),
        _note(wording.method_line(explanation)),
        maps.answer(explanation),
        tag("div", *(stream(part, titled=len(inputs) > 1) for part in inputs), class_="ch-streams"),
        tag("div", *_folded(explanation, [*inputs, *rest]), class_="ch-more"),
        class_="ch-card",
    )


def stream(explanation: Explanation, titled: bool) -> Markup:
    """The units of one stream where they lie, step by step, and the strongest of them."""
    count = 12 if shape(explanation) == "list" else 6
    return tag(
        "div",
        tag("h4", name(explanation.stream).capitalize()) if titled else None,
        view(explanation),
        legend(explanation),
        maps.steps(explanation),
        scores(explanation, wording.strongest(explanation, count), "Strongest units"),
        class_="ch-stream",
    )


def _folded(explanation: AnyExplanation, parts: Sequence[Explanation]) -> Iterable[Markup]:
    for part in parts:
        of = f" of {name(part.stream)}" if len(parts) > 1 else ""
        every = scores(part, range(len(part)), "Raw scores in the order of the input")
        yield _details(f"The one score{of}" if len(part) == 1 else f"All {len(part)} scores{of}", every)
        if (drawn := maps.every_row(part)) is not None:
            yield _details(f"Row by row{of}", drawn)
        if (drawn := maps.layers(part)) is not None:
            yield _details(f"Layer by layer{of}", drawn)
    yield _details("Certificate", facts(wording.certificate_rows(explanation)))
    yield _details("Get it again", recipes(explanation))


def _details(summary: str, *children: Part) -> Markup:
    return tag("details", tag("summary", summary), *children)


def _note(words: str) -> Markup:
    return tag("p", words, class_="ch-note") if words else Markup()


def legend(explanation: Explanation) -> Markup:
    """What the colours stand for: of the scores and, while one step is chosen, of the steps."""
    start = -LEVELS if explanation.signed else 0
    ramp = tag("span", *(tag("i", class_=level_class(i)) for i in range(start, LEVELS + 1, 2)), class_="ch-ramp")
    ends = [_ends(explanation, largest(explanation))]
    if explanation.steps is not None and explanation.matrix is not None:
        ends.append(_ends(explanation, largest(explanation, explanation.matrix)))
    low, high = (joined(*(_end(i, side) for i, side in enumerate(sides))) for sides in zip(*ends, strict=True))
    special = any(explanation.units.special) and shape(explanation) == "text"
    notes = ["underlined: special tokens, outside the scale"] if special else []
    notes += ["hatched: no score"] if np.isnan(explanation.scores).any() else []
    scale = tag("div", tag("span", low), ramp, tag("span", high), class_="ch-legend")
    return tag("div", scale, tag("p", "; ".join(notes), class_="ch-note") if notes else None)


def _ends(explanation: Explanation, full: float) -> tuple[str, str]:
    shown = wording.number(full, 3)
    return (f"−{shown} against", f"{shown} for") if explanation.signed else ("0", shown)


def _end(which: int, text: str) -> Part:
    return tag("b", text, class_="ch-of-step") if which else tag("b", text, class_="ch-of-all")


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


def prediction(explanation: AnyExplanation) -> Markup:
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
    caption = "Prediction" if explanation.prediction else "Found"
    return tag("table", tag("caption", caption), tag("tbody", *rows), class_="ch-scores")


def facts(rows: Sequence[tuple[str, str]]) -> Markup:
    made = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in rows]
    return tag("table", tag("tbody", *made), class_="ch-facts")


def recipes(explanation: AnyExplanation) -> Markup:
    line = recipe.command(explanation)
    return joined(tag("pre", tag("code", name_lines(recipe.snippet(explanation)))), _command(line))


def _command(line: str | None) -> Part:
    return tag("pre", tag("code", name_lines(line))) if line else None


def name_lines(code: str) -> str:
    """Code with nothing invisible in it but its line breaks."""
    return "\n".join(name(line) for line in code.split("\n"))


def agreement(comparison: Comparison) -> Markup:
    """Kendall's tau-b between every two methods, stream by stream."""
    found = comparison.agreements
    tables = []
    for stream, tau in found.items():
        of = tag("p", name(stream).capitalize(), class_="ch-label") if len(found) > 1 else None
        tables.append(tag("div", of, _agreement(comparison.methods, tau)))
    note = _note("Kendall’s τ-b of the scores, special tokens left out: 1 is the same order, 0 none, −1 the opposite.")
    title = tag("h3", "How far the methods agree")
    return tag("section", title, tag("div", *tables, class_="ch-streams"), note, class_="ch-agreement")


def _agreement(given: Sequence[str], tau: Float[np.ndarray, "method method"]) -> Markup:
    methods, steps = [name(method) for method in given], levels(tau, 1.0)
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
    table = tag("table", head, tag("tbody", *rows), class_="ch-agree")
    return tag("div", table, class_="ch-scroll", tabindex=0, role="region", aria_label="Agreement of methods")
