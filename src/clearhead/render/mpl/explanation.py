"""Explanations as matplotlib figures: bars, ranked table, text, picture, regions, sound; steps, layers and heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Rectangle
from rich.cells import cell_len, chop_cells

from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import images, text_labels
from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    NO_SCORE_LEVEL,
    choose_text_colour,
    compute_colour_levels,
    compute_vmax,
    format_hex_colour,
    get_level_colour,
)
from clearhead.render.text_layout import build_text_lines, escape_invisible, find_unit_layout
from clearhead.stats import ConfidenceInterval
from clearhead.units import Box

if TYPE_CHECKING:
    from matplotlib.image import AxesImage

TEXT_COLOUR, MUTED_COLOUR, SPINE_COLOUR = "#1c1d21", "#5d6068", "#d9d9d6"
WARNING_COLOUR = "#7a2e00"
_FONT_FAMILIES = ["DejaVu Sans Mono", "DejaVu Sans", "sans-serif"]  # the later ones for signs that the first lacks
#: Font size of warnings, and how many characters of it fit into an inch on average.
_WARNING_FONT_SIZE, _WARNING_CHARS_PER_INCH = 7, 19
_BAR_LEVEL = COLOUR_LEVELS_PER_SIGN * 3 // 4
SIGNED_COLOUR_MAP = ListedColormap(
    [format_hex_colour(get_level_colour(level)) for level in range(-COLOUR_LEVELS_PER_SIGN, COLOUR_LEVELS_PER_SIGN + 1)]
).with_extremes(bad=format_hex_colour(get_level_colour(NO_SCORE_LEVEL)))


class InlineFigure(Figure):
    """A figure that shows itself in a notebook, and that no pyplot keeps alive; in vector files, text stays text."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write the figure to a file; in PDF, PS and SVG files, text stays text and SVG identifiers are reproducible.

        Args:
            *args: The file, as in matplotlib.
            **options: Options of matplotlib's `savefig`.
        """
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "clearhead"}):
            super().savefig(*args, **options)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=144)
        return buffer.getvalue()


@dataclass
class Canvas:
    """Where one stream is drawn: in a figure of its own, in a part of a larger one, or in the user's axes.

    Attributes:
        figure: The figure or subfigure; None until it is made.
        requested_size: Width and height that the plot asked for, in inches.
        user_axes: The axes that the user gave, if any.
    """

    figure: FigureBase | None = None
    requested_size: tuple[float, float] = (0.0, 0.0)
    user_axes: Axes | None = None

    def get_titled_figure(self, width: float, height: float, explanation: Explanation) -> FigureBase:
        """Return the figure to draw into, for plots that arrange several axes themselves.

        Args:
            width: Requested width in inches.
            height: Requested height in inches.
            explanation: Supplies the title of a new figure.

        Returns:
            The figure or subfigure.

        Raises:
            InputError: If the user gave axes.
        """
        if self.user_axes is not None:
            raise InputError("this kind of figure has several axes and cannot be drawn into one: leave out ax=")
        self.requested_size = (width, height)
        if self.figure is None:
            self.figure = _make_titled_figure(width, height, explanation)
        return self.figure

    def make_axes(self, width: float, height: float, explanation: Explanation) -> tuple[FigureBase, Axes]:
        """Return the axes to draw into: the user's, or new ones.

        Args:
            width: Requested width in inches; new figures are at least 5 inches wide.
            height: Requested height of the axes in inches.
            explanation: Supplies the title of a new figure.

        Returns:
            The figure and the axes.
        """
        if self.user_axes is not None:
            return self.user_axes.figure, self.user_axes
        figure = self.get_titled_figure(max(width, 5.0), height + 0.3, explanation)
        axes = figure.subplots()
        axes.tick_params(labelsize=8, colors=TEXT_COLOUR)
        return figure, axes


def get_main_axes(figure: Figure, user_axes: Axes | None = None) -> Axes:
    """Return the user's axes, or the figure's first axes, set up so that a notebook displays the whole figure.

    Args:
        figure: The figure that was drawn.
        user_axes: The axes that the user gave, if any.

    Returns:
        The axes.
    """
    axes = user_axes or figure.axes[0]
    if user_axes is None and isinstance(figure, InlineFigure):
        axes._repr_png_ = figure._repr_png_  # type: ignore[attr-defined]
    return axes


def plot_explanation(
    explanation: AnyExplanation, kind: str | None = None, ax: Axes | None = None, **options: Any
) -> Figure:
    """Draw an explanation as a figure; several streams stand next to each other.

    Args:
        explanation: The explanation.
        kind: Type of plot, drawn for the streams that have its data. Default: the most informative one for the units.
        ax: Axes to draw into, in place of a new figure.
        **options: Options of the plot type.

    Returns:
        The figure, with the warnings about the scores below it.

    Raises:
        InputError: If the type of plot is unknown, or no stream has its data.
    """
    if kind is not None and kind not in _DRAW_FUNCTIONS:
        raise unknown_value_error("kind of figure", kind, _DRAW_FUNCTIONS)
    parts, _ = text_labels.split_input_streams(explanation)
    drawn: list[tuple[Explanation, Canvas]] = []
    problems = []
    for part in parts:
        sheet = Canvas(user_axes=ax)
        try:
            _DRAW_FUNCTIONS[kind or choose_plot_kind(part)](part, sheet, **options)
            drawn.append((part, sheet))
        except InputError as problem:  # a kind is drawn for the streams that have it
            problems.append(problem)
    if not drawn:
        raise problems[0]
    if len(drawn) > 1:
        figure = _plot_streams_side_by_side(explanation, kind, drawn, options)
        _add_warnings_below_figure(figure, explanation)
        return figure
    if ax is not None:
        _add_warnings_below_axes(ax, explanation)
    single = drawn[0][1].figure if ax is None else ax.get_figure(root=True)
    assert isinstance(single, Figure)
    if ax is None:
        _add_warnings_below_figure(single, explanation)
    return single


def _plot_streams_side_by_side(
    explanation: AnyExplanation, kind: str | None, drawn: Sequence[tuple[Explanation, Canvas]], options: Any
) -> Figure:
    """All streams once more in one figure, now that it is known how much room each of them takes."""
    widths = [sheet.requested_size[0] for _, sheet in drawn]
    figure = _make_titled_figure(sum(widths), max(sheet.requested_size[1] for _, sheet in drawn) + 0.4, explanation)
    places = figure.subfigures(1, len(drawn), width_ratios=widths, squeeze=False)[0]
    for place, (part, _) in zip(places, drawn, strict=True):
        place.suptitle(
            escape_invisible(part.stream), fontsize=9, color=MUTED_COLOUR, x=0.01, ha="left", parse_math=False
        )
        _DRAW_FUNCTIONS[kind or choose_plot_kind(part)](part, Canvas(place), **options)
    return figure


def choose_plot_kind(explanation: Explanation) -> str:
    """What says most about these units."""
    kind = {"grid": "overlay", "boxes": "regions", "time": "frames"}.get(find_unit_layout(explanation), "bars")
    if explanation.steps is None or explanation.matrix is None:
        return kind
    return "steps" if kind == "overlay" else "matrix"


def draw_bars(explanation: Explanation, canvas: Canvas, count: int = 30) -> None:
    """Bars in the order of the input; of more than `count` units the strongest are kept."""
    places = list(range(len(explanation)))
    if len(places) > count:
        places = sorted(text_labels.find_top_units(explanation, count))
    _, axes = canvas.make_axes(6.4, 0.9 + 0.25 * len(places), explanation)
    _draw_bars_on_axes(axes, explanation, places)


def draw_ranked_bars(explanation: Explanation, canvas: Canvas, count: int = 20) -> None:
    """Units by rank, the highest score first, with bars and figures."""
    places = text_labels.find_top_units(explanation, count)
    _, axes = canvas.make_axes(6.4, 0.9 + 0.27 * len(places), explanation)
    _draw_bars_on_axes(axes, explanation, places, ranked=True)


def _draw_bars_on_axes(axes: Axes, explanation: Explanation, places: Sequence[int], ranked: bool = False) -> None:
    full, rows = compute_vmax(explanation), np.arange(len(places))
    values = explanation.scores[list(places)].astype(float)
    known = np.nan_to_num(np.clip(values, -full, full))
    colours = [format_hex_colour(get_level_colour(_BAR_LEVEL if value >= 0 else -_BAR_LEVEL)) for value in known]
    axes.barh(rows, known, height=0.62, color=colours)
    if explanation.intervals is not None:
        axes.hlines(rows, *explanation.intervals[list(places)].T, color=TEXT_COLOUR, linewidth=0.9)
    axes.axvline(0, color=MUTED_COLOUR, linewidth=0.8)
    missing = rows[np.isnan(values)]
    axes.barh(missing, full * 0.06, height=0.62, color="#f0f0ee", edgecolor="#a9abb2", hatch="/////", linewidth=0)
    labels = [text_labels.format_unit_label(explanation, place) for place in places]
    if ranked:
        labels = [f"{rank}.  {label}" for rank, label in enumerate(labels, 1)]
    axes.set_yticks(rows, labels, parse_math=False)
    for label, place in zip(axes.get_yticklabels(), places, strict=True):
        label.set_color(MUTED_COLOUR if explanation.units.special[place] else TEXT_COLOUR)
    lowest = -full if (known < 0).any() else 0.0
    highest = full
    if explanation.intervals is not None:
        lowest = min(lowest, float(explanation.intervals[list(places)].min()))
        highest = max(highest, float(explanation.intervals[list(places)].max()))
    axes.set_xlim(lowest * 1.02, highest * 1.02)
    axes.set_ylim(len(places) - 0.4, -0.6)
    for row, place in enumerate(places):
        said = text_labels.format_score(explanation, place, full)
        axes.annotate(
            said, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=MUTED_COLOUR
        )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(text_labels.format_scores_title(explanation, "score"), color=MUTED_COLOUR, fontsize=8)
    _style_spines(axes, "bottom")


def draw_text(explanation: Explanation, canvas: Canvas, width: int = 68) -> None:
    """The text as it was written, set in a typewriter face so that colours lie exactly under it."""
    if explanation.units.grid is not None:
        raise InputError("an image has no text: use kind='overlay', 'bars', 'table' or 'layers'")
    cells = _layout_text_cells(explanation, width)
    rows = 1 + max((row for row, *_ in cells), default=0)
    figure, axes = canvas.make_axes(0.1 * width + 0.4, 0.75 + 0.3 * rows, explanation)
    steps = compute_colour_levels(explanation.scores, compute_vmax(explanation))
    for row, column, piece, unit in cells:
        special = unit is not None and explanation.units.special[unit]
        size, colour = cell_len(piece), TEXT_COLOUR
        if unit is not None and not special:
            background = get_level_colour(int(steps[unit]))
            hatch = "////" if steps[unit] == NO_SCORE_LEVEL else ""
            look: dict[str, Any] = {
                "facecolor": format_hex_colour(background),
                "edgecolor": "#b9bbc1",
                "hatch": hatch,
                "lw": 0,
            }
            axes.add_patch(Rectangle((column, row + 0.1), size, 0.8, **look))
            colour = format_hex_colour(choose_text_colour(background))
        drawn = axes.text(
            column, row + 0.52, piece, family=_FONT_FAMILIES, fontsize=11.4, va="center", parse_math=False
        )
        drawn.set_color("#a9abb2" if special or unit is None else colour)
    axes.set(xlim=(0, width), ylim=(rows, 0))
    axes.axis("off")
    _add_bottom_colour_bar(figure, axes, explanation, compute_vmax(explanation))


def _layout_text_cells(explanation: Explanation, width: int) -> list[tuple[int, int, str, int | None]]:
    """Pieces on a grid of cells: row, column, what stands there, and whose it is."""
    placed: list[tuple[int, int, str, int | None]] = []
    row = -1
    for line in build_text_lines(explanation.units):
        row, column = row + 1, 0
        for piece in line:
            content = f"{piece.text} " if piece.is_special else piece.text.replace("\t", "    ")
            for number, part in enumerate(content.split("\n")):
                if number:
                    row, column = row + 1, 0
                if column and column + cell_len(part.rstrip()) > width:
                    row, column, part = row + 1, 0, part.lstrip()
                for chunk in chop_cells(part, width) if part else []:
                    if column + cell_len(chunk) > width and column:
                        row, column = row + 1, 0
                    placed.append((row, column, chunk, piece.unit_index))
                    column += cell_len(chunk)
    return placed


def draw_layers(explanation: Explanation, canvas: Canvas) -> None:
    """Layer × unit; for a picture one map per layer."""
    if explanation.per_layer is None:
        raise InputError(
            f"{explanation.method} has no contributions of layers: use a method that stores them (generic, grad-sam, "
            "rollout, …), without rows='all'"
        )
    full = compute_vmax(explanation, explanation.per_layer)
    names = text_labels.format_layer_names(explanation, len(explanation.per_layer))
    if explanation.units.grid is not None:
        captions = [f"layer {layer}" for layer in names]
        _draw_small_multiples(
            explanation, canvas, explanation.per_layer, captions, _get_layer_colour_bar_label(explanation)
        )
        return
    count = len(explanation)
    figure, axes = canvas.make_axes(min(1.8 + 0.26 * count, 16), 1.7 + 0.26 * len(names), explanation)
    image = _draw_heat_map(axes, explanation.per_layer, full, aspect="auto")
    axes.set_yticks(range(len(names)), names)
    _set_unit_ticks(axes, explanation)
    axes.set_ylabel("layer", color=MUTED_COLOUR, fontsize=8)
    _style_spines(axes)
    _add_colour_bar(figure, [axes], image, full, _get_layer_colour_bar_label(explanation), explanation.signed)


def _draw_small_multiples(
    explanation: Explanation,
    sheet: Canvas,
    rows: np.ndarray,
    names: Sequence[str],
    label: str,
    boxes: Mapping[int, tuple[str, Box]] | None = None,
) -> None:
    """One heat map per row, as many beside one another as there is room for; those of steps lie over the picture."""
    assert explanation.units.grid is not None
    across = min(len(names), 6)
    down = -(-len(names) // across)
    figure = sheet.get_titled_figure(max(1.35 * across + 1.1, 5.0), 1.6 * down + 0.7, explanation)
    grid = figure.subplots(down, across, squeeze=False)
    kept, full = explanation.units.content_indices(), compute_vmax(explanation, rows)
    over = boxes is not None and explanation.image is not None
    size = images.compute_display_size(explanation, 168) if over else explanation.units.grid
    for place, axes in enumerate(grid.flat):
        if place >= len(names):
            axes.axis("off")
            continue
        if over:
            axes.imshow(images.overlay_heat_map(explanation.step(place), *size, vmax=full))
        else:
            _draw_heat_map(axes, rows[place, kept].reshape(size), full)
        axes.set(xticks=(), yticks=())
        _style_spines(axes, *axes.spines)
        axes.set_title(text_labels.truncate_text(names[place], 18), fontsize=8, color=MUTED_COLOUR, parse_math=False)
        if boxes and place in boxes:
            _draw_box_patch(axes, boxes[place][1], size)
    _add_colour_bar(figure, list(grid.flat), _make_scalar_mappable(full), full, label, explanation.signed)


def _draw_box_patch(axes: Axes, box: Box, size: tuple[int, int], start: float = -0.5) -> None:
    """The outline of a box over a picture or grid of this height and width; its first pixel begins at `start`."""
    high, wide = size
    left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in box)
    for colour, line in (("#ffffff", 2.6), ("#111111", 1.2)):
        corner, across, down = (left * wide + start, top * high + start), (right - left) * wide, (bottom - top) * high
        axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=colour, linewidth=line))


def _get_layer_colour_bar_label(explanation: Explanation) -> str:
    return "after layer" if explanation.provenance.get("layer_scores") == "depths" else "contribution of layer"


def draw_heads(explanation: Explanation, canvas: Canvas) -> None:
    """Layer × head: how much passes through each head, as the sum of |share| over units that are not special."""
    if explanation.per_head is None:
        raise InputError("this explanation has no contributions of heads: explain with per='head', then plot 'heads'")
    kept = explanation.units.content_indices()
    weight = np.nansum(np.abs(explanation.per_head[..., kept]), axis=-1)
    count, across = weight.shape
    figure, axes = canvas.make_axes(2.4 + 0.34 * across, 1.5 + 0.34 * count, explanation)
    full = float(weight.max(initial=0.0)) or 1.0
    image = _draw_heat_map(axes, weight, full)
    axes.set_yticks(range(count), text_labels.format_layer_names(explanation, count))
    axes.set_xticks(range(across), text_labels.format_head_names(explanation, across))
    axes.set_xlabel("head", color=MUTED_COLOUR, fontsize=8)
    axes.set_ylabel("layer", color=MUTED_COLOUR, fontsize=8)
    axes.tick_params(length=0)
    _style_spines(axes)
    _add_colour_bar(figure, [axes], image, full, "Sum of |contribution| over units", signed=False)


def draw_overlay(explanation: Explanation, canvas: Canvas, opacity: float = 0.85) -> None:
    """The picture, its heat map over it in grey, and the patches as they are."""
    if explanation.units.grid is None:
        raise InputError("a text has no image: use kind='text', 'bars', 'table' or 'layers'")
    height, width = images.compute_display_size(explanation)
    shown = [("heat map", images.overlay_heat_map(explanation, height, width, opacity))]
    if explanation.image is not None:
        shown.insert(0, ("model input", explanation.image))
    figure = canvas.get_titled_figure(2.6 * (len(shown) + 1) + 0.9, 2.6 * height / width + 0.9, explanation)
    every = list(figure.subplots(1, len(shown) + 1, squeeze=False).flat)
    for axes, (caption, pixels) in zip(every, shown, strict=False):
        axes.imshow(pixels, extent=(0, width, height, 0))
        for _, box in text_labels.find_detected_boxes(explanation).values():
            _draw_box_patch(axes, box, (height, width), start=0.0)
        axes.set_title(caption, fontsize=8, color=MUTED_COLOUR)
    full = compute_vmax(explanation)
    image = _draw_heat_map(every[-1], explanation.heat_map(), full, extent=(0, width, height, 0))
    every[-1].set_title("patch by patch", fontsize=8, color=MUTED_COLOUR)
    for axes in every:
        axes.axis("off")
    _add_colour_bar(figure, every, image, full, "score", signed=explanation.signed)


def draw_regions(explanation: Explanation, canvas: Canvas) -> None:
    """Regions as boxes over the grey picture, the strongest on top."""
    boxes = explanation.units.boxes
    if boxes is None or explanation.image is None or explanation.units.grid is not None:
        raise InputError("this explanation has no image regions: use kind='bars' or 'table'")
    high, wide = explanation.image.shape[:2]
    figure = canvas.get_titled_figure(5.0, 3.6 * high / wide + 0.7, explanation)
    axes, full = figure.subplots(), compute_vmax(explanation)
    steps = compute_colour_levels(explanation.scores, full)
    strength = np.where(steps == NO_SCORE_LEVEL, 0, np.abs(steps)) / COLOUR_LEVELS_PER_SIGN
    axes.imshow(images.to_light_greyscale(explanation.image))
    for place in np.argsort(strength, kind="stable"):
        box = boxes[place]
        if box is None:
            continue
        left, top, right, bottom = (edge * size for edge, size in zip(box, (wide, high, wide, high), strict=True))
        colour, alpha = format_hex_colour(get_level_colour(int(steps[place]))), max(float(strength[place]), 0.15)
        corner, across, down = (left - 0.5, top - 0.5), right - left, bottom - top
        axes.add_patch(Rectangle(corner, across, down, facecolor=colour, alpha=0.35 * alpha, linewidth=0))
        axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=colour, alpha=alpha, linewidth=1.6))
        if strength[place] > 0.5:
            said = text_labels.format_unit_label(explanation, int(place))
            drawn = axes.text(*corner, said, fontsize=7, va="bottom", color=TEXT_COLOUR, parse_math=False)
            drawn.set_bbox({"facecolor": colour, "linewidth": 0, "pad": 1.2})
    axes.axis("off")
    _add_colour_bar(figure, [axes], _make_scalar_mappable(full), full, "score", explanation.signed)


def draw_audio_frames(explanation: Explanation, canvas: Canvas) -> None:
    """The scores of a sound's frames over time."""
    if explanation.units.kind != "frame":
        raise InputError("only audio has frames: use kind='bars' or 'table'")
    _, axes = canvas.make_axes(8.0, 2.0, explanation)
    places, scores = np.arange(len(explanation)), explanation.scores.astype(float)
    for sign in (1, -1):
        part = np.where(sign * scores > 0, scores, 0.0)
        axes.fill_between(
            places, part, color=format_hex_colour(get_level_colour(sign * _BAR_LEVEL)), step="mid", linewidth=0
        )
    axes.axhline(0, color=MUTED_COLOUR, linewidth=0.8)
    marks = np.unique(np.linspace(0, len(places) - 1, min(9, len(places))).round().astype(int))
    axes.set_xticks(marks, [escape_invisible(explanation.units.names[mark]) for mark in marks], parse_math=False)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylabel("score", color=MUTED_COLOUR, fontsize=8)
    _style_spines(axes, "bottom", "left")


