"""Explanations in a terminal: coloured text, bars, pictures in half blocks; without colours, the words say it all."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.explanation.aggregation import AggregatedScores
from clearhead.explanation.comparison import Comparison
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.images import upsample_heat_map
from clearhead.render import images, text_labels
from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    DARK_THEME,
    NO_SCORE_LEVEL,
    Rgb,
    apply_colour_map,
    choose_text_colour,
    compute_colour_levels,
    compute_vmax,
    format_hex_colour,
    get_level_colour,
)
from clearhead.render.terminal_widgets import (
    BACKGROUND_COLOUR,
    MAX_SHOWN_STEPS,
    NEGATIVE_COLOUR,
    POSITIVE_COLOUR,
    AudioStrip,
    HalfBlockImage,
    TerminalHeatmap,
    get_shade_character,
)
from clearhead.render.text_layout import TextSpan, build_text_lines, escape_invisible, find_unit_layout

_TEXT_STYLE = f"#d6d4cf on {format_hex_colour(BACKGROUND_COLOUR)}"
_MUTED_STYLE = f"#8d9098 on {format_hex_colour(BACKGROUND_COLOUR)}"
_WARNING_STYLE = "bold black on #f5a26f"
_BOX_COLOUR: Rgb = (255, 255, 255)
#: How many cells wide a picture is, and one of several.
IMAGE_WIDTH_CELLS, STEP_MAP_WIDTH_CELLS = 36, 24


def render_explanation(explanation: AnyExplanation) -> RenderableType:
    """Render an explanation for the terminal: target, coloured input, largest scores, prediction and certificate.

    Args:
        explanation: The explanation; its streams come one after the other.

    Returns:
        What rich prints.
    """
    inputs, _ = text_labels.split_input_streams(explanation)
    made: list[RenderableType] = [*_iter_header_lines(explanation)]
    for part in inputs:
        made += ["", *([Text(escape_invisible(part.stream), style="bold underline")] if len(inputs) > 1 else [])]
        made += [*_render_stream(part), ""]
        last = part is inputs[-1]
        made.append(_arrange_columns(_render_top_units(part), _render_predictions(explanation) if last else None))
    return Group(*made, "", Text(text_labels.format_certificate_line(explanation), style="dim"))


def _render_stream(explanation: Explanation) -> Iterator[RenderableType]:
    """The units of one stream where they lie, and step by step."""
    match find_unit_layout(explanation):
        case "grid" | "boxes":
            yield _render_image_and_heat_map(explanation)
        case "time":
            yield AudioStrip(explanation)
        case "text":
            yield _pad_on_background(render_coloured_text(explanation))
    yield _render_legend(explanation)
    if explanation.steps is not None and explanation.matrix is not None:
        full = text_labels.format_number(compute_vmax(explanation, explanation.matrix), 3)
        yield Text(f"\nStep by step; full colour is {full}", style="bold")
        yield (
            _render_step_maps(explanation) if find_unit_layout(explanation) == "grid" else TerminalHeatmap(explanation)
        )


def render_comparison(comparison: Comparison) -> RenderableType:
    """Render a comparison for the terminal: the input as coloured by each method, their agreement, the prediction.

    Args:
        comparison: The comparison.

    Returns:
        What rich prints.
    """
    first = next(iter(comparison.explanations.values()))
    named = {escape_invisible(method): explanation for method, explanation in comparison.explanations.items()}
    made: list[RenderableType] = [*_iter_header_lines(first, method=False)]
    for method, explanation in named.items():
        made += [_render_warning(f"{method}: {warning}") for warning in text_labels.list_warnings(explanation)]
    agreements = comparison.agreements
    for stream, tau in agreements.items():
        made += ["", *([Text(escape_invisible(stream), style="bold underline")] if len(agreements) > 1 else [])]
        made += [_render_methods({method: e[stream] for method, e in named.items()}), ""]
        last = stream == list(agreements)[-1]
        made.append(_arrange_columns(_render_agreement(list(named), tau), _render_predictions(first) if last else None))
    warnings = [_render_warning(warning) for warning in text_labels.list_warnings(comparison)]
    made += ["", *warnings] if warnings else []
    return Group(*made, "", Text(text_labels.format_certificate_line(first), style="dim"))


def _render_methods(named: dict[str, Explanation]) -> RenderableType:
    """The same stream by several methods."""
    if find_unit_layout(next(iter(named.values()))) in ("grid", "boxes"):
        return Columns([_render_heat_map(explanation, method) for method, explanation in named.items()], padding=(0, 2))
    shown = Table.grid(padding=(0, 2, 0, 0))
    for number, (method, explanation) in enumerate(named.items()):
        if number:
            shown.add_row()
        top = ", ".join(
            f"{escape_invisible(what)} {text_labels.format_number(score, 2)}" for what, score in explanation.top(3)
        )
        drawn = (
            AudioStrip(explanation)
            if find_unit_layout(explanation) == "time"
            else _pad_on_background(render_coloured_text(explanation), (0, 1))
        )
        shown.add_row(Text(method, style="bold"), drawn)
        shown.add_row("", Text(f"highest: {top}", style="dim"))
    return shown


def render_aggregate(aggregate: AggregatedScores, max_rows: int = 20) -> RenderableType:
    """Render aggregated scores for the terminal, as bars with numbers of occurrences.

    Args:
        aggregate: The aggregated scores.
        max_rows: Number of rows, those with the largest absolute scores.

    Returns:
        What rich prints.
    """
    chosen = sorted(aggregate.rows, key=lambda row: -abs(row[1]))[:max_rows]
    chosen.sort(key=lambda row: -row[1])
    full = max((abs(score) for _, score, _ in chosen), default=0) or 1.0
    rows = [(escape_invisible(what), f"×\u2009{times}", score) for what, score, times in chosen]
    return _render_bar_table(rows, full, f"{aggregate.reduction.capitalize()} of scores by {aggregate.group_by}")


def render_coloured_text(explanation: Explanation) -> Text:
    """The text as it was written, each unit on its colour."""
    steps = compute_colour_levels(explanation.scores, compute_vmax(explanation))
    made = Text(style=_TEXT_STYLE)
    for number, line in enumerate(build_text_lines(explanation.units)):
        made.append("\n" if number else "")
        for piece in line:
            made.append_text(_render_span(piece, steps))
    return made if made.plain[:1] != " " or not explanation.units.special[0] else made[1:]


def _render_span(piece: TextSpan, steps: np.ndarray) -> Text:
    if piece.unit_index is None:
        return Text(piece.text, style=f"strike {_MUTED_STYLE}" if piece.is_unseen else "")
    if piece.is_special:
        return Text(f" {piece.text} ", style=_MUTED_STYLE)
    level = int(steps[piece.unit_index])
    # What shares all its characters with the unit before it has none to colour.
    return Text(
        "" if piece.is_empty else piece.text,
        style=_make_background_style(get_level_colour(level, DARK_THEME), italic=level == NO_SCORE_LEVEL),
    )


def _make_background_style(background: Rgb, italic: bool = False) -> Style:
    front = (0xD6, 0xD4, 0xCF) if background == BACKGROUND_COLOUR else choose_text_colour(background)
    return Style(color=format_hex_colour(front), bgcolor=format_hex_colour(background), italic=italic or None)


def _pad_on_background(content: Text, padding: tuple[int, int] = (1, 2)) -> Padding:
    return Padding(content, padding, style=f"on {format_hex_colour(BACKGROUND_COLOUR)}")


def _iter_header_lines(explanation: AnyExplanation, method: bool = True) -> Iterable[Text]:
    said = Text(text_labels.format_heading(explanation), style="bold")
    said.append(f"  {text_labels.format_target_line(explanation)}", style="not bold")
    said.append(f"  by {escape_invisible(explanation.method)}" if method else "", style="dim not bold")
    yield said
    for note in text_labels.list_notes(explanation):
        yield Text(f" {note} ", style=_WARNING_STYLE)
    if method:
        yield from map(_render_warning, text_labels.list_warnings(explanation))


def _render_warning(warning: str) -> Text:
    return Text(" warning ", style=_WARNING_STYLE).append(f" {warning}", style="not bold default on default")


def _render_legend(explanation: Explanation) -> Text:
    full = text_labels.format_number(compute_vmax(explanation), 3)
    start = -COLOUR_LEVELS_PER_SIGN if explanation.signed else 0
    made = Text(f"−{full} " if explanation.signed else "0 ", style="dim")
    for level in range(start, COLOUR_LEVELS_PER_SIGN + 1, 4):
        made.append("  ", style=Style(bgcolor=format_hex_colour(get_level_colour(level, DARK_THEME))))
    return made.append(f" {full}", style="dim")


def _arrange_columns(*parts: RenderableType | None) -> Columns:
    return Columns([part for part in parts if part is not None], padding=(0, 6))


def _render_top_units(explanation: Explanation) -> Table:
    words = text_labels.find_containing_words(explanation)
    places = text_labels.find_top_units(explanation, 6)
    full = compute_vmax(explanation)
    rows = [
        (text_labels.format_unit_label(explanation, place), words.get(place, ""), float(explanation.scores[place]))
        for place in places
    ]
    figures = [text_labels.format_score(explanation, place, full) for place in places]
    title = text_labels.format_scores_title(explanation, "Strongest units")
    return _render_bar_table(rows, full, title, figures)


def _render_bar_table(
    rows: Sequence[tuple[str, str, float]], full: float, title: str, figures: Sequence[str] | None = None
) -> Table:
    """Names, bars from a common zero line, and the figures: by default the scores."""
    if figures is None:
        figures = [text_labels.format_aligned_number(score, full) for *_, score in rows]
    signed = any(score < 0 for *_, score in rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for (label, context, score), figure in zip(rows, figures, strict=True):
        named = Text(label).append(f" {context}" if context else "", style="dim")
        named.truncate(28, overflow="ellipsis")
        table.add_row(
            named,
            _render_bar(score / full, signed),
            Text(figure, justify="right"),
        )
    return table


def _render_bar(value: float, signed: bool, width: int = 16, style: str | None = None) -> Text:
    """A line from the zero, half a cell being the smallest step."""
    room = width // 2 if signed else width
    share = 0.0 if np.isnan(value) else min(abs(value), 1.0)
    whole, half = divmod(max(round(share * room * 2), 1 if share else 0), 2)
    if value < 0:
        return Text(("╺" * half + "━" * whole).rjust(room) + " " * room, style=style or NEGATIVE_COLOUR)
    return Text((" " * room if signed else "") + ("━" * whole + "╸" * half).ljust(room), style=style or POSITIVE_COLOUR)


def _render_predictions(explanation: AnyExplanation) -> Table | None:
    said = text_labels.list_predictions(explanation)
    if not said:
        return None
    explained = escape_invisible(str(explanation.target.get("name")))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = "Prediction", "left", "bold"
    if not explanation.prediction:
        table.title = "Found"
    for label, share, shown in said:
        style = "bold" if label == explained else ""
        drawn = _render_bar(share, signed=False, width=12, style="grey62") if share is not None else Text()
        table.add_row(Text(label, style=style), drawn, Text(shown, style=style, justify="right"))
    return table


def _render_agreement(methods: Sequence[str], tau: np.ndarray) -> Table:
    table = Table(title="Agreement, Kendall’s τ-b", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column()
    for method in methods:
        table.add_column(Text(method), justify="center")
    steps = compute_colour_levels(tau, 1.0)
    for i, method in enumerate(methods):
        cells = [
            Text(
                "–" if np.isnan(value) else f" {value:.2f} ".replace("-", "−"),
                style=_make_background_style(get_level_colour(int(step), DARK_THEME)),
            )
            for value, step in zip(tau[i], steps[i], strict=True)
        ]
        table.add_row(Text(method), *cells)
    return table


def _render_image_and_heat_map(explanation: Explanation) -> RenderableType:
    """The picture, with what was found in it, beside its heat map."""
    caption = "heat map" if explanation.units.grid is not None else "regions"
    if explanation.image is None:
        return _render_heat_map(explanation, caption)
    height, width = images.compute_display_size(explanation, IMAGE_WIDTH_CELLS)
    pixels = images.resize_image(explanation.image, height, width)
    for _, box in text_labels.find_detected_boxes(explanation).values():
        pixels = images.draw_box_outline(pixels, box, _BOX_COLOUR)
    return Columns([HalfBlockImage(pixels, "picture"), _render_heat_map(explanation, caption)], padding=(0, 3))


def _render_step_maps(explanation: Explanation) -> RenderableType:
    """One small heat map for each of the first steps, with the box of what was found."""
    assert explanation.steps is not None and explanation.matrix is not None
    made, boxes, full = [], text_labels.find_detected_boxes(explanation), compute_vmax(explanation, explanation.matrix)
    for place, step in enumerate(explanation.steps[:MAX_SHOWN_STEPS]):
        alone = explanation.step(place)
        height, width = images.compute_display_size(alone, STEP_MAP_WIDTH_CELLS)
        pixels = images.overlay_heat_map(alone, height, width, opacity=0.95, vmax=full)
        if place in boxes:
            pixels = images.draw_box_outline(pixels, boxes[place][1], _BOX_COLOUR)
        made.append(
            HalfBlockImage(
                pixels,
                text_labels.truncate_text(escape_invisible(step), STEP_MAP_WIDTH_CELLS),
                _format_shade_rows(alone, full),
            )
        )
    maps = Columns(made, padding=(1, 2))
    rest = len(explanation.steps) - len(made)
    return Group(maps, Text(f"shown: the first {len(made)} of {rest + len(made)} steps", style="dim")) if rest else maps


def _render_heat_map(explanation: Explanation, caption: str) -> HalfBlockImage:
    height, width = images.compute_display_size(explanation, IMAGE_WIDTH_CELLS)
    if explanation.image is not None:
        pixels = images.overlay_heat_map(explanation, height, width, opacity=0.95)
    else:
        pixels = apply_colour_map(upsample_heat_map(explanation.heat_map(), height, width), compute_vmax(explanation))
    return HalfBlockImage(pixels, caption, _format_shade_rows(explanation))


def _format_shade_rows(explanation: Explanation, full: float | None = None) -> list[str]:
    """The patches in five signs, for a terminal that has no colours."""
    if explanation.units.grid is None:
        return []
    steps = compute_colour_levels(explanation.heat_map(), full or compute_vmax(explanation))
    return ["".join(get_shade_character(int(step)) * 2 for step in row) for row in steps]
