"""Write docs/attention-on-trial.md and its figures from the results of benchmarks/probes.py.

    python benchmarks/probes_page.py [--from build/probes] [--to docs] [--reading benchmarks/probes_reading.md]

Tables and figures are made from the JSON files alone; the discussion is written by hand, and the means that it names
are filled in.
"""

import argparse
import json
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from probes_figures import MODEL_TITLES, PROBE_FIGURES, ResultsByProbe, draw_panels, get_column

from clearhead.bench.protocols.known_evidence import compute_ranking_metrics as found_in
from clearhead.stats import RATE_BOUNDS, ConfidenceInterval, compute_mean_interval

MAX_SAME_PREDICTION_TVD = 0.05


def read_results(folder: Path) -> ResultsByProbe:
    """Results of the probes by "model/probe"."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        model, _, probe = path.stem.partition("-")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("found"):
            found[f"{model}/{probe}"] = content["found"] | {"size": content["size"], "device": content["device"]}
    return found


def format_estimate(results: ResultsByProbe, model: str, probe: str, name: str) -> str:
    """One figure of a probe's table, with its interval."""
    estimates = results.get(f"{model}/{probe}", {}).get("estimates", [])
    return next((_format_interval(_parse_interval(one)) for one in estimates if one["name"] == name), "–")


def _parse_interval(one: dict[str, Any]) -> ConfidenceInterval:
    """Unknown values are null in JSON."""
    mean, low, high = (math.nan if one[key] is None else one[key] for key in ("mean", "low", "high"))
    return ConfidenceInterval(mean, low, high, one["count"])


def _format_interval(one: ConfidenceInterval) -> str:
    return str(one) if math.isfinite(one.mean) else "–"


def format_mean_interval(values: np.ndarray, bounds: tuple[float, float] | None = None) -> str:
    """
    >>> format_mean_interval(np.array([1.0])), format_mean_interval(np.array([np.inf]))
    ('1.000 (no interval), n = 1', '–')
    """
    return _format_interval(compute_mean_interval(values[np.isfinite(values)], bounds=bounds))


def format_unaffected_fraction(results: ResultsByProbe, model: str) -> str:
    """Of the inputs with a weight above 0.5, the fraction whose output hardly changes when weights are shuffled."""
    largest, moved = (get_column(results, model, "permutation", name) for name in ("largest weight", "median TVD"))
    peaked = largest > 0.5
    return (
        "no such inputs"
        if not peaked.any()
        else format_mean_interval((moved[peaked] < MAX_SAME_PREDICTION_TVD).astype(float), RATE_BOUNDS)
    )


def format_frontier_point(results: ResultsByProbe, model: str) -> str:
    lines = results.get(f"{model}/frontier", {}).get("records", [])
    kept = [line for line in lines if line["strength"] is not None and line["TVD"] <= MAX_SAME_PREDICTION_TVD]
    best = max(kept, key=lambda line: line["JSD"], default=None)
    return "–" if best is None else f"{best['JSD']:.3f} (TVD {best['TVD']:.3f}, {best['point']})"


def format_frontier_estimate(results: ResultsByProbe, model: str, name: str, figure: str) -> str:
    return format_estimate(results, model, "frontier", f"{name}: {figure}")


def format_attainable_fraction(results: ResultsByProbe, model: str) -> str:
    found, bound = (get_column(results, model, "adversary", name) for name in ("JSD", "attainable JSD"))
    return format_mean_interval(found / bound) if len(found) else "–"


CellRenderer = Callable[[ResultsByProbe, str], str]


def make_estimate_cell(probe: str, name: str) -> CellRenderer:
    return lambda results, model: format_estimate(results, model, probe, name)


def format_leave_one_out(results: ResultsByProbe, model: str) -> str:
    names = [one["name"] for one in results.get(f"{model}/correlation", {}).get("estimates", [])]
    kinds = [name for name in names if name.startswith("τ(last row, left out")]
    return format_estimate(results, model, "correlation", kinds[-1]) if kinds else "–"


