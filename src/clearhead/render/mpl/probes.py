"""Figures of probes: one for each kind."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead.render.mpl.explanation import MUTED_COLOUR, TEXT_COLOUR, InlineFigure
from clearhead.render.text_layout import escape_invisible

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult

_BLUE, _GREY = "#3b6fb6", "#b4b6bd"
#: Predicted classes, where there are few.
_CLASS_COLOURS = (_BLUE, "#d98c3f", "#5b9a68", "#9a6fb0")
#: Largest weights are put into so many bins from 0 to 1.
NUM_WEIGHT_BINS = 4
#: The largest Jensen–Shannon divergence.
JSD_AXIS_MAX = float(np.log(2))


def plot_probe(result: "ProbeResult") -> Figure:
    """Draw the figure of a probe; bars of its estimates if the probe has no figure of its own.

    Args:
        result: The result of the probe.

    Returns:
        The figure.
    """
    figure = InlineFigure(figsize=(9.0, 4.6), layout="constrained")
    figure.suptitle(
        f"{result.probe} · {result.model} · {_format_num_inputs(result)}",
        fontsize=10,
        color=TEXT_COLOUR,
        x=0.01,
        ha="left",
    )
    _DRAW_FUNCTIONS.get(result.probe, _draw_estimate_bars)(figure, result)
    return figure


def _format_num_inputs(result: "ProbeResult") -> str:
    return f"{result.estimates[0].interval.count if result.estimates else 0} inputs"


def _make_labelled_axes(figure: Figure, x: str, y: str) -> Axes:
    return _label_axes(figure.subplots(), x, y)


def _label_axes(axes: Axes, x: str, y: str) -> Axes:
    axes.set_xlabel(x, fontsize=8, color=MUTED_COLOUR)
    axes.set_ylabel(y, fontsize=8, color=MUTED_COLOUR)
    axes.tick_params(labelsize=8, colors=TEXT_COLOUR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _draw_violins(axes: Axes, weights: np.ndarray, values: np.ndarray) -> None:
    """Values by the largest weight, a violin for each bin that has at least two different ones, and every point."""
    middles = (np.arange(NUM_WEIGHT_BINS) + 0.5) / NUM_WEIGHT_BINS
    own = np.clip((weights * NUM_WEIGHT_BINS).astype(int), 0, NUM_WEIGHT_BINS - 1)
    groups = [(middles[b], values[own == b]) for b in range(NUM_WEIGHT_BINS)]
    wide = [(middle, group) for middle, group in groups if len(group) > 1 and np.ptp(group) > 0]
    if wide:
        drawn = axes.violinplot(
            [g for _, g in wide], [m for m, _ in wide], widths=0.8 / NUM_WEIGHT_BINS, showmedians=True
        )
        for body in drawn["bodies"]:  # type: ignore[attr-defined]
            body.set_facecolor(_GREY)
    axes.scatter(weights, values, s=8, color=_BLUE, alpha=0.6, linewidths=0)
    axes.set_xlim(0, 1)


def _draw_permutation(figure: Figure, result: "ProbeResult") -> None:
    by_head = result.tables.get("median TVD by layer and head")
    axes, *more = figure.subplots(1, 1 if by_head is None else 2, squeeze=False)[0]
    if by_head is not None:
        _label_axes(more[0], "head", "layer")
        shown = more[0].imshow(by_head, cmap="Blues", origin="lower", aspect="auto", vmin=0)
        figure.colorbar(shown, ax=more[0], shrink=0.8).set_label("median TVD, all rows of the head", fontsize=8)
    _label_axes(axes, "largest weight, mean over heads", "median TVD of shuffled attention")
    _draw_violins(axes, result.get_column("largest weight"), result.get_column("median TVD"))
    axes.set_ylim(bottom=0)


def _draw_adversary(figure: Figure, result: "ProbeResult") -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.9])
    _label_axes(left, "JSD of the most distant weights with the same output", "inputs")
    found, bound = result.get_column("JSD"), result.get_column("attainable JSD")
    edges = np.linspace(0, JSD_AXIS_MAX, 15).tolist()
    left.hist([found, bound], edges, color=[_BLUE, _GREY], label=["found", "attainable"])
    left.legend(fontsize=7, frameon=False)
    _label_axes(middle, "largest weight, mean over heads", "JSD found")
    _draw_violins(middle, result.get_column("largest weight"), found)
    middle.set_ylim(0, JSD_AXIS_MAX)
    line = max(result.records, key=lambda one: one["JSD"])
    if "tokens" not in line:
        right.axis("off")
        return
    _draw_weight_pair(right, line)


def _draw_weight_pair(axes: Axes, line: dict[str, Any]) -> None:
    """The weights of one input, the model's own and the adversary's, as two columns of one heat map."""
    pair = np.array([line["own weights"], line["other weights"]]).T
    axes.imshow(pair, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks([0, 1], ["own", f"adversary\nTVD {line['TVD']:.3f}"], fontsize=7)
    axes.set_yticks(
        range(len(pair)), [escape_invisible(token) for token in line["tokens"]], fontsize=6, parse_math=False
    )
    axes.set_title(f"most distant, both {line['prediction']}", fontsize=8, color=TEXT_COLOUR, parse_math=False)


def _draw_correlation(figure: Figure, result: "ProbeResult") -> None:
    """A histogram for each pair, 30 bins from −1 to 1, in the colours of the predicted classes."""
    evidence = [one for one in result.records[0] if one.startswith("τ(last row, ")] + ["τ(gradient, left out)"]
    every = figure.subplots(1, len(evidence), squeeze=False, sharey=True)[0]
    classes = list(dict.fromkeys(line["prediction"] for line in result.records))
    shown = classes if len(classes) <= len(_CLASS_COLOURS) else [None]
    for axes, pair in zip(every, evidence, strict=True):
        groups = [
            [o[pair] for o in result.records if c in (None, o["prediction"]) and np.isfinite(o[pair])] for c in shown
        ]
        axes.hist(
            groups, np.linspace(-1, 1, 31).tolist(), stacked=True, color=_CLASS_COLOURS[: len(shown)], label=shown
        )
        axes.axvline(0, color=TEXT_COLOUR, linewidth=0.6)
        inside = pair[2:-1].removeprefix("last row, ")
        _label_axes(axes, "tau-b", "inputs" if axes is every[0] else "").set_title(
            inside, fontsize=8, color=TEXT_COLOUR
        )
    if shown != [None]:
        every[0].legend(fontsize=7, frameon=False)


def _draw_seeds(figure: Figure, result: "ProbeResult") -> None:
    left, right = figure.subplots(1, 2)
    _label_axes(left, "largest weight, mean over heads", "median JSD of other seeds' attention")
    _draw_violins(left, result.get_column("largest weight"), result.get_column("median JSD"))
    left.set_ylim(0, JSD_AXIS_MAX)
    _label_axes(right, "median TVD of other seeds' outputs", "median JSD of their attention")
    right.scatter(
        result.get_column("median TVD"), result.get_column("median JSD"), s=8, color=_BLUE, alpha=0.6, linewidths=0
    )
    right.set_xlim(0, 1)
    right.set_ylim(0, JSD_AXIS_MAX)


def _draw_frontier(figure: Figure, result: "ProbeResult") -> None:
    axes = _make_labelled_axes(figure, "TVD of the output from the model's", "JSD of attention from the model's")
    adversaries = [line for line in result.records if line["strength"] is not None]
    axes.plot(
        [o["TVD"] for o in adversaries], [o["JSD"] for o in adversaries], color=_BLUE, marker="o", label="adversaries"
    )
    for line in adversaries:
        axes.annotate(
            line["point"],
            (line["TVD"], line["JSD"]),
            fontsize=7,
            color=MUTED_COLOUR,
            xytext=(4, 3),
            textcoords="offset points",
        )
    for line in result.records:
        if line["strength"] is None:
            axes.plot(line["TVD"], line["JSD"], marker="s", linestyle="", color=_GREY)
            axes.annotate(
                line["point"],
                (line["TVD"], line["JSD"]),
                fontsize=7,
                color=TEXT_COLOUR,
                xytext=(4, -8),
                textcoords="offset points",
            )
    axes.set_xlim(left=0)
    axes.set_ylim(0, JSD_AXIS_MAX)
    axes.legend(fontsize=7, frameon=False)


def _draw_heads(figure: Figure, result: "ProbeResult") -> None:
    layers, heads = (max(line[part] for line in result.records) + 1 for part in ("layer", "head"))
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    _label_axes(left, "head", "layer")
    values = result.get_column("ablation").reshape(layers, heads)
    shown = left.imshow(values, cmap="Blues", origin="lower", aspect="auto")
    figure.colorbar(shown, ax=left, shrink=0.8).set_label("TVD without the head", fontsize=8)
    _label_axes(right, "removed heads, the least important first", "fraction of unchanged predictions")
    for measure, curve in result.tables["pruning"].items():
        points = [(point["silenced"], point["agreement"]) for point in curve]
        right.plot(*zip(*points, strict=True), marker=".", label=measure)
    right.set_ylim(0, 1.02)
    right.legend(fontsize=7, frameon=False)


def _draw_skips(figure: Figure, result: "ProbeResult") -> None:
    axes = _make_labelled_axes(figure, "layer", "share of the skip connection")
    for form in ("flow", "norm", "gradient"):
        axes.plot(result.get_column("layer"), result.get_column(form), marker=".", label=form)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7, frameon=False)


def _draw_estimate_bars(figure: Figure, result: "ProbeResult") -> None:
    shown = result.estimates
    figure.set_figheight(1.2 + 0.24 * len(shown))
    axes = _make_labelled_axes(figure, "mean over inputs, with its 95 % interval", "")
    means = np.array([f.interval.mean for f in shown])
    gaps = np.array([[f.interval.mean - f.interval.low, f.interval.high - f.interval.mean] for f in shown]).T
    rows = np.arange(len(shown))
    axes.barh(rows, np.nan_to_num(means), 0.6, color=_BLUE)
    axes.errorbar(means, rows, xerr=np.clip(gaps, 0, None), fmt="none", ecolor=TEXT_COLOUR, linewidth=0.8)
    axes.set_yticks(rows, [f"{f.name} (n = {f.interval.count})" for f in shown])
    axes.invert_yaxis()


_DRAW_FUNCTIONS: dict[str, Callable[[Figure, "ProbeResult"], None]] = {
    "correlation": _draw_correlation,
    "permutation": _draw_permutation,
    "seeds": _draw_seeds,
    "frontier": _draw_frontier,
    "adversary": _draw_adversary,
    "heads": _draw_heads,
    "skips": _draw_skips,
}