def draw_matrix(explanation: Explanation, canvas: Canvas) -> None:
    """Step × unit: which units each step of an answer came from; or unit × unit, where every row was read."""
    if explanation.matrix is None:
        raise InputError(
            "this explanation has only one row: explain several steps, such as with target=GeneratedToken(), or use "
            "rows='all'"
        )
    names, count = text_labels.format_row_names(explanation), len(explanation)
    wide, high = min(1.8 + 0.3 * count, 16), min(1.7 + 0.26 * len(names), 16)
    figure, axes = canvas.make_axes(wide, high, explanation)
    full = compute_vmax(explanation, explanation.matrix)
    image = _draw_heat_map(axes, explanation.matrix, full, aspect="auto")
    axes.set_yticks(range(len(names)), names, parse_math=False, fontsize=8 if len(names) < 60 else 5)
    _set_unit_ticks(axes, explanation)
    axes.set_ylabel("row" if explanation.steps is None else "step", color=MUTED_COLOUR, fontsize=8)
    _style_spines(axes)
    _add_colour_bar(figure, [axes], image, full, "score", explanation.signed)


def draw_step_maps(explanation: Explanation, canvas: Canvas) -> None:
    """One heat map per step, with the box of what was found."""
    if explanation.matrix is None or explanation.steps is None or explanation.units.grid is None:
        raise InputError("this explanation has no steps over an image: use kind='matrix' for steps over a text")
    names = text_labels.format_row_names(explanation)
    _draw_small_multiples(
        explanation, canvas, explanation.matrix, names, "score", text_labels.find_detected_boxes(explanation)
    )


