"""The figures of docs/attention-on-trial.md: one panel per model."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from clearhead.explanation.json_keys import to_snake_case

MODEL_TITLES = {
    "sentiment": "zoo:sentiment",
    "logic": "zoo:logic",
    "recall": "zoo:recall",
    "bilstm": "BiLSTM",
}
BLUE, GREY, INK = "#3b6fb6", "#b4b6bd", "#24262b"
#: Results of the probes by "model/probe".
ResultsByProbe = dict[str, dict[str, Any]]


def get_column(results: ResultsByProbe, model: str, probe: str, name: str) -> np.ndarray:
    lines = results.get(f"{model}/{probe}", {}).get("records", [])
    return np.array([line.get(to_snake_case(name), math.nan) for line in lines], dtype=float)


def draw_panels(
    draw: Callable[[Any, ResultsByProbe, str], bool], results: ResultsByProbe, x: str, y: str, models: Sequence[str]
) -> Figure | None:
    """One panel per model; None if no panel has data."""
    figure = Figure(figsize=(2.7 * len(models), 2.6), layout="constrained")
    every = figure.subplots(1, len(models), squeeze=False)[0]
    shown = False
    for axes, model in zip(every, models, strict=True):
        axes.set_title(MODEL_TITLES[model], fontsize=9, color=INK)
        axes.set_xlabel(x, fontsize=8)
        axes.set_ylabel(y if axes is every[0] else "", fontsize=8)
        axes.tick_params(labelsize=7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        shown |= draw(axes, results, model)
    return figure if shown else None


def draw_permutation(axes: Any, results: ResultsByProbe, model: str) -> bool:
    largest, moved = (get_column(results, model, "permutation", name) for name in ("largest weight", "median TVD"))
    axes.scatter(largest, moved, s=6, color=BLUE, alpha=0.5, linewidths=0)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return len(moved) > 0


def draw_adversary(axes: Any, results: ResultsByProbe, model: str) -> bool:
    found, bound = (get_column(results, model, "adversary", name) for name in ("JSD", "attainable JSD"))
    axes.hist(
        [found, bound], np.linspace(0, math.log(2), 15).tolist(), color=[BLUE, GREY], label=["found", "attainable"]
    )
    seeds = get_column(results, model, "seeds", "median JSD")
    if len(seeds):
        axes.axvline(seeds.mean(), color=INK, linewidth=1, linestyle="--", label="other seeds, mean")
    axes.legend(fontsize=6, frameon=False)
    return len(found) > 0


def draw_frontier(axes: Any, results: ResultsByProbe, model: str) -> bool:
    lines = results.get(f"{model}/frontier", {}).get("records", [])
    own = [line for line in lines if line["strength"] is not None]
    axes.plot(
        [o["TVD"] for o in own], [o["JSD"] for o in own], marker="o", markersize=3, color=BLUE, label="adversaries"
    )
    seeds = results.get(f"{model}/seeds", {}).get("tables", {}).get("seeds", [])
    axes.plot([s["TVD"] for s in seeds], [s["JSD"] for s in seeds], "s", markersize=4, color=GREY, label="other seeds")
    for line in lines:
        if line["point"].startswith("uniform"):
            marker = "^" if line["point"] == "uniform" else "v"
            axes.plot(line["TVD"], line["JSD"], marker, markersize=5, color=INK, label=line["point"])
    widest = max([0.05, *(line["TVD"] for line in [*lines, *seeds])])
    axes.set(xlim=(-0.02 * widest, 1.05 * widest), ylim=(-0.01, 0.72))
    axes.legend(fontsize=6, frameon=False)
    return bool(lines)


def draw_pruning(axes: Any, results: ResultsByProbe, model: str) -> bool:
    curves = results.get(f"{model}/heads", {}).get("tables", {}).get("pruning", {})
    for measure, curve in curves.items():
        axes.plot([p["silenced"] for p in curve], [p["agreement"] for p in curve], marker=".", label=measure)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=6, frameon=False)
    return bool(curves)


def draw_skips(axes: Any, results: ResultsByProbe, model: str) -> bool:
    lines = results.get(f"{model}/skips", {}).get("records", [])
    for form in ("flow", "norm", "gradient"):
        axes.plot(
            [o["layer"] for o in lines],
            [math.nan if o[form] is None else o[form] for o in lines],
            marker=".",
            label=form,
        )
    axes.set_ylim(0, 1)
    axes.legend(fontsize=6, frameon=False)
    return bool(lines)


PROBE_FIGURES: dict[str, tuple[Callable[[Any, ResultsByProbe, str], bool], str, str, tuple[str, ...], str]] = {
    "permutation": (
        draw_permutation,
        "largest weight",
        "median TVD",
        tuple(MODEL_TITLES),
        "Shuffled weights at S1: each point is an input.",
    ),
    "adversary": (draw_adversary, "JSD", "inputs", tuple(MODEL_TITLES), "Distance of weights with the same output."),
    "frontier": (
        draw_frontier,
        "TVD of answers",
        "JSD of attention",
        tuple(MODEL_TITLES),
        "Adversarial training, with seeds and uniform attention.",
    ),
    "pruning": (
        draw_pruning,
        "heads silenced",
        "predictions that stay",
        tuple(MODEL_TITLES)[:3],
        "Heads removed, the least important first.",
    ),
    "skips": (
        draw_skips,
        "layer",
        "share of the skip connection",
        tuple(MODEL_TITLES)[:3],
        "Share of the skip connection, by three measures.",
    ),
}
