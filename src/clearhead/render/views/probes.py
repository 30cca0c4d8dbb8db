"""Plots of probes for the renderer, one function for each kind; `probing` draws the same for papers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.render import charts
from clearhead.render.mpl.probes import BINS, LARGEST
from clearhead.render.view_model import Document

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult

WEIGHT = "largest weight, mean over heads"
#: Predicted classes get colours of their own where there are no more than this.
CLASSES = 4


def of_probe(result: "ProbeResult") -> list[Document]:
    """The plots of a probe beside its table; none where the table is all there is to draw."""
    make = _PLOTS.get(result.probe)
    return make(result) if make and result.lines else []


def _by_weight(result: "ProbeResult", column: str, up: str, top: float | None = None) -> Document:
    """Values of inputs by the largest weight, and the median of each part of the range that has any."""
    weights, values = result.column("largest weight"), result.column(column)
    own = np.clip((weights * BINS).astype(int), 0, BINS - 1)
    filled = [b for b in range(BINS) if np.isfinite(values[own == b]).any()]
    medians = charts.cloud(
        "median", [(b + 0.5) / BINS for b in filled], [np.nanmedian(values[own == b]) for b in filled]
    )
    ends = {"range": (0, top)} if top else {}
    return charts.points(
        f"{up} by the {WEIGHT}", [_inputs(weights, values)], WEIGHT, up, across_range=(0, 1), means=medians, **ends
    )


def _inputs(x: Float[np.ndarray, " input"], y: Float[np.ndarray, " input"]) -> Document:
    return charts.cloud("inputs", x, y, names=[f"input {place}" for place in range(len(x))])


def _permutation(result: "ProbeResult") -> list[Document]:
    return [_by_weight(result, "median TVD", "median TVD of shuffled attention")]


def _adversary(result: "ProbeResult") -> list[Document]:
    counted = {"found": result.column("JSD"), "attainable": result.column("attainable JSD")}
    edges, title = np.linspace(0, LARGEST, 15), "JSD of the farthest weights with the same answer"
    made = [
        charts.histogram(title, counted, edges, "JSD", grey=["attainable"]),
        _by_weight(result, "JSD", "JSD found", LARGEST),
    ]
    farthest = max(result.lines, key=lambda one: one["JSD"])
    if "tokens" in farthest:
        pair = np.array([farthest["own weights"], farthest["other weights"]], dtype=float)
        said = f"Farthest apart, both {farthest['prediction']}: TVD of the answers {farthest['TVD']:.3f}"
        rows = ["own weights", "adversary’s weights"]
        made.append(charts.heat(said, pair, rows, farthest["tokens"], "weights", "token", 1.0, weights=True))
    return made


def _correlation(result: "ProbeResult") -> list[Document]:
    """A histogram for each pair, 30 bins from −1 to 1, in the colours of the predicted classes."""
    pairs = [one for one in result.lines[0] if one.startswith("τ(last row, ")] + ["τ(gradient, left out)"]
    classes = list(dict.fromkeys(line["prediction"] for line in result.lines))
    shown: list[Any] = classes if len(classes) <= CLASSES else [None]

    def counted(pair: str, label: Any) -> Float[np.ndarray, " input"]:
        own = np.array([o[pair] for o in result.lines if label in (None, o["prediction"])], dtype=float)
        return own[np.isfinite(own)]

    return [
        charts.histogram(
            pair, {str(label or "inputs"): counted(pair, label) for label in shown}, _TAUS, "tau-b", stacked=True
        )
        for pair in pairs
    ]


_TAUS = np.linspace(-1, 1, 31)


def _seeds(result: "ProbeResult") -> list[Document]:
    answers, attention = result.column("median TVD"), result.column("median JSD")
    up, across = "median JSD of their attention", "median TVD of other seeds’ answers"
    ends = {"range": (0, LARGEST), "across_range": (0, 1)}
    return [
        _by_weight(result, "median JSD", "median JSD of other seeds’ attention", LARGEST),
        charts.points("Attention by answers", [_inputs(answers, attention)], across, up, **ends),
    ]


def _frontier(result: "ProbeResult") -> list[Document]:
    def series(title: str, lines: list[dict[str, Any]], grey: bool) -> Document:
        names = [str(line["point"]) for line in lines]
        return charts.cloud(title, [o["TVD"] for o in lines], [o["JSD"] for o in lines], names=names, grey=grey)

    adversaries = [line for line in result.lines if line["strength"] is not None]
    others = [line for line in result.lines if line["strength"] is None]
    clouds = [series("adversaries", adversaries, False), *([series("references", others, True)] if others else [])]
    joined = charts.cloud("from weak to strong", clouds[0]["x"], clouds[0]["y"])
    across, up = "TVD: how far answers lie from the model’s", "JSD of attention"
    return [charts.points("Answers and attention", clouds, across, up, means=joined, range=(0, LARGEST))]


def _heads(result: "ProbeResult") -> list[Document]:
    layers, heads = (max(line[part] for line in result.lines) + 1 for part in ("layer", "head"))
    values = result.column("ablation").reshape(layers, heads)
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    lines = [
        charts.line(measure, [point["silenced"] for point in curve], [point["agreement"] for point in curve])
        for measure, curve in result.tables["pruning"].items()
    ]
    across, up = "heads silenced, the least important first", "share of predictions that stay"
    return [
        charts.heat("TVD without the head", values, rows, columns, "layer", "head", weights=True),
        charts.curves("Silencing heads", lines, across, up, range=(0, 1), whole=True),
    ]


def _skips(result: "ProbeResult") -> list[Document]:
    layers = [int(layer) for layer in result.column("layer")]
    lines = [charts.line(form, layers, result.column(form)) for form in ("flow", "norm", "gradient")]
    up = "share of the skip connection"
    return [charts.curves("Skip connections by layer", lines, "layer", up, range=(0, 1), whole=True)]


_PLOTS: dict[str, Callable[["ProbeResult"], list[Document]]] = {
    "correlation": _correlation,
    "permutation": _permutation,
    "seeds": _seeds,
    "frontier": _frontier,
    "adversary": _adversary,
    "heads": _heads,
    "skips": _skips,
}
