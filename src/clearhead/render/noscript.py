"""A document without the renderer: words and figures as plain HTML, for readers and viewers that run no script."""

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from clearhead.render import text_labels
from clearhead.render.markup import Markup, MarkupChild, join_markup, make_element
from clearhead.render.view_model import ViewModel


def render_static_html(view: ViewModel) -> Markup:
    """Headings, sentences, and tables of scores; nothing is drawn."""
    return _RENDERERS[view["view"]](view)


def _render_page(given: ViewModel) -> Markup:
    head = join_markup(make_element("p", given["eyebrow"], class_="ch-eyebrow"), make_element("h1", given["title"]))
    foot = make_element("p", given["footer"], class_="ch-footer") if given["footer"] else None
    return join_markup(head, *(render_static_html(part) for part in given["children"]), foot)


def _render_input(given: ViewModel) -> Markup:
    said = [make_element("p", line) for line in given["target_descriptions"]]
    notes = [make_element("p", note, class_="ch-warning") for note in given["notes"]]
    labels = [[row["label"], row["text"]] for row in given["prediction"]["rows"]]
    cards = [part for card in given["cards"] for part in _iter_method_card(given, card)]
    disagreements = _render_warnings(given["disagreements"])
    return make_element(
        "section",
        make_element("h2", given["heading"]),
        *said,
        *notes,
        _render_table("Prediction", labels),
        *cards,
        *disagreements,
    )


def _render_warnings(warnings: Sequence[str]) -> list[Markup]:
    return [make_element("p", f"Warning: {warning}", class_="ch-caution") for warning in warnings]


def _iter_method_card(input_view: ViewModel, card: ViewModel) -> Iterable[MarkupChild]:
    """Yield a method's heading, one table of scores for each stream, and the code that reproduces them."""
    yield make_element("h3", card["title"])
    if card["guidance"]:
        yield make_element("p", card["guidance"])
    yield from _render_warnings(card["warnings"])
    for stream in input_view["streams"]:
        form = card["explanation"]
        scores = form.get("by_stream", {}).get(stream["stream"], form)["scores"]
        rows = [
            [label, text_labels.format_number(score, 4)] for label, score in zip(stream["labels"], scores, strict=True)
        ]
        yield _render_table(f"Scores of {stream['stream']}", rows)
    for code in card["code_snippets"]:
        yield make_element("pre", make_element("code", code))


def _render_attention(given: ViewModel) -> Markup:
    rows = [
        [f"layer {layer}, head {head}", pattern]
        for layer, own in _enumerate_heads(given["patterns"])
        for head, pattern in own
    ]
    about = make_element("p", f"{given['model']} says {given['prediction']}. {given['conclusion']}")
    return make_element(
        "section", make_element("h2", given["heading"]), about, _render_table("Attention pattern of each head", rows)
    )


def _render_streams(given: ViewModel) -> Markup:
    parts = [join_markup(make_element("h3", own["name"]), render_static_html(own)) for own in given["maps"]]
    return make_element("section", make_element("h2", given["heading"]), *parts)


def _enumerate_heads(patterns: Sequence[Sequence[str]]) -> Iterable[tuple[int, Iterable[tuple[int, str]]]]:
    return ((layer, enumerate(own)) for layer, own in enumerate(patterns))


def _render_aggregate(given: ViewModel) -> Markup:
    rows = [[what, f"{text_labels.format_number(score, 4)} ({count})"] for what, score, count in given["rows"]]
    return make_element("section", _render_table(f"{given['heading']}, with counts", rows))


def _render_probe(given: ViewModel) -> Markup:
    rows = [[row["name"], *_format_estimate_cells(row)] for row in given["estimates"]]
    told = (
        _render_table("Means with 95 % intervals", rows),
        *map(render_static_html, given["charts"]),
        make_element("p", given["conclusion"]),
    )
    return make_element("section", make_element("h2", given["heading"]), *told)


def _render_line_chart(given: ViewModel) -> Markup:
    lines = given["lines"]
    heads = ["", *(line["name"] for line in lines)]
    known = [dict(zip(line["x"], line["y"], strict=True)) for line in lines]
    points = [[at, *(own.get(at) for own in known)] for at in sorted({at for line in lines for at in line["x"]})]
    return _render_table(
        given.get("title", ""), [heads, *([_format_short_number(value) for value in row] for row in points)]
    )


def _render_bar_chart(given: ViewModel) -> Markup:
    heads = ["", *(one["name"] or given["y_label"] for one in given["series"])]
    rows = [
        [group, *(_format_bar(one["cells"][at]) for one in given["series"])] for at, group in enumerate(given["groups"])
    ]
    return _render_table(given["title"], [heads, *rows])


