"""Explanations in a terminal: coloured text, bars, pictures in half blocks; without colours, the words say it all."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.explanation.aggregation import Aggregate
from clearhead.explanation.comparison import Comparison
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.images import upsample
from clearhead.render import images, text_labels
from clearhead.render.colours import DARK, LEVELS, NO_SCORE, Rgb, hexed, ink, largest, levels, of_level, painted
from clearhead.render.terminal_widgets import AGAINST, FOR, PAPER, STEPS, Blocks, Matrix, Moments, shade
from clearhead.render.text_layout import Piece, lines, name, shape

_PLAIN = f"#d6d4cf on {hexed(PAPER)}"
_MUTED = f"#8d9098 on {hexed(PAPER)}"
_WARN = "bold black on #f5a26f"
_FRAME: Rgb = (255, 255, 255)
#: How many cells wide a picture is, and one of several.
WIDTH, SMALL = 36, 24


def render(explanation: AnyExplanation) -> RenderableType:
    """One explanation: target, coloured input, strongest units, prediction, certificate; streams one after another."""
    inputs, _ = text_labels.streams(explanation)
    made: list[RenderableType] = [*_opening(explanation)]
    for part in inputs:
        made += ["", *([Text(name(part.stream), style="bold underline")] if len(inputs) > 1 else [])]
        made += [*_stream(part), ""]
        last = part is inputs[-1]
        made.append(_beside(_strongest(part), _predictions(explanation) if last else None))
    return Group(*made, "", Text(text_labels.certificate_line(explanation), style="dim"))


def _stream(explanation: Explanation) -> Iterator[RenderableType]:
    """The units of one stream where they lie, and step by step."""
    match shape(explanation):
        case "grid" | "boxes":
            yield _views(explanation)
        case "time":
            yield Moments(explanation)
        case "text":
            yield _paper(text(explanation))
    yield _legend(explanation)
    if explanation.steps is not None and explanation.matrix is not None:
        full = text_labels.number(largest(explanation, explanation.matrix), 3)
        yield Text(f"\nStep by step; full colour is {full}", style="bold")
        yield _step_maps(explanation) if shape(explanation) == "grid" else Matrix(explanation)


def render_comparison(comparison: Comparison) -> RenderableType:
    """Methods under one another on the same text, or beside one another on the same picture, and their agreement."""
    first = next(iter(comparison.explanations.values()))
    named = {name(method): explanation for method, explanation in comparison.explanations.items()}
    made: list[RenderableType] = [*_opening(first, method=False)]
    agreements = comparison.agreements
    for stream, tau in agreements.items():
        made += ["", *([Text(name(stream), style="bold underline")] if len(agreements) > 1 else [])]
        made += [_side_by_side({method: e[stream] for method, e in named.items()}), ""]
        last = stream == list(agreements)[-1]
        made.append(_beside(_agreement(list(named), tau), _predictions(first) if last else None))
    return Group(*made, "", Text(text_labels.certificate_line(first), style="dim"))


def _side_by_side(named: dict[str, Explanation]) -> RenderableType:
    """The same stream by several methods."""
    if shape(next(iter(named.values()))) in ("grid", "boxes"):
        return Columns([_heat(explanation, method) for method, explanation in named.items()], padding=(0, 2))
    shown = Table.grid(padding=(0, 2, 0, 0))
    for number, (method, explanation) in enumerate(named.items()):
        if number:
            shown.add_row()
        top = ", ".join(f"{name(what)} {text_labels.number(score, 2)}" for what, score in explanation.top(3))
        drawn = Moments(explanation) if shape(explanation) == "time" else _paper(text(explanation), (0, 1))
        shown.add_row(Text(method, style="bold"), drawn)
        shown.add_row("", Text(f"highest: {top}", style="dim"))
    return shown


def render_aggregate(aggregate: Aggregate, count: int = 20) -> RenderableType:
    """The rows with the largest |score| as bars, with how often each came."""
    chosen = sorted(aggregate.rows, key=lambda row: -abs(row[1]))[:count]
    chosen.sort(key=lambda row: -row[1])
    full = max((abs(score) for _, score, _ in chosen), default=0) or 1.0
    rows = [(name(what), f"×\u2009{times}", score) for what, score, times in chosen]
    return _bars(rows, full, f"{aggregate.how.capitalize()} of scores by {aggregate.by}")


def text(explanation: Explanation) -> Text:
    """The text as it was written, each unit on its colour."""
    steps = levels(explanation.scores, largest(explanation))
    made = Text(style=_PLAIN)
    for number, line in enumerate(lines(explanation.units)):
        made.append("\n" if number else "")
        for piece in line:
            made.append_text(_piece(piece, steps))
    return made if made.plain[:1] != " " or not explanation.units.special[0] else made[1:]


def _piece(piece: Piece, steps: np.ndarray) -> Text:
    if piece.unit is None:
        return Text(piece.text, style=f"strike {_MUTED}" if piece.unseen else "")
    if piece.special:
        return Text(f" {piece.text} ", style=_MUTED)
    level = int(steps[piece.unit])
    # What shares all its characters with the unit before it has none to colour.
    return Text("" if piece.hidden else piece.text, style=_on(of_level(level, DARK), italic=level == NO_SCORE))


def _on(background: Rgb, italic: bool = False) -> Style:
    front = (0xD6, 0xD4, 0xCF) if background == PAPER else ink(background)
    return Style(color=hexed(front), bgcolor=hexed(background), italic=italic or None)


def _paper(content: Text, padding: tuple[int, int] = (1, 2)) -> Padding:
    return Padding(content, padding, style=f"on {hexed(PAPER)}")


def _opening(explanation: AnyExplanation, method: bool = True) -> Iterable[Text]:
    said = Text(text_labels.heading(explanation), style="bold")
    said.append(f"  {text_labels.target_line(explanation)}", style="not bold")
    said.append(f"  by {name(explanation.method)}" if method else "", style="dim not bold")
    yield said
    for note in text_labels.notes(explanation):
        yield Text(f" {note} ", style=_WARN)


def _legend(explanation: Explanation) -> Text:
    full = text_labels.number(largest(explanation), 3)
    start = -LEVELS if explanation.signed else 0
    made = Text(f"−{full} " if explanation.signed else "0 ", style="dim")
    for level in range(start, LEVELS + 1, 4):
        made.append("  ", style=Style(bgcolor=hexed(of_level(level, DARK))))
    return made.append(f" {full}", style="dim")


def _beside(*parts: RenderableType | None) -> Columns:
    return Columns([part for part in parts if part is not None], padding=(0, 6))


def _strongest(explanation: Explanation) -> Table:
    words = text_labels.words_of(explanation)
    rows = [
        (text_labels.unit_label(explanation, place), words.get(place, ""), float(explanation.scores[place]))
        for place in text_labels.strongest(explanation, 6)
    ]
    return _bars(rows, largest(explanation), "Strongest units")


def _bars(rows: Sequence[tuple[str, str, float]], full: float, title: str) -> Table:
    """Names, bars from a common zero line, and the figures."""
    signed = any(score < 0 for *_, score in rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for label, context, score in rows:
        named = Text(label).append(f" {context}" if context else "", style="dim")
        named.truncate(28, overflow="ellipsis")
        table.add_row(named, _bar(score / full, signed), Text(text_labels.aligned(score, full), justify="right"))
    return table


def _bar(value: float, signed: bool, width: int = 16, style: str | None = None) -> Text:
    """A line from the zero, half a cell being the smallest step."""
    room = width // 2 if signed else width
    share = 0.0 if np.isnan(value) else min(abs(value), 1.0)
    whole, half = divmod(max(round(share * room * 2), 1 if share else 0), 2)
    if value < 0:
        return Text(("╺" * half + "━" * whole).rjust(room) + " " * room, style=style or AGAINST)
    return Text((" " * room if signed else "") + ("━" * whole + "╸" * half).ljust(room), style=style or FOR)


def _predictions(explanation: AnyExplanation) -> Table | None:
    said = text_labels.predictions(explanation)
    if not said:
        return None
    explained = name(str(explanation.target.get("name")))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = "Prediction", "left", "bold"
    if not explanation.prediction:
        table.title = "Found"
    for label, share, shown in said:
        style = "bold" if label == explained else ""
        drawn = _bar(share, signed=False, width=12, style="grey62") if share is not None else Text()
        table.add_row(Text(label, style=style), drawn, Text(shown, style=style, justify="right"))
    return table


def _agreement(methods: Sequence[str], tau: np.ndarray) -> Table:
    table = Table(title="Agreement, Kendall’s τ-b", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column()
    for method in methods:
        table.add_column(Text(method), justify="center")
    steps = levels(tau, 1.0)
    for i, method in enumerate(methods):
        cells = [
            Text("–" if np.isnan(value) else f" {value:.2f} ".replace("-", "−"), style=_on(of_level(int(step), DARK)))
            for value, step in zip(tau[i], steps[i], strict=True)
        ]
        table.add_row(Text(method), *cells)
    return table


def _views(explanation: Explanation) -> RenderableType:
    """The picture, with what was found in it, beside its heat map."""
    caption = "heat map" if explanation.units.grid is not None else "regions"
    if explanation.picture is None:
        return _heat(explanation, caption)
    height, width = images.size(explanation, WIDTH)
    pixels = images.resized(explanation.picture, height, width)
    for _, box in text_labels.boxes(explanation).values():
        pixels = images.framed(pixels, box, _FRAME)
    return Columns([Blocks(pixels, "picture"), _heat(explanation, caption)], padding=(0, 3))


def _step_maps(explanation: Explanation) -> RenderableType:
    """One small heat map for each of the first steps, with the box of what was found."""
    assert explanation.steps is not None and explanation.matrix is not None
    made, boxes, full = [], text_labels.boxes(explanation), largest(explanation, explanation.matrix)
    for place, step in enumerate(explanation.steps[:STEPS]):
        alone = explanation.step(place)
        height, width = images.size(alone, SMALL)
        pixels = images.overlaid(alone, height, width, opacity=0.95, full=full)
        if place in boxes:
            pixels = images.framed(pixels, boxes[place][1], _FRAME)
        made.append(Blocks(pixels, text_labels.short(name(step), SMALL), _shades(alone, full)))
    maps = Columns(made, padding=(1, 2))
    rest = len(explanation.steps) - len(made)
    return Group(maps, Text(f"shown: the first {len(made)} of {rest + len(made)} steps", style="dim")) if rest else maps


def _heat(explanation: Explanation, caption: str) -> Blocks:
    height, width = images.size(explanation, WIDTH)
    if explanation.picture is not None:
        pixels = images.overlaid(explanation, height, width, opacity=0.95)
    else:
        pixels = painted(upsample(explanation.heat_map(), height, width), largest(explanation))
    return Blocks(pixels, caption, _shades(explanation))


def _shades(explanation: Explanation, full: float | None = None) -> list[str]:
    """The patches in five signs, for a terminal that has no colours."""
    if explanation.units.grid is None:
        return []
    steps = levels(explanation.heat_map(), full or largest(explanation))
    return ["".join(shade(int(step)) * 2 for step in row) for row in steps]
