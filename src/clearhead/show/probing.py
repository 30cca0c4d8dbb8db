"""Figures of probes: one for each kind."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead.show.figures import _INK, _SOFT, Drawing
from clearhead.show.layout import name

if TYPE_CHECKING:
    from clearhead.probes.results import ProbeResult

_BLUE, _GREY = "#3b6fb6", "#b4b6bd"
#: Largest weights are put into so many bins from 0 to 1.
BINS = 4
#: The largest Jensen–Shannon divergence.
LARGEST = float(np.log(2))


def plot(result: "ProbeResult") -> Figure:
    """The figure of a probe; what has none of its own gets its table as bars."""
    figure = Drawing(figsize=(8.0, 4.6), layout="constrained")
    figure.suptitle(f"{result.probe} · {result.model} · {_count(result)}", fontsize=10, color=_INK, x=0.01, ha="left")
    _DRAWN.get(result.probe, _bars)(figure, result)
    return figure


def _count(result: "ProbeResult") -> str:
    return f"{result.findings[0].value.count if result.findings else 0} inputs"


def _axes(figure: Figure, x: str, y: str) -> Axes:
    return _labelled(figure.subplots(), x, y)


def _labelled(axes: Axes, x: str, y: str) -> Axes:
    axes.set_xlabel(x, fontsize=8, color=_SOFT)
    axes.set_ylabel(y, fontsize=8, color=_SOFT)
    axes.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _violins(axes: Axes, weights: np.ndarray, values: np.ndarray) -> None:
    """Values by the largest weight, a violin for each bin that has at least two different ones, and every point."""
    middles = (np.arange(BINS) + 0.5) / BINS
    own = np.clip((weights * BINS).astype(int), 0, BINS - 1)
    groups = [(middles[b], values[own == b]) for b in range(BINS)]
    wide = [(middle, group) for middle, group in groups if len(group) > 1 and np.ptp(group) > 0]
    if wide:
        drawn = axes.violinplot([g for _, g in wide], [m for m, _ in wide], widths=0.8 / BINS, showmedians=True)
        for body in drawn["bodies"]:  # type: ignore[attr-defined]
            body.set_facecolor(_GREY)
    axes.scatter(weights, values, s=8, color=_BLUE, alpha=0.6, linewidths=0)
    axes.set_xlim(0, 1)


def _permutation(figure: Figure, result: "ProbeResult") -> None:
    by_head = result.tables.get("median TVD by layer and head")
    axes, *more = figure.subplots(1, 1 if by_head is None else 2, squeeze=False)[0]
    if by_head is not None:
        _labelled(more[0], "head", "layer")
        shown = more[0].imshow(by_head, cmap="Blues", origin="lower", aspect="auto", vmin=0)
        figure.colorbar(shown, ax=more[0], shrink=0.8).set_label("median TVD, all rows of the head", fontsize=8)
    _labelled(axes, "largest weight, mean over heads", "median TVD of shuffled attention")
    _violins(axes, result.column("largest weight"), result.column("median TVD"))
    axes.set_ylim(bottom=0)


def _adversary(figure: Figure, result: "ProbeResult") -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    _labelled(left, "JSD of the farthest weights with the same answer", "inputs")
    found, bound = result.column("JSD"), result.column("attainable JSD")
    edges = np.linspace(0, LARGEST, 15).tolist()
    left.hist([found, bound], edges, color=[_BLUE, _GREY], label=["found", "attainable"])
    left.legend(fontsize=7, frameon=False)
    line = max(result.lines, key=lambda one: one["JSD"])
    if "tokens" not in line:
        right.axis("off")
        return
    _labelled(right, "weight, mean over heads: the model's own and the adversary's", "")
    rows = np.arange(len(line["tokens"]))
    right.barh(rows - 0.2, line["own weights"], 0.4, color=_GREY, label="own")
    right.barh(rows + 0.2, line["other weights"], 0.4, color=_BLUE, label=f"adversary, TVD {line['TVD']:.3f}")
    right.set_yticks(rows, [name(token) for token in line["tokens"]], parse_math=False)
    right.invert_yaxis()
    right.legend(fontsize=7, frameon=False)


def _heads(figure: Figure, result: "ProbeResult") -> None:
    layers, heads = (max(line[part] for line in result.lines) + 1 for part in ("layer", "head"))
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    _labelled(left, "head", "layer")
    values = result.column("ablation").reshape(layers, heads)
    shown = left.imshow(values, cmap="Blues", origin="lower", aspect="auto")
    figure.colorbar(shown, ax=left, shrink=0.8).set_label("TVD without the head", fontsize=8)
    _labelled(right, "heads silenced, the least important first", "share of predictions that stay")
    for measure, curve in result.tables["pruning"].items():
        points = [(point["silenced"], point["agreement"]) for point in curve]
        right.plot(*zip(*points, strict=True), marker=".", label=measure)
    right.set_ylim(0, 1.02)
    right.legend(fontsize=7, frameon=False)


def _skips(figure: Figure, result: "ProbeResult") -> None:
    axes = _axes(figure, "layer", "share of the skip connection")
    for form in ("flow", "norm", "gradient"):
        axes.plot(result.column("layer"), result.column(form), marker=".", label=form)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7, frameon=False)


def _bars(figure: Figure, result: "ProbeResult") -> None:
    shown = result.findings
    figure.set_figheight(1.2 + 0.24 * len(shown))
    axes = _axes(figure, "mean over inputs, with its 95 % interval", "")
    means = np.array([f.value.mean for f in shown])
    gaps = np.array([[f.value.mean - f.value.low, f.value.high - f.value.mean] for f in shown]).T
    rows = np.arange(len(shown))
    axes.barh(rows, np.nan_to_num(means), 0.6, color=_BLUE)
    axes.errorbar(means, rows, xerr=np.clip(gaps, 0, None), fmt="none", ecolor=_INK, linewidth=0.8)
    axes.set_yticks(rows, [f.name for f in shown])
    axes.invert_yaxis()


_DRAWN: dict[str, Callable[[Figure, "ProbeResult"], None]] = {
    "permutation": _permutation,
    "adversary": _adversary,
    "heads": _heads,
    "skips": _skips,
}
