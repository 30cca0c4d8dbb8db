"""A document without the renderer: words and figures as plain HTML, for readers and viewers that run no script."""

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from clearhead.render import text_labels
from clearhead.render.markup import Markup, Part, joined, tag
from clearhead.render.view_model import Document


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
        rows = [[label, text_labels.number(score, 4)] for label, score in zip(stream["labels"], scores, strict=True)]
        yield _table(f"Scores of {stream['stream']}", rows)
    for code in card["recipe"]:
        yield tag("pre", tag("code", code))


def _attention(given: Document) -> Markup:
    rows = [
        [f"layer {layer}, head {head}", pattern] for layer, own in _numbered(given["patterns"]) for head, pattern in own
    ]
    about = tag("p", f"{given['model']} says {given['prediction']}. {given['says']}")
    return tag("section", tag("h2", given["heading"]), about, _table("What each head looks at", rows))


def _streams(given: Document) -> Markup:
    parts = [joined(tag("h3", own["name"]), plain_form(own)) for own in given["maps"]]
    return tag("section", tag("h2", given["heading"]), *parts)


def _numbered(patterns: Sequence[Sequence[str]]) -> Iterable[tuple[int, Iterable[tuple[int, str]]]]:
    return ((layer, enumerate(own)) for layer, own in enumerate(patterns))


def _aggregate(given: Document) -> Markup:
    rows = [[what, f"{text_labels.number(score, 4)} ({count})"] for what, score, count in given["rows"]]
    return tag("section", _table(f"{given['heading']}, and how often", rows))


def _probe(given: Document) -> Markup:
    rows = [[row["name"], *_figures(row)] for row in given["figures"]]
    told = (_table("Means with 95 % intervals", rows), *map(plain_form, given["plots"]), tag("p", given["says"]))
    return tag("section", tag("h2", given["heading"]), *told)


def _curves(given: Document) -> Markup:
    lines = given["lines"]
    heads = ["", *(line["name"] for line in lines)]
    known = [dict(zip(line["x"], line["y"], strict=True)) for line in lines]
    points = [[at, *(own.get(at) for own in known)] for at in sorted({at for line in lines for at in line["x"]})]
    return _table(given.get("title", ""), [heads, *([_short(value) for value in row] for row in points)])


def _bars(given: Document) -> Markup:
    heads = ["", *(one["name"] or given["up"] for one in given["series"])]
    rows = [[group, *(_bar(one["cells"][at]) for one in given["series"])] for at, group in enumerate(given["groups"])]
    return _table(given["title"], [heads, *rows])


def _bar(cell: Document | None) -> str:
    if cell is None:
        return "–"
    ends = "" if cell.get("low") is None else f" [{_short(cell['low'])}, {_short(cell['high'])}]"
    return str(cell.get("said") or f"{_short(cell['value'])}{ends} {cell.get('mark', '')}".strip())


def _boxes(given: Document) -> Markup:
    heads = ["median [quartiles]", *(one["name"] for one in given["series"])]
    rows = [[group, *(_box(one["cells"][at]) for one in given["series"])] for at, group in enumerate(given["groups"])]
    return _table(given["title"], [heads, *rows])


def _box(cell: Document | None) -> str:
    if cell is None:
        return "–"
    return f"{_short(cell['median'])} [{_short(cell['first'])}, {_short(cell['third'])}]"


def _points(given: Document) -> Markup:
    shown = [*([given["means"]] if given.get("means") else []), *given["series"]]
    rows = [
        [one.get("names", [one["name"]] * len(one["x"]))[i], _short(x), _short(one["y"][i])]
        for one in shown
        for i, x in enumerate(one["x"])
    ]
    return _table(given["title"], [["", given["across"], given["up"]], *rows])


def _map(given: Document) -> Markup:
    words = given.get("words") or _numbers_in(given["values"])
    rows = [[row, *own] for row, own in zip(given["rows"], words, strict=True)]
    return _table(given["title"], [["", *given["columns"]], *rows])


def _numbers_in(values: Document) -> list[list[str]]:
    """The cells of a small map; large ones are left to the renderer and to the file."""
    if values["type"] != "f4":
        return [[] for _ in range(values["shape"][0])]
    table = np.frombuffer(b64decode(values["data"]), dtype="<f4").reshape(values["shape"])
    return [[text_labels.number(float(value), 3) for value in row] for row in table]


def _overlays(given: Document) -> Markup:
    return joined(*(tag("p", one["name"]) for one in given["maps"]))


def _short(value: float | None) -> str:
    return "–" if value is None else text_labels.number(value, 3)


def _intervals(given: Document) -> Markup:
    return _table(given["caption"], [[row["name"], *_figures(row)] for row in given["rows"]])


def _figures(row: Document) -> list[str]:
    return [*(_short(row[key]) for key in ("mean", "low", "high")), row.get("meaning", "")]


def _section(given: Document) -> Markup:
    note = tag("p", given["note"]) if given.get("note") else None
    parts = (plain_form(part) for part in (*given["parts"], *given["more"]))
    return tag("section", tag("h2", given["heading"]), note, *parts)


def _panel(given: Document) -> Markup:
    head = tag("h3", given["title"]) if given.get("title") else None
    note = tag("p", given["note"]) if given.get("note") else None
    return joined(head, note, *(plain_form(part) for part in given["parts"]))


def _ranking(given: Document) -> Markup:
    rows = [[row["name"], *("–" if cell is None else _ranked(cell) for cell in row["cells"])] for row in given["rows"]]
    return _table(given["title"], [["method", *given["columns"]], *rows])


def _ranked(cell: Document) -> str:
    mean, *ends = cell["said"]
    spread = f" [{', '.join(ends)}]" if ends else ""
    return f"{mean}{spread}, rank {cell['rank']}"


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
    "streams": _streams,
    "aggregate": _aggregate,
    "probe": _probe,
    "curves": _curves,
    "bars": _bars,
    "boxes": _boxes,
    "points": _points,
    "map": _map,
    "overlays": _overlays,
    "intervals": _intervals,
    "table": lambda given: _table(given.get("title", ""), [given["heads"], *given["rows"]]),
    "section": _section,
    "panel": _panel,
    "ranking": _ranking,
}
