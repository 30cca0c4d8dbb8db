"""Explanations as matplotlib figures: bars, ranked table, text, layer × unit map, picture, head grid."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.cells import cell_len, chop_cells

from clearhead.errors import InputError, unknown
from clearhead.explanation import Explanation
from clearhead.show import pictures, wording
from clearhead.show.colours import LEVELS, NO_SCORE, hexed, ink, largest, levels, of_level
from clearhead.show.layout import lines, name

if TYPE_CHECKING:
    from matplotlib.image import AxesImage

_INK, _SOFT, _RULE = "#1c1d21", "#5d6068", "#d9d9d6"
_FACE = ["DejaVu Sans Mono", "DejaVu Sans", "sans-serif"]  # the later ones for signs that the first lacks
_BAR = LEVELS * 3 // 4
_MAP = ListedColormap([hexed(of_level(level)) for level in range(-LEVELS, LEVELS + 1)]).with_extremes(
    bad=hexed(of_level(NO_SCORE))
)


class Drawing(Figure):
    """A figure that shows itself in a notebook, and that no pyplot keeps alive."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=144)
        return buffer.getvalue()


def plot(explanation: Explanation, kind: str | None = None, **options: Any) -> Figure:
    """A figure of one kind: by default the overlay for a picture and bars for anything else."""
    kind = kind or ("overlay" if explanation.units.grid is not None else "bars")
    if kind not in _KINDS:
        raise unknown("kind of figure", kind, _KINDS)
    return _KINDS[kind](explanation, **options)


def bars(explanation: Explanation, count: int = 30) -> Figure:
    """Bars in the order of the input; of more than `count` units the strongest are kept."""
    places = list(range(len(explanation)))
    if len(places) > count:
        places = sorted(wording.strongest(explanation, count))
    figure, axes = _new(6.4, 0.9 + 0.25 * len(places), explanation)
    _bars(axes, explanation, places)
    return figure


def table(explanation: Explanation, count: int = 20) -> Figure:
    """Units by rank, the highest score first, with bars and figures."""
    places = wording.strongest(explanation, count)
    figure, axes = _new(6.4, 0.9 + 0.27 * len(places), explanation)
    _bars(axes, explanation, places, ranked=True)
    return figure


def _bars(axes: Axes, explanation: Explanation, places: Sequence[int], ranked: bool = False) -> None:
    full, rows = largest(explanation), np.arange(len(places))
    values = explanation.scores[list(places)].astype(float)
    known = np.nan_to_num(np.clip(values, -full, full))
    colours = [hexed(of_level(_BAR if value >= 0 else -_BAR)) for value in known]
    axes.barh(rows, known, height=0.62, color=colours)
    axes.axvline(0, color=_SOFT, linewidth=0.8)
    missing = rows[np.isnan(values)]
    axes.barh(missing, full * 0.06, height=0.62, color="#f0f0ee", edgecolor="#a9abb2", hatch="/////", linewidth=0)
    labels = [wording.unit_label(explanation, place) for place in places]
    if ranked:
        labels = [f"{rank}.  {label}" for rank, label in enumerate(labels, 1)]
    axes.set_yticks(rows, labels, parse_math=False)
    for label, place in zip(axes.get_yticklabels(), places, strict=True):
        label.set_color(_SOFT if explanation.units.special[place] else _INK)
    low = -full * 1.02 if (known < 0).any() else 0
    axes.set_xlim(low, full * 1.02)
    axes.set_ylim(len(places) - 0.4, -0.6)
    for row, value in enumerate(values):
        said = wording.aligned(value, full)
        axes.annotate(said, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=_SOFT)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("score", color=_SOFT, fontsize=8)
    _quiet(axes, "bottom")


def text(explanation: Explanation, width: int = 68) -> Figure:
    """The text as it was written, set in a typewriter face so that colours lie exactly under it."""
    if explanation.units.grid is not None:
        raise InputError("a picture has no text: use kind='overlay', 'bars', 'table' or 'layers'")
    cells = _set(explanation, width)
    rows = 1 + max((row for row, *_ in cells), default=0)
    figure, axes = _new(0.1 * width + 0.4, 0.75 + 0.3 * rows, explanation)
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
    return figure


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


def layers(explanation: Explanation) -> Figure:
    """Layer × unit; for a picture one map per layer."""
    if explanation.per_layer is None:
        raise InputError(
            f"{explanation.method} kept no shares of layers: use a method that has them (generic, grad-sam, rollout, "
            "…), without rows='all'"
        )
    full = largest(explanation, explanation.per_layer)
    names = wording.layer_names(explanation, len(explanation.per_layer))
    if explanation.units.grid is not None:
        return _layer_maps(explanation, full, names)
    count = len(explanation)
    figure, axes = _new(min(1.8 + 0.26 * count, 16), 1.7 + 0.26 * len(names), explanation)
    image = _image(axes, explanation.per_layer, full, aspect="auto")
    axes.set_yticks(range(len(names)), names)
    labels = [wording.unit_label(explanation, place) for place in range(count)]
    axes.set_xticks(range(count), labels, rotation=90, parse_math=False, fontsize=8 if count < 60 else 5)
    axes.tick_params(length=0)
    axes.set_ylabel("layer", color=_SOFT, fontsize=8)
    _quiet(axes)
    _colour_bar(figure, [axes], image, full, _layer_label(explanation), explanation.signed)
    return figure