TABLE_ROWS: dict[str, dict[str, CellRenderer]] = {
    "The models": {"accuracy on the measured inputs": make_estimate_cell("uniform", "accuracy")},
    "Correlation (tau-b of the last row's attention, mean over heads; without special tokens)": {
        "with the gradient, attention detached": make_estimate_cell(
            "correlation", "τ(last row, gradient, attention detached)"
        ),
        "with the gradient": make_estimate_cell("correlation", "τ(last row, gradient)"),
        "with leave-one-out (deleted)": format_leave_one_out,
        "of gradient and leave-one-out: the ceiling": make_estimate_cell("correlation", "τ(gradient, left out)"),
        "chance": make_estimate_cell("correlation", "chance, last row"),
    },
    "Permutation (100 draws)": {
        "S1, the read-out row: median TVD": make_estimate_cell("permutation", "median TVD"),
        "S1: fraction of permutations that change the prediction": make_estimate_cell("permutation", "flips"),
        "S1, special tokens and the row's own position kept: median TVD": make_estimate_cell(
            "permutation-kept", "median TVD"
        ),
        "S2, that row in every layer: median TVD": make_estimate_cell("permutation-S2", "median TVD"),
        "S4, all attention: median TVD": make_estimate_cell("permutation-S4", "median TVD"),
        "inputs with a weight above 0.5: fraction with median TVD "
        f"< {MAX_SAME_PREDICTION_TVD}": format_unaffected_fraction,
    },
    "Uniform attention, and the mean attention of the other inputs, in the trained model": {
        f"{figure}, {shown}{place}": make_estimate_cell("uniform", f"{figure}, {way}{place}")
        for figure in ("TVD", "accuracy")
        for way, shown in (("", "uniform, "), ("mean attention, ", "mean, "))
        for place in ("read-out row", "layer 0", "layer 1", "all layers")
    },
    f"Adversary (S1: distant weights with the same output, TVD ≤ {MAX_SAME_PREDICTION_TVD})": {
        "JSD found": make_estimate_cell("adversary", "JSD"),
        "maximum JSD of any weights": make_estimate_cell("adversary", "attainable JSD"),
        "fraction of the maximum": format_attainable_fraction,
        "S2: JSD found": make_estimate_cell("adversary-S2", "JSD"),
    },
    "Seeds (retrained models)": {
        "median JSD of attention": make_estimate_cell("seeds", "median JSD"),
        "median TVD of outputs": make_estimate_cell("seeds", "median TVD"),
        "accuracy of seeds": make_estimate_cell("seeds", "accuracy of seeds"),
    },
    "Adversarial training (S1)": {
        f"largest JSD with TVD ≤ {MAX_SAME_PREDICTION_TVD}": format_frontier_point,
        "λ = 0: TVD": lambda results, model: format_frontier_estimate(results, model, "λ 0", "TVD"),
        "trained with uniform attention in that row: accuracy": lambda r, m: format_frontier_estimate(
            r, m, "uniform, trained", "accuracy"
        ),
    }
    | {
        f"λ = {strength}: {figure}": make_estimate_cell("frontier", f"λ {strength}: {figure}")
        for strength in ("0.01", "0.03", "0.1")
        for figure in ("JSD", "TVD", "accuracy")
    },
    "Diagnostic (accuracy of a classifier without context, by guide)": {
        guide: make_estimate_cell("diagnostic", guide)
        for guide in ("uniform", "own", "base", "adversary", "rollout", "generic", "grad-sam", "attcat")
    }
    | {guide: make_estimate_cell("diagnostic", guide) for guide in ("input-x-gradient", "saliency", "random")},
}


def render_table(results: ResultsByProbe, rows: dict[str, CellRenderer]) -> list[str]:
    head = ["| | " + " | ".join(MODEL_TITLES.values()) + " |", "| --- |" + " --- |" * len(MODEL_TITLES)]
    return [
        *head,
        *(
            f"| {name} | " + " | ".join(cell(results, model) for model in MODEL_TITLES) + " |"
            for name, cell in rows.items()
        ),
    ]


def compute_average_precisions(results: ResultsByProbe, model: str) -> dict[str, np.ndarray]:
    """Average precision against the ground-truth evidence: of methods, the model's weights and the adversary's."""
    found: dict[str, list[float]] = {}
    for row in results.get(f"{model}/truth", {}).get("rows", []):
        found.setdefault(row["method"], []).append(row["figures"]["minimal average precision"])
    for line in results.get(f"{model}/adversary", {}).get("records", []):
        *sets, aside = [np.array(part, dtype=bool) for part in line.get("evidence", [[]])]
        for name in ("own_weights", "other_weights") if sets and any(part.any() for part in sets) else ():
            scores = np.array(line[name])[~aside]
            order = np.argsort(-scores, kind="stable")
            best = max(found_in(part[~aside], order)["average precision"] for part in sets if part.any())
            found.setdefault({"own_weights": "last row", "other_weights": "adversary's last row"}[name], []).append(
                best
            )
    return {name: np.array(values) for name, values in found.items()}


