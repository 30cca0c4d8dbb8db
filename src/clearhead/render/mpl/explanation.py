"""Explanations as matplotlib figures: bars, ranked table, text, picture, regions, sound; steps, layers and heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Rectangle
from rich.cells import cell_len, chop_cells

from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import images, text_labels
from clearhead.render.colours import LEVELS, NO_SCORE, hexed, ink, largest, levels, of_level
from clearhead.render.text_layout import lines, name, shape
from clearhead.stats import Interval
from clearhead.units import Box

if TYPE_CHECKING:
    from matplotlib.image import AxesImage

_INK, _SOFT, _RULE = "#1c1d21", "#5d6068", "#d9d9d6"
_FACE = ["DejaVu Sans Mono", "DejaVu Sans", "sans-serif"]  # the later ones for signs that the first lacks
_BAR = LEVELS * 3 // 4
_MAP = ListedColormap([hexed(of_level(level)) for level in range(-LEVELS, LEVELS + 1)]).with_extremes(
    bad=hexed(of_level(NO_SCORE))
)


class Drawing(Figure):
    """A figure that shows itself in a notebook, and that no pyplot keeps alive; in vector files, text stays text."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "clearhead"}):
            super().savefig(*args, **options)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=144)
        return buffer.getvalue()


@dataclass
class Sheet:
    """What one stream is drawn on: a figure of its own, or a part of a larger one; and how much room it asked for."""

    figure: FigureBase | None = None
    size: tuple[float, float] = (0.0, 0.0)
    given: Axes | None = None

    def titled(self, width: float, height: float, explanation: Explanation) -> FigureBase:
        if self.given is not None:
            raise InputError("this kind of figure has several axes, and cannot be drawn into one: leave out ax=")
        self.size = (width, height)
        if self.figure is None:
            self.figure = _titled(width, height, explanation)
        return self.figure

    def axes(self, width: float, height: float, explanation: Explanation) -> tuple[FigureBase, Axes]:
        if self.given is not None:
            return self.given.figure, self.given
        figure = self.titled(max(width, 5.0), height + 0.3, explanation)
        axes = figure.subplots()
        axes.tick_params(labelsize=8, colors=_INK)
        return figure, axes


def main_axes(figure: Figure, given: Axes | None = None) -> Axes:
    """The first axes of a figure, or those that were given; a notebook shows the whole figure for them."""
    axes = given or figure.axes[0]
    if given is None and isinstance(figure, Drawing):
        axes._repr_png_ = figure._repr_png_  # type: ignore[attr-defined]
    return axes


def plot(explanation: AnyExplanation, kind: str | None = None, ax: Axes | None = None, **options: Any) -> Figure:
    """A figure of one kind, by default what says most about the units; streams stand side by side.

    ax: axes to draw into, in place of a figure of its own
    """
    if kind is not None and kind not in _KINDS:
        raise unknown("kind of figure", kind, _KINDS)
    parts, _ = text_labels.streams(explanation)
    drawn: list[tuple[Explanation, Sheet]] = []
    problems = []
    for part in parts:
        sheet = Sheet(given=ax)
        try:
            _KINDS[kind or default_kind(part)](part, sheet, **options)
            drawn.append((part, sheet))
        except InputError as problem:  # a kind is drawn for the streams that have it
            problems.append(problem)
    if not drawn:
        raise problems[0]
    if len(drawn) > 1:
        return _side_by_side(explanation, kind, drawn, options)
    figure = drawn[0][1].figure if ax is None else ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def _side_by_side(
    explanation: AnyExplanation, kind: str | None, drawn: Sequence[tuple[Explanation, Sheet]], options: Any
) -> Figure:
    """All streams once more in one figure, now that it is known how much room each of them takes."""
    widths = [sheet.size[0] for _, sheet in drawn]
    figure = _titled(sum(widths), max(sheet.size[1] for _, sheet in drawn) + 0.4, explanation)
    places = figure.subfigures(1, len(drawn), width_ratios=widths, squeeze=False)[0]
    for place, (part, _) in zip(places, drawn, strict=True):
        place.suptitle(name(part.stream), fontsize=9, color=_SOFT, x=0.01, ha="left", parse_math=False)
        _KINDS[kind or default_kind(part)](part, Sheet(place), **options)
    return figure


def default_kind(explanation: Explanation) -> str:
    """What says most about these units."""
    kind = {"grid": "overlay", "boxes": "regions", "time": "frames"}.get(shape(explanation), "bars")
    if explanation.steps is None or explanation.matrix is None:
        return kind
    return "steps" if kind == "overlay" else "matrix"


