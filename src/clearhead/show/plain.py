"""A document without the renderer: words and figures as plain HTML, for readers and viewers that run no script."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clearhead.show import wording
from clearhead.show.documents import Document
from clearhead.show.markup import Markup, Part, joined, tag


def plain_form(given: Document) -> Markup:
    """Headings, sentences, and tables of scores; nothing is drawn."""
    return _FORMS[given["view"]](given)


def _page(given: Document) -> Markup:
    head = joined(tag("p", given["eyebrow"], class_="ch-eyebrow"), tag("h1", given["title"]))
    foot = tag("p", given["foot"], class_="ch-foot") if given["foot"] else None
    return joined(head, *(plain_form(part) for part in given["parts"]), foot)


def _input(given: Document) -> Markup:
    said = [tag("p", line) for line in given["explained"]]
    notes = [tag("p", note, class_="ch-warn") for note in given["notes"]]
    labels = [[row["label"], row["said"]] for row in given["prediction"]["rows"]]
    cards = [part for card in given["cards"] for part in _card(given, card)]
    return tag("section", tag("h2", given["heading"]), *said, *notes, _table("Prediction", labels), *cards)


def _card(given: Document, card: Document) -> Iterable[Part]:
    yield tag("h3", card["title"])
    for stream in given["streams"]:
        form = card["explanation"]
        scores = form.get("parts", {}).get(stream["stream"], form)["scores"]
        rows = [[label, wording.number(score, 4)] for label, score in zip(stream["labels"], scores, strict=True)]
        yield _table(f"Scores of {stream['stream']}", rows)
    for code in card["recipe"]:
        yield tag("pre", tag("code", code))


def _attention(given: Document) -> Markup:
    rows = [
        [f"layer {layer}, head {head}", pattern] for layer, own in _numbered(given["patterns"]) for head, pattern in own
    ]
    about = tag("p", f"{given['model']} says {given['prediction']}. {given['says']}")
    return tag("section", tag("h2", given["heading"]), about, _table("What each head looks at", rows))


def _numbered(patterns: Sequence[Sequence[str]]) -> Iterable[tuple[int, Iterable[tuple[int, str]]]]:
    return ((layer, enumerate(own)) for layer, own in enumerate(patterns))


def _aggregate(given: Document) -> Markup:
    rows = [[what, f"{wording.number(score, 4)} ({count})"] for what, score, count in given["rows"]]
    return tag("section", _table(f"{given['heading']}, and how often", rows))


def _probe(given: Document) -> Markup:
    rows = [[row["name"], *_figures(row)] for row in given["figures"]]
    return tag(
        "section", tag("h2", given["heading"]), _table("Means with 95 % intervals", rows), tag("p", given["says"])
    )


def _curves(given: Document) -> Markup:
    lines = given["lines"]
    heads = ["", *(line["name"] for line in lines)]
    points = [[at, *(line["y"][place] for line in lines)] for place, at in enumerate(lines[0]["x"])]
    return _table(given.get("title", ""), [heads, *([wording.number(value, 3) for value in row] for row in points)])


def _intervals(given: Document) -> Markup:
    return _table(given["caption"], [[row["name"], *_figures(row)] for row in given["rows"]])


def _figures(row: Document) -> list[str]:
    return [*(wording.number(row[key], 3) for key in ("mean", "low", "high")), row.get("meaning", "")]


def _section(given: Document) -> Markup:
    note = tag("p", given["note"]) if given.get("note") else None
    parts = (plain_form(part) for part in (*given["parts"], *given["more"]))
    return tag("section", tag("h2", given["heading"]), note, *parts)


def _panel(given: Document) -> Markup:
    return joined(tag("h3", given["title"]), *(plain_form(part) for part in given["parts"]))


def _ranking(given: Document) -> Markup:
    rows = [[row["name"], *("–" if cell is None else _ranked(cell) for cell in row["cells"])] for row in given["rows"]]
    return _table(given["title"], [["method", *given["columns"]], *rows])


def _ranked(cell: Document) -> str:
    mean, low, high = cell["said"]
    return f"{mean} [{low}, {high}], rank {cell['rank']}"


def _table(caption: str, rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup()
    made = [
        tag("tr", tag("th", tag("bdi", first), scope="row"), *(tag("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    return tag("table", tag("caption", caption), tag("tbody", *made))


_FORMS: dict[str, Callable[[dict[str, Any]], Markup]] = {
    "page": _page,
    "input": _input,
    "attention": _attention,
    "aggregate": _aggregate,
    "probe": _probe,
    "curves": _curves,
    "intervals": _intervals,
    "table": lambda given: _table(given.get("title", ""), [given["heads"], *given["rows"]]),
    "section": _section,
    "panel": _panel,
    "ranking": _ranking,
}