def _format_bar(cell: ViewModel | None) -> str:
    if cell is None:
        return "–"
    ends = (
        ""
        if cell.get("low") is None
        else f" [{_format_short_number(cell['low'])}, {_format_short_number(cell['high'])}]"
    )
    count = f", n = {cell['count']}" if "count" in cell else ""
    return str(cell.get("text") or f"{_format_short_number(cell['value'])}{ends}{count} {cell.get('mark', '')}".strip())


def _render_box_chart(given: ViewModel) -> Markup:
    heads = ["median [quartiles]", *(one["name"] for one in given["series"])]
    rows = [
        [group, *(_format_box(one["cells"][at]) for one in given["series"])] for at, group in enumerate(given["groups"])
    ]
    return _render_table(given["title"], [heads, *rows])


def _format_box(cell: ViewModel | None) -> str:
    if cell is None:
        return "–"
    return (
        f"{_format_short_number(cell['median'])} [{_format_short_number(cell['q1'])}, "
        f"{_format_short_number(cell['q3'])}]"
    )


def _render_scatter_chart(given: ViewModel) -> Markup:
    shown = [*([given["mean_curve"]] if given.get("mean_curve") else []), *given["series"]]
    rows = [
        [
            one.get("point_names", [one["name"]] * len(one["x"]))[i],
            _format_short_number(x),
            _format_short_number(one["y"][i]),
        ]
        for one in shown
        for i, x in enumerate(one["x"])
    ]
    return _render_table(given["title"], [["", given["x_label"], given["y_label"]], *rows])


def _render_heat_map_chart(given: ViewModel) -> Markup:
    words = given.get("texts") or _format_map_values(given["values"])
    rows = [[row, *own] for row, own in zip(given["rows"], words, strict=True)]
    return _render_table(given["title"], [["", *given["columns"]], *rows])


def _format_map_values(values: ViewModel) -> list[list[str]]:
    """The cells of a small map; large ones are left to the renderer and to the file."""
    if values["dtype"] != "f4":
        return [[] for _ in range(values["shape"][0])]
    table = np.frombuffer(b64decode(values["data"]), dtype="<f4").reshape(values["shape"])
    return [[text_labels.format_number(float(value), 3) for value in row] for row in table]


def _render_overlays(given: ViewModel) -> Markup:
    return join_markup(*(make_element("p", one["name"]) for one in given["maps"]))


def _format_short_number(value: float | None) -> str:
    return "–" if value is None else text_labels.format_number(value, 3)


def _render_intervals(given: ViewModel) -> Markup:
    return _render_table(given["caption"], [[row["name"], *_format_estimate_cells(row)] for row in given["rows"]])


def _format_estimate_cells(row: ViewModel) -> list[str]:
    numbers = [_format_short_number(row[key]) for key in ("mean", "low", "high")]
    return [*numbers, f"n = {row['count']}", row.get("description", "")]


def _render_section(given: ViewModel) -> Markup:
    note = make_element("p", given["note"]) if given.get("note") else None
    parts = (render_static_html(part) for part in (*given["children"], *given["collapsed_children"]))
    return make_element("section", make_element("h2", given["heading"]), note, *parts)


def _render_panel(given: ViewModel) -> Markup:
    head = make_element("h3", given["title"]) if given.get("title") else None
    note = make_element("p", given["note"]) if given.get("note") else None
    return join_markup(head, note, *(render_static_html(part) for part in given["children"]))


def _render_ranking(given: ViewModel) -> Markup:
    rows = [
        [row["name"], *("–" if cell is None else _format_ranked_cell(cell) for cell in row["cells"])]
        for row in given["rows"]
    ]
    return _render_table(given["title"], [["method", *given["columns"]], *rows])


def _format_ranked_cell(cell: ViewModel) -> str:
    mean, *ends = cell["texts"]
    spread = f" [{', '.join(ends)}]" if ends else ""
    count = f" ({cell['count']})" if "count" in cell else ""
    return f"{mean}{spread}{count}, rank {cell['rank']}"


def _render_table(caption: str, rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup()
    made = [
        make_element(
            "tr",
            make_element("th", make_element("bdi", first), scope="row"),
            *(make_element("td", cell) for cell in rest),
        )
        for first, *rest in rows
    ]
    return make_element("table", make_element("caption", caption), make_element("tbody", *made))


_RENDERERS: dict[str, Callable[[dict[str, Any]], Markup]] = {
    "page": _render_page,
    "input": _render_input,
    "attention": _render_attention,
    "multi_stream_attention": _render_streams,
    "aggregate": _render_aggregate,
    "probe": _render_probe,
    "line_chart": _render_line_chart,
    "bar_chart": _render_bar_chart,
    "box_chart": _render_box_chart,
    "scatter_chart": _render_scatter_chart,
    "heat_map": _render_heat_map_chart,
    "image_overlays": _render_overlays,
    "intervals": _render_intervals,
    "table": lambda given: _render_table(given.get("title", ""), [given["columns"], *given["rows"]]),
    "section": _render_section,
    "panel": _render_panel,
    "ranking": _render_ranking,
}