def bars(explanation: Explanation, sheet: Sheet, count: int = 30) -> None:
    """Bars in the order of the input; of more than `count` units the strongest are kept."""
    places = list(range(len(explanation)))
    if len(places) > count:
        places = sorted(text_labels.strongest(explanation, count))
    _, axes = sheet.axes(6.4, 0.9 + 0.25 * len(places), explanation)
    _bars(axes, explanation, places)


def table(explanation: Explanation, sheet: Sheet, count: int = 20) -> None:
    """Units by rank, the highest score first, with bars and figures."""
    places = text_labels.strongest(explanation, count)
    _, axes = sheet.axes(6.4, 0.9 + 0.27 * len(places), explanation)
    _bars(axes, explanation, places, ranked=True)


def _bars(axes: Axes, explanation: Explanation, places: Sequence[int], ranked: bool = False) -> None:
    full, rows = largest(explanation), np.arange(len(places))
    values = explanation.scores[list(places)].astype(float)
    known = np.nan_to_num(np.clip(values, -full, full))
    colours = [hexed(of_level(_BAR if value >= 0 else -_BAR)) for value in known]
    axes.barh(rows, known, height=0.62, color=colours)
    axes.axvline(0, color=_SOFT, linewidth=0.8)
    missing = rows[np.isnan(values)]
    axes.barh(missing, full * 0.06, height=0.62, color="#f0f0ee", edgecolor="#a9abb2", hatch="/////", linewidth=0)
    labels = [text_labels.unit_label(explanation, place) for place in places]
    if ranked:
        labels = [f"{rank}.  {label}" for rank, label in enumerate(labels, 1)]
    axes.set_yticks(rows, labels, parse_math=False)
    for label, place in zip(axes.get_yticklabels(), places, strict=True):
        label.set_color(_SOFT if explanation.units.special[place] else _INK)
    low = -full * 1.02 if (known < 0).any() else 0
    axes.set_xlim(low, full * 1.02)
    axes.set_ylim(len(places) - 0.4, -0.6)
    for row, value in enumerate(values):
        said = text_labels.aligned(value, full)
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=_SOFT)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("score", color=_SOFT, fontsize=8)
    _quiet(axes, "bottom")


def text(explanation: Explanation, sheet: Sheet, width: int = 68) -> None:
    """The text as it was written, set in a typewriter face so that colours lie exactly under it."""
    if explanation.units.grid is not None:
        raise InputError("a picture has no text: use kind='overlay', 'bars', 'table' or 'layers'")
    cells = _set(explanation, width)
    rows = 1 + max((row for row, *_ in cells), default=0)
    figure, axes = sheet.axes(0.1 * width + 0.4, 0.75 + 0.3 * rows, explanation)
    steps = levels(explanation.scores, largest(explanation))
    for row, column, piece, unit in cells:
        special = unit is not None and explanation.units.special[unit]
        size, colour = cell_len(piece), _INK
        if unit is not None and not special:
            background = of_level(int(steps[unit]))
            hatch = "////" if steps[unit] == NO_SCORE else ""
            look: dict[str, Any] = {"facecolor": hexed(background), "edgecolor": "#b9bbc1", "hatch": hatch, "lw": 0}
            axes.add_patch(Rectangle((column, row + 0.1), size, 0.8, **look))
            colour = hexed(ink(background))
        drawn = axes.text(column, row + 0.52, piece, family=_FACE, fontsize=11.4, va="center", parse_math=False)
        drawn.set_color("#a9abb2" if special or unit is None else colour)
    axes.set(xlim=(0, width), ylim=(rows, 0))
    axes.axis("off")
    _key(figure, axes, explanation, largest(explanation))


def _set(explanation: Explanation, width: int) -> list[tuple[int, int, str, int | None]]:
    """Pieces on a grid of cells: row, column, what stands there, and whose it is."""
    placed: list[tuple[int, int, str, int | None]] = []
    row = -1
    for line in lines(explanation.units):
        row, column = row + 1, 0
        for piece in line:
            content = f"{piece.text} " if piece.special else piece.text.replace("\t", "    ")
            for number, part in enumerate(content.split("\n")):
                if number:
                    row, column = row + 1, 0
                if column and column + cell_len(part.rstrip()) > width:
                    row, column, part = row + 1, 0, part.lstrip()
                for chunk in chop_cells(part, width) if part else []:
                    if column + cell_len(chunk) > width and column:
                        row, column = row + 1, 0
                    placed.append((row, column, chunk, piece.unit))
                    column += cell_len(chunk)
    return placed


