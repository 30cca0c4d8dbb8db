"""Figures of probes: one for each kind."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead.render.mpl.explanation import _INK, _SOFT, Drawing
from clearhead.render.text_layout import name

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult

_BLUE, _GREY = "#3b6fb6", "#b4b6bd"
#: Predicted classes, where there are few.
_CLASSES = (_BLUE, "#d98c3f", "#5b9a68", "#9a6fb0")
#: Largest weights are put into so many bins from 0 to 1.
BINS = 4
#: The largest Jensen–Shannon divergence.
LARGEST = float(np.log(2))


def plot(result: "ProbeResult") -> Figure:
    """The figure of a probe; what has none of its own gets its table as bars."""
    figure = Drawing(figsize=(9.0, 4.6), layout="constrained")
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
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.9])
    _labelled(left, "JSD of the farthest weights with the same answer", "inputs")
    found, bound = result.column("JSD"), result.column("attainable JSD")
    edges = np.linspace(0, LARGEST, 15).tolist()
    left.hist([found, bound], edges, color=[_BLUE, _GREY], label=["found", "attainable"])
    left.legend(fontsize=7, frameon=False)
    _labelled(middle, "largest weight, mean over heads", "JSD found")
    _violins(middle, result.column("largest weight"), found)
    middle.set_ylim(0, LARGEST)
    line = max(result.lines, key=lambda one: one["JSD"])
    if "tokens" not in line:
        right.axis("off")
        return
    _side_by_side(right, line)


def _side_by_side(axes: Axes, line: dict[str, Any]) -> None:
    """The weights of one input, the model's own and the adversary's, as two columns of one heat map."""
    pair = np.array([line["own weights"], line["other weights"]]).T
    axes.imshow(pair, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks([0, 1], ["own", f"adversary\nTVD {line['TVD']:.3f}"], fontsize=7)
    axes.set_yticks(range(len(pair)), [name(token) for token in line["tokens"]], fontsize=6, parse_math=False)
    axes.set_title(f"farthest apart, both {line['prediction']}", fontsize=8, color=_INK, parse_math=False)


def _correlation(figure: Figure, result: "ProbeResult") -> None:
    """A histogram for each pair, 30 bins from −1 to 1, in the colours of the predicted classes."""
    evidence = [one for one in result.lines[0] if one.startswith("τ(last row, ")] + ["τ(gradient, left out)"]
    every = figure.subplots(1, len(evidence), squeeze=False, sharey=True)[0]
    classes = list(dict.fromkeys(line["prediction"] for line in result.lines))
    shown = classes if len(classes) <= len(_CLASSES) else [None]
    for axes, pair in zip(every, evidence, strict=True):
        groups = [
            [o[pair] for o in result.lines if c in (None, o["prediction"]) and np.isfinite(o[pair])] for c in shown
        ]
        axes.hist(groups, np.linspace(-1, 1, 31).tolist(), stacked=True, color=_CLASSES[: len(shown)], label=shown)
        axes.axvline(0, color=_INK, linewidth=0.6)
        inside = pair[2:-1].removeprefix("last row, ")
        _labelled(axes, "tau-b", "inputs" if axes is every[0] else "").set_title(inside, fontsize=8, color=_INK)
    if shown != [None]:
        every[0].legend(fontsize=7, frameon=False)


def _seeds(figure: Figure, result: "ProbeResult") -> None:
    left, right = figure.subplots(1, 2)
    _labelled(left, "largest weight, mean over heads", "median JSD of other seeds' attention")
    _violins(left, result.column("largest weight"), result.column("median JSD"))
    left.set_ylim(0, LARGEST)
    _labelled(right, "median TVD of other seeds' answers", "median JSD of their attention")
    right.scatter(result.column("median TVD"), result.column("median JSD"), s=8, color=_BLUE, alpha=0.6, linewidths=0)
    right.set_xlim(0, 1)
    right.set_ylim(0, LARGEST)


def _frontier(figure: Figure, result: "ProbeResult") -> None:
    axes = _axes(figure, "TVD: how far answers lie from the model's", "JSD: how far attention lies from the model's")
    adversaries = [line for line in result.lines if line["strength"] is not None]
    axes.plot(
        [o["TVD"] for o in adversaries], [o["JSD"] for o in adversaries], color=_BLUE, marker="o", label="adversaries"
    )
    for line in adversaries:
        axes.annotate(
            line["point"],
            (line["TVD"], line["JSD"]),
            fontsize=7,
            color=_SOFT,
            xytext=(4, 3),
            textcoords="offset points",
        )
    for line in result.lines:
        if line["strength"] is None:
            axes.plot(line["TVD"], line["JSD"], marker="s", linestyle="", color=_GREY)
            axes.annotate(
                line["point"],
                (line["TVD"], line["JSD"]),
                fontsize=7,
                color=_INK,
                xytext=(4, -8),
                textcoords="offset points",
            )
    axes.set_xlim(left=0)
    axes.set_ylim(0, LARGEST)
    axes.legend(fontsize=7, frameon=False)


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
    "correlation": _correlation,
    "permutation": _permutation,
    "seeds": _seeds,
    "frontier": _frontier,
    "adversary": _adversary,
    "heads": _heads,
    "skips": _skips,
}