def _set_unit_ticks(axes: Axes, explanation: Explanation) -> None:
    count = len(explanation)
    labels = [text_labels.format_unit_label(explanation, place) for place in range(count)]
    axes.set_xticks(range(count), labels, rotation=90, parse_math=False, fontsize=8 if count < 60 else 5)
    axes.tick_params(length=0)


_DRAW_FUNCTIONS: dict[str, Callable[..., None]] = {
    "bars": draw_bars,
    "table": draw_ranked_bars,
    "text": draw_text,
    "layers": draw_layers,
    "overlay": draw_overlay,
    "heads": draw_heads,
    "matrix": draw_matrix,
    "steps": draw_step_maps,
    "regions": draw_regions,
    "frames": draw_audio_frames,
}


def _make_titled_figure(width: float, height: float, explanation: AnyExplanation) -> Figure:
    figure = InlineFigure(figsize=(width, height), layout="constrained")
    said = f"{escape_invisible(explanation.method)}\n{text_labels.format_target_line(explanation)}"
    cut = explanation.certificate.get("truncated_tokens")
    said += f"\n{cut} tokens truncated" if cut else ""
    figure.suptitle(said, fontsize=9, color=TEXT_COLOUR, x=0.01, ha="left", parse_math=False)
    return figure


def _add_warnings_below_figure(figure: Figure, explanation: AnyExplanation) -> None:
    """Write warnings in small lines under the plot, and make the figure as much higher."""
    lines = _wrap_warnings(explanation, figure.get_figwidth())
    if not lines:
        return
    figure.set_figheight(figure.get_figheight() + len(lines) * 1.2 * _WARNING_FONT_SIZE / 72 + 0.1)
    figure.supxlabel(
        "\n".join(lines), fontsize=_WARNING_FONT_SIZE, color=WARNING_COLOUR, x=0.01, ha="left", parse_math=False
    )