def layers(explanation: Explanation, sheet: Sheet) -> None:
    """Layer × unit; for a picture one map per layer."""
    if explanation.per_layer is None:
        raise InputError(
            f"{explanation.method} kept no shares of layers: use a method that has them (generic, grad-sam, rollout, "
            "…), without rows='all'"
        )
    full = largest(explanation, explanation.per_layer)
    names = text_labels.layer_names(explanation, len(explanation.per_layer))
    if explanation.units.grid is not None:
        captions = [f"layer {layer}" for layer in names]
        _small_maps(explanation, sheet, explanation.per_layer, captions, _layer_label(explanation))
        return
    count = len(explanation)
    figure, axes = sheet.axes(min(1.8 + 0.26 * count, 16), 1.7 + 0.26 * len(names), explanation)
    image = _image(axes, explanation.per_layer, full, aspect="auto")
    axes.set_yticks(range(len(names)), names)
    _name_units(axes, explanation)
    axes.set_ylabel("layer", color=_SOFT, fontsize=8)
    _quiet(axes)
    _colour_bar(figure, [axes], image, full, _layer_label(explanation), explanation.signed)


def _small_maps(
    explanation: Explanation,
    sheet: Sheet,
    rows: np.ndarray,
    names: Sequence[str],
    label: str,
    boxes: Mapping[int, tuple[str, Box]] | None = None,
) -> None:
    """One heat map per row, as many beside one another as there is room for; those of steps lie over the picture."""
    assert explanation.units.grid is not None
    across = min(len(names), 6)
    down = -(-len(names) // across)
    figure = sheet.titled(max(1.35 * across + 1.1, 5.0), 1.6 * down + 0.7, explanation)
    grid = figure.subplots(down, across, squeeze=False)
    kept, full = explanation.units.drop_special(), largest(explanation, rows)
    over = boxes is not None and explanation.picture is not None
    size = images.size(explanation, 168) if over else explanation.units.grid
    for place, axes in enumerate(grid.flat):
        if place >= len(names):
            axes.axis("off")
            continue
        if over:
            axes.imshow(images.overlaid(explanation.step(place), *size, full=full))
        else:
            _image(axes, rows[place, kept].reshape(size), full)
        axes.set(xticks=(), yticks=())
        _quiet(axes, *axes.spines)
        axes.set_title(text_labels.short(names[place], 18), fontsize=8, color=_SOFT, parse_math=False)
        if boxes and place in boxes:
            _frame(axes, boxes[place][1], size)
    _colour_bar(figure, list(grid.flat), _mappable(full), full, label, explanation.signed)


def _frame(axes: Axes, box: Box, size: tuple[int, int], start: float = -0.5) -> None:
    """The outline of a box over a picture or grid of this height and width; its first pixel begins at `start`."""
    high, wide = size
    left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in box)
    for colour, line in (("#ffffff", 2.6), ("#111111", 1.2)):
        corner, across, down = (left * wide + start, top * high + start), (right - left) * wide, (bottom - top) * high
        axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=colour, linewidth=line))


def _layer_label(explanation: Explanation) -> str:
    return "after layer" if explanation.provenance.get("parts") == "depths" else "share of layer"


def heads(explanation: Explanation, sheet: Sheet) -> None:
    """Layer × head: how much passes through each head, as the sum of |share| over units that are not special."""
    if explanation.per_head is None:
        raise InputError("this explanation kept no shares of heads: explain with per='head', then plot 'heads'")
    kept = explanation.units.drop_special()
    weight = np.nansum(np.abs(explanation.per_head[..., kept]), axis=-1)
    count, across = weight.shape
    figure, axes = sheet.axes(2.4 + 0.34 * across, 1.5 + 0.34 * count, explanation)
    full = float(weight.max(initial=0.0)) or 1.0
    image = _image(axes, weight, full)
    axes.set_yticks(range(count), text_labels.layer_names(explanation, count))
    axes.set_xticks(range(across), text_labels.head_names(explanation, across))
    axes.set_xlabel("head", color=_SOFT, fontsize=8)
    axes.set_ylabel("layer", color=_SOFT, fontsize=8)
    axes.tick_params(length=0)
    _quiet(axes)
    _colour_bar(figure, [axes], image, full, "Sum of |share| over units", signed=False)