def _layer_maps(explanation: Explanation, full: float, names: Sequence[str]) -> Figure:
    assert explanation.per_layer is not None and explanation.units.grid is not None
    columns = min(len(names), 6)
    rows = -(-len(names) // columns)
    figure = _titled(max(1.35 * columns + 1.1, 5.0), 1.6 * rows + 0.7, explanation)
    grid = figure.subplots(rows, columns, squeeze=False)
    kept = explanation.units.drop_special()
    image = None
    for place, axes in enumerate(grid.flat):
        axes.axis("off")
        if place < len(names):
            image = _image(axes, explanation.per_layer[place, kept].reshape(explanation.units.grid), full)
            axes.set_title(f"layer {names[place]}", fontsize=8, color=_SOFT)
    assert image is not None
    _colour_bar(figure, list(grid.flat), image, full, _layer_label(explanation), explanation.signed)
    return figure


def _layer_label(explanation: Explanation) -> str:
    return "after layer" if explanation.provenance.get("parts") == "depths" else "share of layer"


def heads(explanation: Explanation) -> Figure:
    """Layer × head: how much passes through each head, as the sum of |share| over units that are not special."""
    if explanation.per_head is None:
        raise InputError("this explanation kept no shares of heads: explain with per='head', then plot 'heads'")
    kept = explanation.units.drop_special()
    weight = np.nansum(np.abs(explanation.per_head[..., kept]), axis=-1)
    count, across = weight.shape
    figure, axes = _new(2.4 + 0.34 * across, 1.5 + 0.34 * count, explanation)
    full = float(weight.max(initial=0.0)) or 1.0
    image = _image(axes, weight, full)
    axes.set_yticks(range(count), wording.layer_names(explanation, count))
    axes.set_xticks(range(across), wording.head_names(explanation, across))
    axes.set_xlabel("head", color=_SOFT, fontsize=8)
    axes.set_ylabel("layer", color=_SOFT, fontsize=8)
    axes.tick_params(length=0)
    _quiet(axes)
    _colour_bar(figure, [axes], image, full, "Sum of |share| over units", signed=False)
    return figure


def overlay(explanation: Explanation, opacity: float = 0.85) -> Figure:
    """The picture, its heat map over it in grey, and the patches as they are."""
    if explanation.units.grid is None:
        raise InputError("a text has no picture: use kind='text', 'bars', 'table' or 'layers'")
    height, width = pictures.size(explanation)
    shown = [("heat map", pictures.overlaid(explanation, height, width, opacity))]
    if explanation.picture is not None:
        shown.insert(0, ("what the model saw", explanation.picture))
    figure = _titled(2.6 * (len(shown) + 1) + 0.9, 2.6 * height / width + 0.9, explanation)
    every = list(figure.subplots(1, len(shown) + 1, squeeze=False).flat)
    for axes, (caption, pixels) in zip(every, shown, strict=False):
        axes.imshow(pixels, extent=(0, width, height, 0))
        axes.set_title(caption, fontsize=8, color=_SOFT)
    full = largest(explanation)
    image = _image(every[-1], explanation.heat_map(), full, extent=(0, width, height, 0))
    every[-1].set_title("patch by patch", fontsize=8, color=_SOFT)
    for axes in every:
        axes.axis("off")
    _colour_bar(figure, every, image, full, "score", signed=explanation.signed)
    return figure


_KINDS: dict[str, Callable[..., Figure]] = {
    "bars": bars,
    "table": table,
    "text": text,
    "layers": layers,
    "overlay": overlay,
    "heads": heads,
}


def _new(width: float, height: float, explanation: Explanation) -> tuple[Figure, Axes]:
    figure = _titled(max(width, 5.0), height + 0.3, explanation)
    axes = figure.subplots()
    axes.tick_params(labelsize=8, colors=_INK)
    return figure, axes


def _titled(width: float, height: float, explanation: Explanation) -> Figure:
    figure = Drawing(figsize=(width, height), layout="constrained")
    said = f"{name(explanation.method)}\n{wording.target_line(explanation)}"
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


def _colour_bar(figure: Figure, axes: list[Axes], image: "AxesImage", full: float, label: str, signed: bool) -> None:
    made = figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02)
    made.set_label(label, fontsize=8, color=_SOFT)
    _three_ticks(made, made.ax.set_ylim, full, signed)


def _key(figure: Figure, axes: Axes, explanation: Explanation, full: float) -> None:
    """A small colour bar under a text."""
    mappable = ScalarMappable(Normalize(-full, full), _MAP)
    made = figure.colorbar(mappable, ax=axes, location="bottom", fraction=0.05, aspect=60, shrink=0.4, anchor=(0, 1))
    _three_ticks(made, made.ax.set_xlim, full, explanation.signed)


def _three_ticks(made: Any, limit: Callable[[float, float], object], full: float, signed: bool) -> None:
    """Zero and the ends; the positive half alone where nothing can be negative."""
    made.outline.set_visible(False)
    made.ax.tick_params(labelsize=7, length=2, colors=_SOFT)
    ends = [-full, 0.0, full] if signed else [0.0, full]
    made.set_ticks(ends, labels=[wording.number(end, 3) for end in ends])
    limit(ends[0], full)