def render_evidence_table(results: ResultsByProbe) -> list[str]:
    by_model = {model: compute_average_precisions(results, model) for model in ("logic", "recall")}
    names = dict.fromkeys(name for found in by_model.values() for name in found)
    lines = ["| | zoo:logic | zoo:recall |", "| --- | --- | --- |"]
    ranked = sorted(names, key=lambda name: -np.mean([f[name].mean() for f in by_model.values() if name in f]))
    for name in ranked:
        cells = [
            format_mean_interval(found[name], RATE_BOUNDS) if name in found else "–" for found in by_model.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def render_heads_table(results: ResultsByProbe, model: str, count: int = 5) -> list[str]:
    lines = sorted(results.get(f"{model}/heads", {}).get("records", []), key=lambda line: -line["ablation"])[:count]
    head = [
        "| head | TVD without it | with uniform attention | gradient | attends to | entropy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {o['layer']}.{o['head']} | {o['ablation']:.3f} | {o['patching']:.3f} | {o['gradient']:.3f} | "
        f"{o['pattern'].replace('_', ' ')} | {o['entropy']:.2f} |"
        for o in lines
    ]
    return [*head, *rows] if rows else []


def render_runs_table(results: ResultsByProbe) -> list[str]:
    """Size, device and number of inputs of every run."""
    probes = sorted({name.split("/")[1] for name in results})
    lines = ["| | " + " | ".join(MODEL_TITLES.values()) + " |", "| --- |" + " --- |" * len(MODEL_TITLES)]
    for probe in probes:
        found = [results.get(f"{model}/{probe}") for model in MODEL_TITLES]
        counts = [max((f["count"] for f in one.get("estimates", [])), default=0) if one else 0 for one in found]
        cells = [
            "–" if one is None else f"{one['size']}, {one['device']}" + (f", {count} inputs" if count else "")
            for one, count in zip(found, counts, strict=True)
        ]
        lines.append(f"| {probe} | {' | '.join(cells)} |")
    return lines


def fill_in_means(discussion: str, results: ResultsByProbe) -> str:
    """The discussion with means in place of {{model/probe/figure}}, so that text and tables agree."""

    def mean(match: re.Match[str]) -> str:
        model, probe, name = match[1].split("/", 2)
        estimates = results.get(f"{model}/{probe}", {}).get("estimates", [])
        return next((f"{one['mean']:.2f}" for one in estimates if one["name"] == name), "(not measured)")

    blocks = re.split(r"\n\n|\n(?=- )", re.sub(r"\{\{(.+?)\}\}", mean, discussion.strip(), flags=re.DOTALL))
    return "\n\n".join(block if block[0] in "|#" else _wrap_block(block) for block in blocks)


def _wrap_block(block: str) -> str:
    indent = "  " if block.startswith("- ") else ""
    words = " ".join(block.split())
    return textwrap.fill(words, 124, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def render_page(results: ResultsByProbe, folder: Path, discussion: str) -> str:
    sizes = sorted({one["size"] for one in results.values()})
    made = (
        f"Made by `make probes` ({' and '.join(sizes)} size): means with 95 % intervals over inputs "
        "([how they hold](statistics.md))."
    )
    parts = ["# Attention on trial", "", fill_in_means(discussion, results).strip(), "", "## Results", "", made, ""]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, (draw, x, y, models, caption) in PROBE_FIGURES.items():
        figure = draw_panels(draw, results, x, y, models)
        if figure is not None:
            figure.savefig(folder / "figures" / f"trial-{name}.png", dpi=110)
            parts += [f"![{caption}](figures/trial-{name}.png)", "", f"*{caption}*", ""]
    for title, rows in TABLE_ROWS.items():
        parts += [f"### {title}", "", *render_table(results, rows), ""]
    parts += ["### Ground-truth evidence: average precision", "", *render_evidence_table(results), ""]
    for model in ("sentiment", "logic", "recall"):
        if own := render_heads_table(results, model):
            parts += [f"### {MODEL_TITLES[model]}: the most important heads", "", *own, ""]
    parts += ["### Runs", "", *render_runs_table(results), ""]
    said = {one["probe"]: one["conclusion"] for one in results.values() if "conclusion" in one}
    parts += [
        "## What each probe shows and does not show",
        "",
        *(f"- **{probe}.** {says}" for probe, says in said.items()),
        "",
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, default=Path("build/probes"))
    parser.add_argument("--to", type=Path, default=Path("docs"))
    parser.add_argument("--reading", type=Path, default=Path(__file__).with_name("probes_reading.md"))
    arguments = parser.parse_args()
    results = read_results(arguments.source)
    arguments.to.mkdir(parents=True, exist_ok=True)
    written = render_page(results, arguments.to, arguments.reading.read_text(encoding="utf-8"))
    (arguments.to / "attention-on-trial.md").write_text(written, encoding="utf-8")
    print(f"wrote {arguments.to / 'attention-on-trial.md'} from {len(results)} results")


if __name__ == "__main__":
    main()