def overlay(explanation: Explanation, sheet: Sheet, opacity: float = 0.85) -> None:
    """The picture, its heat map over it in grey, and the patches as they are."""
    if explanation.units.grid is None:
        raise InputError("a text has no picture: use kind='text', 'bars', 'table' or 'layers'")
    height, width = images.size(explanation)
    shown = [("heat map", images.overlaid(explanation, height, width, opacity))]
    if explanation.picture is not None:
        shown.insert(0, ("what the model saw", explanation.picture))
    figure = sheet.titled(2.6 * (len(shown) + 1) + 0.9, 2.6 * height / width + 0.9, explanation)
    every = list(figure.subplots(1, len(shown) + 1, squeeze=False).flat)
    for axes, (caption, pixels) in zip(every, shown, strict=False):
        axes.imshow(pixels, extent=(0, width, height, 0))
        for _, box in text_labels.boxes(explanation).values():
            _frame(axes, box, (height, width), start=0.0)
        axes.set_title(caption, fontsize=8, color=_SOFT)
    full = largest(explanation)
    image = _image(every[-1], explanation.heat_map(), full, extent=(0, width, height, 0))
    every[-1].set_title("patch by patch", fontsize=8, color=_SOFT)
    for axes in every:
        axes.axis("off")
    _colour_bar(figure, every, image, full, "score", signed=explanation.signed)


def regions(explanation: Explanation, sheet: Sheet) -> None:
    """Regions as boxes over the grey picture, the strongest on top."""
    boxes = explanation.units.boxes
    if boxes is None or explanation.picture is None or explanation.units.grid is not None:
        raise InputError("there are no regions of a picture here: use kind='bars' or 'table'")
    high, wide = explanation.picture.shape[:2]
    figure = sheet.titled(5.0, 3.6 * high / wide + 0.7, explanation)
    axes, full = figure.subplots(), largest(explanation)
    steps = levels(explanation.scores, full)
    strength = np.where(steps == NO_SCORE, 0, np.abs(steps)) / LEVELS
    axes.imshow(images.grey(explanation.picture))
    for place in np.argsort(strength, kind="stable"):
        box = boxes[place]
        if box is None:
            continue
        left, top, right, bottom = (edge * size for edge, size in zip(box, (wide, high, wide, high), strict=True))
        colour, alpha = hexed(of_level(int(steps[place]))), max(float(strength[place]), 0.15)
        corner, across, down = (left - 0.5, top - 0.5), right - left, bottom - top
        axes.add_patch(Rectangle(corner, across, down, facecolor=colour, alpha=0.35 * alpha, linewidth=0))
        axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=colour, alpha=alpha, linewidth=1.6))
        if strength[place] > 0.5:
            said = text_labels.unit_label(explanation, int(place))
            drawn = axes.text(*corner, said, fontsize=7, va="bottom", color=_INK, parse_math=False)
            drawn.set_bbox({"facecolor": colour, "linewidth": 0, "pad": 1.2})
    axes.axis("off")
    _colour_bar(figure, [axes], _mappable(full), full, "score", explanation.signed)


def frames(explanation: Explanation, sheet: Sheet) -> None:
    """The scores of a sound's frames over time."""
    if explanation.units.kind != "frame":
        raise InputError("only sounds have frames: use kind='bars' or 'table'")
    _, axes = sheet.axes(8.0, 2.0, explanation)
    places, scores = np.arange(len(explanation)), explanation.scores.astype(float)
    for sign in (1, -1):
        part = np.where(sign * scores > 0, scores, 0.0)
        axes.fill_between(places, part, color=hexed(of_level(sign * _BAR)), step="mid", linewidth=0)
    axes.axhline(0, color=_SOFT, linewidth=0.8)
    marks = np.unique(np.linspace(0, len(places) - 1, min(9, len(places))).round().astype(int))
    axes.set_xticks(marks, [name(explanation.units.names[mark]) for mark in marks], parse_math=False)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylabel("score", color=_SOFT, fontsize=8)
    _quiet(axes, "bottom", "left")


def matrix(explanation: Explanation, sheet: Sheet) -> None:
    """Step × unit: which units each step of an answer came from; or unit × unit, where every row was read."""
    if explanation.matrix is None:
        raise InputError("this explanation has one row alone: explain several steps, as Generated(), or rows='all'")
    names, count = text_labels.row_names(explanation), len(explanation)
    wide, high = min(1.8 + 0.3 * count, 16), min(1.7 + 0.26 * len(names), 16)
    figure, axes = sheet.axes(wide, high, explanation)
    full = largest(explanation, explanation.matrix)
    image = _image(axes, explanation.matrix, full, aspect="auto")
    axes.set_yticks(range(len(names)), names, parse_math=False, fontsize=8 if len(names) < 60 else 5)
    _name_units(axes, explanation)
    axes.set_ylabel("row" if explanation.steps is None else "step", color=_SOFT, fontsize=8)
    _quiet(axes)
    _colour_bar(figure, [axes], image, full, "score", explanation.signed)


