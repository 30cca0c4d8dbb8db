"""Explanations in a terminal: coloured text, bars, pictures in half blocks; without colours, the words say it all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.aggregation import Aggregate
from clearhead.comparison import Comparison
from clearhead.explanation import Explanation
from clearhead.show import pictures, wording
from clearhead.show.colours import DARK, LEVELS, NO_SCORE, Rgb, hexed, ink, largest, levels, of_level, painted
from clearhead.show.layout import Piece, lines, name

# Whether a terminal is dark cannot be asked, so coloured text brings its own dark paper and is the same on both.
PAPER = of_level(0, DARK)
_PLAIN = f"#d6d4cf on {hexed(PAPER)}"
_MUTED = f"#8d9098 on {hexed(PAPER)}"
_FOR, _AGAINST = (hexed(of_level(sign * LEVELS * 3 // 4, DARK)) for sign in (1, -1))
_WARN = "bold black on #f5a26f"
#: How many cells wide a picture is.
WIDTH = 36


def render(explanation: Explanation) -> RenderableType:
    """One explanation: target, coloured input, strongest units, prediction, certificate."""
    return Group(
        *_opening(explanation),
        "",
        _views(explanation) if explanation.units.grid is not None else _paper(text(explanation)),
        _legend(explanation),
        "",
        _beside(_strongest(explanation), _predictions(explanation)),
        "",
        Text(wording.certificate_line(explanation), style="dim"),
    )


def render_comparison(comparison: Comparison) -> RenderableType:
    """Methods under one another on the same text, or beside one another on the same picture, and their agreement."""
    first = next(iter(comparison.explanations.values()))
    named = {name(method): explanation for method, explanation in comparison.explanations.items()}
    if first.units.grid is not None:
        shown: RenderableType = Columns([_heat(e, method) for method, e in named.items()], padding=(0, 2))
    else:
        shown = Table.grid(padding=(0, 2, 0, 0))
        for number, (method, explanation) in enumerate(named.items()):
            if number:
                shown.add_row()
            top = ", ".join(f"{name(what)} {wording.number(score, 2)}" for what, score in explanation.top(3))
            shown.add_row(Text(method, style="bold"), _paper(text(explanation), (0, 1)))
            shown.add_row("", Text(f"highest: {top}", style="dim"))
    return Group(
        *_opening(first, method=False),
        "",
        shown,
        "",
        _beside(_agreement(comparison), _predictions(first)),
        "",
        Text(wording.certificate_line(first), style="dim"),
    )


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


def _opening(explanation: Explanation, method: bool = True) -> Iterable[Text]:
    said = Text(wording.heading(explanation), style="bold")
    said.append(f"  {wording.target_line(explanation)}", style="not bold")
    said.append(f"  by {name(explanation.method)}" if method else "", style="dim not bold")
    yield said
    if cut := wording.truncation(explanation):
        yield Text(f" {cut} ", style=_WARN)


def _legend(explanation: Explanation) -> Text:
    full = wording.number(largest(explanation), 3)
    start = -LEVELS if explanation.signed else 0
    made = Text(f"−{full} " if explanation.signed else "0 ", style="dim")
    for level in range(start, LEVELS + 1, 4):
        made.append("  ", style=Style(bgcolor=hexed(of_level(level, DARK))))
    return made.append(f" {full}", style="dim")


def _beside(*parts: RenderableType | None) -> Columns:
    return Columns([part for part in parts if part is not None], padding=(0, 6))


def _strongest(explanation: Explanation) -> Table:
    words = wording.words_of(explanation)
    rows = [
        (wording.unit_label(explanation, place), words.get(place, ""), float(explanation.scores[place]))
        for place in wording.strongest(explanation, 6)
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
        table.add_row(named, _bar(score / full, signed), Text(wording.aligned(score, full), justify="right"))
    return table


def _bar(value: float, signed: bool, width: int = 16, style: str | None = None) -> Text:
    """A line from the zero, half a cell being the smallest step."""
    room = width // 2 if signed else width
    share = 0.0 if np.isnan(value) else min(abs(value), 1.0)
    whole, half = divmod(max(round(share * room * 2), 1 if share else 0), 2)
    if value < 0:
        return Text(("╺" * half + "━" * whole).rjust(room) + " " * room, style=style or _AGAINST)
    return Text((" " * room if signed else "") + ("━" * whole + "╸" * half).ljust(room), style=style or _FOR)


def _predictions(explanation: Explanation) -> Table | None:
    said = wording.predictions(explanation)
    if not said:
        return None
    explained = name(str(explanation.target.get("name")))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = "Prediction", "left", "bold"
    for label, share, shown in said:
        style = "bold" if label == explained else ""
        drawn = _bar(share, signed=False, width=12, style="grey62") if share is not None else Text()
        table.add_row(Text(label, style=style), drawn, Text(shown, style=style, justify="right"))
    return table


def _agreement(comparison: Comparison) -> Table:
    table = Table(title="Agreement, Kendall’s τ-b", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column()
    methods = [name(method) for method in comparison.methods]
    for method in methods:
        table.add_column(Text(method), justify="center")
    tau = comparison.agreement
    steps = levels(tau, 1.0)
    for i, method in enumerate(methods):
        cells = [
            Text("–" if np.isnan(value) else f" {value:.2f} ".replace("-", "−"), style=_on(of_level(int(step), DARK)))
            for value, step in zip(tau[i], steps[i], strict=True)
        ]
        table.add_row(Text(method), *cells)
    return table


def _views(explanation: Explanation) -> RenderableType:
    """The picture beside its heat map."""
    if explanation.picture is None:
        return _heat(explanation, "heat map")
    height, width = pictures.size(explanation, WIDTH)
    picture = Blocks(pictures.resized(explanation.picture, height, width), "picture")
    return Columns([picture, _heat(explanation, "heat map")], padding=(0, 3))


def _heat(explanation: Explanation, caption: str) -> "Blocks":
    height, width = pictures.size(explanation, WIDTH)
    if explanation.picture is not None:
        pixels = pictures.overlaid(explanation, height, width, opacity=0.95)
    else:
        pixels = painted(pictures.upsampled(explanation.heat_map(), height, width), largest(explanation))
    return Blocks(pixels, caption, _shades(explanation))


def _shades(explanation: Explanation) -> list[str]:
    """The patches in five signs, for a terminal that has no colours."""
    strengths = np.nan_to_num(np.abs(levels(explanation.heat_map(), largest(explanation)))) / LEVELS
    return ["".join(" ·░▒▓█"[min(5, int(np.ceil(cell * 5)))] * 2 for cell in row) for row in strengths]


@dataclass(frozen=True)
class Blocks:
    """Pixels as half blocks, two rows of them in each line; signs where there are no colours."""

    pixels: np.ndarray
    caption: str
    plain: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.color_system is None:
            yield from (Text(line) for line in (*self.plain, *([self.caption] if self.plain else [])))
            return
        even = self.pixels if len(self.pixels) % 2 == 0 else np.vstack([self.pixels, self.pixels[-1:]])
        for top, bottom in zip(even[::2], even[1::2], strict=True):
            for above, below in zip(top, bottom, strict=True):
                yield Segment("▀", Style(color=_colour(above), bgcolor=_colour(below)))
            yield Segment.line()
        yield Text(self.caption, style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lines = [*self.plain, self.caption if self.plain else ""]
        width = max(map(cell_len, lines)) if console.color_system is None else self.pixels.shape[1]
        return Measurement(width, width)


def _colour(pixel: np.ndarray) -> Color:
    return Color.from_rgb(*(int(part) for part in pixel))
