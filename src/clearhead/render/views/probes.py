"""Plots of probes for the renderer, one function for each kind; `probing` draws the same for papers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.render import charts
from clearhead.render.mpl.probes import JSD_AXIS_MAX, NUM_WEIGHT_BINS
from clearhead.render.view_model import ViewModel

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult

MAX_WEIGHT_LABEL = "largest weight, mean over heads"
#: Predicted classes get colours of their own where there are no more than this.
MAX_COLOURED_CLASSES = 4


def make_probe_charts(result: "ProbeResult") -> list[ViewModel]:
    """The plots of a probe beside its table; none where the table is all there is to draw."""
    make = _CHART_BUILDERS.get(result.probe)
    return make(result) if make and result.records else []


def _make_weight_scatter(result: "ProbeResult", column: str, up: str, top: float | None = None) -> ViewModel:
    """Values of inputs by the largest weight, and the median of each part of the range that has any."""
    weights, values = result.get_column("largest weight"), result.get_column(column)
    own = np.clip((weights * NUM_WEIGHT_BINS).astype(int), 0, NUM_WEIGHT_BINS - 1)
    filled = [b for b in range(NUM_WEIGHT_BINS) if np.isfinite(values[own == b]).any()]
    medians = charts.make_point_series(
        "median", [(b + 0.5) / NUM_WEIGHT_BINS for b in filled], [np.nanmedian(values[own == b]) for b in filled]
    )
    ends = {"y_range": (0, top)} if top else {}
    return charts.make_scatter_chart(
        f"{up} by the {MAX_WEIGHT_LABEL}",
        [_make_input_series(weights, values)],
        MAX_WEIGHT_LABEL,
        up,
        x_range=(0, 1),
        mean_curve=medians,
        **ends,
    )


def _make_input_series(x: Float[np.ndarray, " input"], y: Float[np.ndarray, " input"]) -> ViewModel:
    return charts.make_point_series("inputs", x, y, point_names=[f"input {place}" for place in range(len(x))])


def _make_permutation_charts(result: "ProbeResult") -> list[ViewModel]:
    return [_make_weight_scatter(result, "median TVD", "median TVD of shuffled attention")]


def _make_adversary_charts(result: "ProbeResult") -> list[ViewModel]:
    counted = {"found": result.get_column("JSD"), "attainable": result.get_column("attainable JSD")}
    edges, title = np.linspace(0, JSD_AXIS_MAX, 15), "JSD of the most distant weights with the same output"
    made = [
        charts.make_histogram(title, counted, edges, "JSD", grey=["attainable"]),
        _make_weight_scatter(result, "JSD", "JSD found", JSD_AXIS_MAX),
    ]
    farthest = max(result.records, key=lambda one: one["JSD"])
    if "tokens" in farthest:
        pair = np.array([farthest["own weights"], farthest["other weights"]], dtype=float)
        said = f"Most distant, both {farthest['prediction']}: TVD of the outputs {farthest['TVD']:.3f}"
        rows = ["own weights", "adversary’s weights"]
        made.append(
            charts.make_heat_map_chart(said, pair, rows, farthest["tokens"], "weights", "token", 1.0, unsigned=True)
        )
    return made


def _make_correlation_charts(result: "ProbeResult") -> list[ViewModel]:
    """A histogram for each pair, 30 bins from −1 to 1, in the colours of the predicted classes."""
    pairs = [one for one in result.records[0] if one.startswith("τ(last row, ")] + ["τ(gradient, left out)"]
    classes = list(dict.fromkeys(line["prediction"] for line in result.records))
    shown: list[Any] = classes if len(classes) <= MAX_COLOURED_CLASSES else [None]

    def counted(pair: str, label: Any) -> Float[np.ndarray, " input"]:
        own = np.array([o[pair] for o in result.records if label in (None, o["prediction"])], dtype=float)
        return own[np.isfinite(own)]

    return [
        charts.make_histogram(
            pair,
            {str(label or "inputs"): counted(pair, label) for label in shown},
            _TAU_BIN_EDGES,
            "tau-b",
            stacked=True,
        )
        for pair in pairs
    ]


_TAU_BIN_EDGES = np.linspace(-1, 1, 31)


def _make_seed_charts(result: "ProbeResult") -> list[ViewModel]:
    answers, attention = result.get_column("median TVD"), result.get_column("median JSD")
    up, across = "median JSD of their attention", "median TVD of other seeds’ outputs"
    ends = {"y_range": (0, JSD_AXIS_MAX), "x_range": (0, 1)}
    return [
        _make_weight_scatter(result, "median JSD", "median JSD of other seeds’ attention", JSD_AXIS_MAX),
        charts.make_scatter_chart("Attention by outputs", [_make_input_series(answers, attention)], across, up, **ends),
    ]


def _make_frontier_charts(result: "ProbeResult") -> list[ViewModel]:
    def series(title: str, lines: list[dict[str, Any]], grey: bool) -> ViewModel:
        names = [str(line["point"]) for line in lines]
        return charts.make_point_series(
            title, [o["TVD"] for o in lines], [o["JSD"] for o in lines], point_names=names, grey=grey
        )

    adversaries = [line for line in result.records if line["strength"] is not None]
    others = [line for line in result.records if line["strength"] is None]
    clouds = [series("adversaries", adversaries, False), *([series("references", others, True)] if others else [])]
    joined = charts.make_point_series("from weak to strong", clouds[0]["x"], clouds[0]["y"])
    across, up = "TVD of the output from the model’s", "JSD of attention"
    return [
        charts.make_scatter_chart(
            "Outputs and attention", clouds, across, up, mean_curve=joined, y_range=(0, JSD_AXIS_MAX)
        )
    ]


def _make_head_charts(result: "ProbeResult") -> list[ViewModel]:
    layers, heads = (max(line[part] for line in result.records) + 1 for part in ("layer", "head"))
    values = result.get_column("ablation").reshape(layers, heads)
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    lines = [
        charts.make_curve(measure, [point["silenced"] for point in curve], [point["agreement"] for point in curve])
        for measure, curve in result.tables["pruning"].items()
    ]
    across, up = "removed heads, the least important first", "fraction of unchanged predictions"
    return [
        charts.make_heat_map_chart("TVD without the head", values, rows, columns, "layer", "head", unsigned=True),
        charts.make_line_chart("Removing heads", lines, across, up, y_range=(0, 1), integer_axis=True),
    ]


def _make_skip_charts(result: "ProbeResult") -> list[ViewModel]:
    layers = [int(layer) for layer in result.get_column("layer")]
    lines = [charts.make_curve(form, layers, result.get_column(form)) for form in ("flow", "norm", "gradient")]
    up = "share of the skip connection"
    return [charts.make_line_chart("Skip connections by layer", lines, "layer", up, y_range=(0, 1), integer_axis=True)]


_CHART_BUILDERS: dict[str, Callable[["ProbeResult"], list[ViewModel]]] = {
    "correlation": _make_correlation_charts,
    "permutation": _make_permutation_charts,
    "seeds": _make_seed_charts,
    "frontier": _make_frontier_charts,
    "adversary": _make_adversary_charts,
    "heads": _make_head_charts,
    "skips": _make_skip_charts,
}