def steps(explanation: Explanation, sheet: Sheet) -> None:
    """One heat map per step, with the box of what was found."""
    if explanation.matrix is None or explanation.steps is None or explanation.units.grid is None:
        raise InputError("there are no steps over a picture here: use kind='matrix' for steps over a text")
    names = text_labels.row_names(explanation)
    _small_maps(explanation, sheet, explanation.matrix, names, "score", text_labels.boxes(explanation))


def _name_units(axes: Axes, explanation: Explanation) -> None:
    count = len(explanation)
    labels = [text_labels.unit_label(explanation, place) for place in range(count)]
    axes.set_xticks(range(count), labels, rotation=90, parse_math=False, fontsize=8 if count < 60 else 5)
    axes.tick_params(length=0)


_KINDS: dict[str, Callable[..., None]] = {
    "bars": bars,
    "table": table,
    "text": text,
    "layers": layers,
    "overlay": overlay,
    "heads": heads,
    "matrix": matrix,
    "steps": steps,
    "regions": regions,
    "frames": frames,
}


def _titled(width: float, height: float, explanation: AnyExplanation) -> Figure:
    figure = Drawing(figsize=(width, height), layout="constrained")
    said = f"{name(explanation.method)}\n{text_labels.target_line(explanation)}"
    cut = explanation.certificate.get("truncated_tokens")
    said += f"\n{cut} tokens cut off" if cut else ""
    figure.suptitle(said, fontsize=9, color=_INK, x=0.01, ha="left", parse_math=False)
    return figure


def _quiet(axes: Axes, *kept: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in kept)
        spine.set_color(_RULE)


def _image(axes: Axes, values: np.ndarray, full: float, **options: Any) -> "AxesImage":
    """A heat map; what has no score is hatched."""
    rows, columns = values.shape
    left, right, bottom, top = options.get("extent", (-0.5, columns - 0.5, rows - 0.5, -0.5))
    wide, high = (right - left) / columns, (bottom - top) / rows
    for row, column in np.argwhere(np.isnan(values)):
        corner = (left + column * wide, top + row * high)
        axes.add_patch(Rectangle(corner, wide, high, fill=False, hatch="////", edgecolor="#b9bbc1", linewidth=0))
    known = np.ma.masked_invalid(values)
    return axes.imshow(known, cmap=_MAP, vmin=-full, vmax=full, interpolation="nearest", **options)


def _mappable(full: float) -> ScalarMappable:
    return ScalarMappable(Normalize(-full, full), _MAP)


def _colour_bar(
    figure: FigureBase, axes: list[Axes], image: ScalarMappable, full: float, label: str, signed: bool
) -> None:
    made = figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02)
    made.set_label(label, fontsize=8, color=_SOFT)
    _three_ticks(made, made.ax.set_ylim, full, signed)


def _key(figure: FigureBase, axes: Axes, explanation: Explanation, full: float) -> None:
    """A small colour bar under a text."""
    below: dict[str, Any] = {"location": "bottom", "fraction": 0.05, "aspect": 60, "shrink": 0.4, "anchor": (0, 1)}
    made = figure.colorbar(_mappable(full), ax=axes, **below)
    _three_ticks(made, made.ax.set_xlim, full, explanation.signed)


def _three_ticks(made: Any, limit: Callable[[float, float], object], full: float, signed: bool) -> None:
    """Zero and the ends; the positive half alone where nothing can be negative."""
    made.outline.set_visible(False)
    made.ax.tick_params(labelsize=7, length=2, colors=_SOFT)
    ends = [-full, 0.0, full] if signed else [0.0, full]
    made.set_ticks(ends, labels=[text_labels.number(end, 3) for end in ends])
    limit(ends[0], full)


def labelled(axes: Axes, x: str, y: str, title: str = "") -> Axes:
    axes.set_xlabel(x, fontsize=8, color=_SOFT)
    axes.set_ylabel(y, fontsize=8, color=_SOFT)
    axes.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
    axes.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def gaps(intervals: Sequence[Interval]) -> Any:
    """How far the ends of intervals are from their means, as matplotlib's error bars take them."""
    ends = np.array([[one.mean - one.low, one.high - one.mean] for one in intervals]).T
    return np.clip(np.nan_to_num(ends), 0, None)