def _add_warnings_below_axes(axes: Axes, explanation: AnyExplanation) -> None:
    """Write warnings under the axes of a user, as the last lines of their label."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    lines = _wrap_warnings(explanation, figure.get_figwidth() * axes.get_position().width)
    if not lines:
        return
    if not axes.axison:  # a label would not be drawn
        below: dict[str, Any] = {"xycoords": "axes fraction", "va": "top", "parse_math": False}
        axes.annotate("\n".join(lines), (0, 0), fontsize=_WARNING_FONT_SIZE, color=WARNING_COLOUR, **below)
        return
    label = axes.get_xlabel()
    axes.set_xlabel(
        "\n".join([label, *lines] if label else lines),
        fontsize=_WARNING_FONT_SIZE,
        color=WARNING_COLOUR,
        parse_math=False,
    )


def _wrap_warnings(explanation: AnyExplanation, width: float) -> list[str]:
    """The warnings as lines that fit into a width in inches."""
    chars = max(20, int(width * _WARNING_CHARS_PER_INCH))
    return [line for warning in text_labels.list_warnings(explanation) for line in wrap(f"Warning: {warning}", chars)]


def _style_spines(axes: Axes, *kept: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in kept)
        spine.set_color(SPINE_COLOUR)


def _draw_heat_map(axes: Axes, values: np.ndarray, full: float, **options: Any) -> "AxesImage":
    """A heat map; what has no score is hatched."""
    rows, columns = values.shape
    left, right, bottom, top = options.get("extent", (-0.5, columns - 0.5, rows - 0.5, -0.5))
    wide, high = (right - left) / columns, (bottom - top) / rows
    for row, column in np.argwhere(np.isnan(values)):
        corner = (left + column * wide, top + row * high)
        axes.add_patch(Rectangle(corner, wide, high, fill=False, hatch="////", edgecolor="#b9bbc1", linewidth=0))
    known = np.ma.masked_invalid(values)
    return axes.imshow(known, cmap=SIGNED_COLOUR_MAP, vmin=-full, vmax=full, interpolation="nearest", **options)


def _make_scalar_mappable(full: float) -> ScalarMappable:
    return ScalarMappable(Normalize(-full, full), SIGNED_COLOUR_MAP)


def _add_colour_bar(
    figure: FigureBase, axes: list[Axes], image: ScalarMappable, full: float, label: str, signed: bool
) -> None:
    made = figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02)
    made.set_label(label, fontsize=8, color=MUTED_COLOUR)
    _set_colour_bar_ticks(made, made.ax.set_ylim, full, signed)


def _add_bottom_colour_bar(figure: FigureBase, axes: Axes, explanation: Explanation, full: float) -> None:
    """A small colour bar under a text."""
    below: dict[str, Any] = {"location": "bottom", "fraction": 0.05, "aspect": 60, "shrink": 0.4, "anchor": (0, 1)}
    made = figure.colorbar(_make_scalar_mappable(full), ax=axes, **below)
    _set_colour_bar_ticks(made, made.ax.set_xlim, full, explanation.signed)


def _set_colour_bar_ticks(made: Any, limit: Callable[[float, float], object], full: float, signed: bool) -> None:
    """Zero and the ends; the positive half alone where nothing can be negative."""
    made.outline.set_visible(False)
    made.ax.tick_params(labelsize=7, length=2, colors=MUTED_COLOUR)
    ends = [-full, 0.0, full] if signed else [0.0, full]
    made.set_ticks(ends, labels=[text_labels.format_number(end, 3) for end in ends])
    limit(ends[0], full)


def label_axes(axes: Axes, x: str, y: str, title: str = "") -> Axes:
    """Set labels and title of axes in the style of all figures, and hide their upper and right spine.

    Args:
        axes: The axes.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        title: Title; mathematical notation in it is not parsed.

    Returns:
        The same axes.
    """
    axes.set_xlabel(x, fontsize=8, color=MUTED_COLOUR)
    axes.set_ylabel(y, fontsize=8, color=MUTED_COLOUR)
    axes.set_title(title, fontsize=9, color=TEXT_COLOUR, loc="left", parse_math=False)
    axes.tick_params(labelsize=8, colors=TEXT_COLOUR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def compute_error_bars(intervals: Sequence[ConfidenceInterval]) -> Any:
    """How far the ends of intervals are from their means, as matplotlib's error bars take them."""
    ends = np.array([[one.mean - one.low, one.high - one.mean] for one in intervals]).T
    return np.clip(np.nan_to_num(ends), 0, None)
