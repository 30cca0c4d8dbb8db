"""Rows of `leaderboard.py run` → docs/leaderboard.json (committed) → docs/leaderboard.md.

The page contains nothing that is not in the summary: means with intervals, ranks by paired tests of the mean with
Holm's correction, and the agreement of two orders of methods (Kendall's tau-b of their means, with an interval).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from leaderboard import CASES, read_chunk_lines
from scipy.stats import kendalltau

from clearhead.bench.chunk_explanations import CONTROL_METHODS
from clearhead.stats import RATE_BOUNDS, ConfidenceInterval, compute_mean_interval, compute_rank_ranges

TIES_NOTE = (
    "Number of columns of each table in which a method cannot be distinguished from the best. Columns with too few "
    "examples to distinguish any two methods are not counted, and have no bold cells."
)
#: Results of benchmarks/perturbation.py on a GPU.
COST_FILE = Path(__file__).parent / "results" / "perturbation" / "h200.json"
#: By example and method.
ScoresByMethod = dict[str, dict[str, float]]
NUM_TAU_RESAMPLES = 200
#: A method measured on less than this fraction of a column's examples is not tested against the others.
MIN_EXAMPLE_FRACTION = 0.5
#: Tables of rates, whose values often are exactly 0 or 1.
RATE_TABLES = frozenset({"truth", "rationale", "object"})
TOO_SLOW_REASON = "omitted: it takes longer than all others together, and there was not enough time"


@dataclass(frozen=True)
class LeaderboardColumn:
    """A column: a metric of a protocol.

    Attributes:
        protocol: Name of the protocol.
        metric: Name of the metric.
        table_name: Name of the table.
        smaller_is_better: Whether smaller values are better.
        part_suffix: Suffix of the parts that belong to the column.
        title_suffix: Text after the name of the stream in the title.
        excluded_from_agreement: Whether the column is excluded from the comparison of orders of methods.
    """

    protocol: str
    metric: str
    table_name: str
    smaller_is_better: bool = False
    part_suffix: str = ""
    title_suffix: str = ""
    excluded_from_agreement: bool = False

    def format_name(self, part: str) -> str:
        return f"{self.table_name}, {part.removesuffix(self.part_suffix)}{self.title_suffix}"


LEADERBOARD_COLUMNS = (
    LeaderboardColumn("truth", "minimal average precision", "truth"),
    LeaderboardColumn("subsets", "sensitivity 0.3", "sensitivity"),
    LeaderboardColumn(
        "eraser",
        "aopc",
        "eraser",
        part_suffix="/delete/positive",
        title_suffix=": comprehensiveness",
        excluded_from_agreement=True,
    ),
    LeaderboardColumn(
        "eraser",
        "aopc",
        "eraser",
        smaller_is_better=True,
        part_suffix="/delete/keep",
        title_suffix=": sufficiency",
        excluded_from_agreement=True,
    ),
    LeaderboardColumn("rationales", "auprc", "rationale"),
    *(
        LeaderboardColumn(
            "rationales",
            f"{figure} @{count}",
            "rationale",
            title_suffix=f": {figure} @{count}",
            excluded_from_agreement=True,
        )
        for figure in ("token f1", "iou f1")
        for count in (10, 20, 40, 80)
    ),
    LeaderboardColumn("segmentation", "inside mass", "object"),
)
TABLE_HEADINGS = {
    "truth": (
        "Ground-truth evidence",
        "Average precision of the units that determine the label by construction, with all units ranked by score; if "
        "several sets are each sufficient, that of the set that the method finds best. `random` is the chance level.",
    ),
    "gap": (
        "Faithfulness: removal",
        "Area between two curves of the predicted class's probability: units with the lowest scores removed first, and "
        "units with the highest scores removed first; special tokens are kept. 0 is chance, larger is better. The "
        "column names give the removed stream and its replacement.",
    ),
    "sensitivity": (
        "Faithfulness: sensitivity-n",
        "Correlation, over 32 random subsets of 30 % of the units, of the sum of their scores with the decrease of the "
        "explained scalar when they are removed. 0 is chance.",
    ),
    "eraser": (
        "Faithfulness: ERASER",
        "Decrease of the predicted class's probability when the 1, 5, 10, 20 and 50 % of the tokens with the highest "
        "scores are deleted (comprehensiveness, larger is better), and when all others are deleted (sufficiency, "
        "smaller is better); means over the five.",
    ),
    "rationale": (
        "Human rationales",
        "The words that annotators marked as evidence in movie reviews (ERASER): area under the precision–recall curve "
        "(first column), F1 of the k words with the highest scores (token f1 @k), and F1 of their spans, where a span "
        "counts if it overlaps an annotated one by half (iou f1 @k). This is not ground truth about the model: its "
        "evidence may differ from that of humans.",
    ),
    "object": (
        "Object localisation",
        "Fraction of the positive relevance on the animal. This is not ground truth about the model, either.",
    ),
}
PAGE_HEADER = """# Leaderboard: which explanations are correct?

Generated by `make leaderboard` from docs/leaderboard.json; the single measurements are not committed. Every method of
clearhead with its default settings, on models of the zoo. Mean [95 % interval] · rank. Methods that cannot be
distinguished on the examples (paired t tests corrected for skewness on the examples that both explained, Holm's
correction over all pairs; [how intervals and tests hold](statistics.md)) share a range of ranks; **bold** cells cannot
be distinguished from the best. The number of examples of a method is in parentheses where it is smaller than that of
the column: with less than half of them, or in another run, it has no rank. Rows are sorted by mean rank, for
orientation only. "–": does not apply, or was omitted; the reasons are listed at the end. `random` and `position` are
controls.

`clearhead bench` measures other methods, models and data in the same way. Existing results of another run, from another
machine or with fewer methods, are reused with `--merge`, and only the missing ones are computed (results with other
versions, another batch size or seed count as missing):

```console
$ clearhead bench --model zoo:logic --data known:logic --protocols truth --methods generic,lime \\
    --merge runs/there --out runs/here
$ clearhead report runs/here
```
"""


def read_models(folder: Path) -> dict[str, dict[str, Any]]:
    """By model: the values of each column, and the metadata of the run."""
    found = {}
    for model in CASES:
        lines = read_chunk_lines(folder / model)
        if lines:
            rows = [row for line in lines for row in line["rows"]]
            # refused on one device, a method may have been measured on another, but by the same protocol
            measured = {f"{row['protocol']}: {row['method']}" for row in rows}
            there = {row["method"] for row in rows}
            refused = {what: why for line in lines for what, why in line["refused"].items() if what not in measured}
            about = {
                name: " and ".join(sorted({line["about"][name] for line in lines}))
                for name in ("versions", "device", "dtype", "data")
            }
            seconds = round(sum(line["seconds"] for line in lines), 1)
            found[model] = {
                "values": collect_columns(rows),
                "refused": refused,
                "left_out": {method: TOO_SLOW_REASON for method in CASES[model].slow_methods if method not in there},
                "about": {**about, "seconds": seconds},
            }
    return found


def _parse_method(refused: str) -> str:
    """
    >>> _parse_method("perturb-text: deeplift")
    'deeplift'
    """
    return refused.partition(": ")[2]


def collect_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, bool, ScoresByMethod]]:
    """By name of the column (kind and part): its kind, whether smaller is better, and its values."""
    made: dict[str, tuple[str, bool, ScoresByMethod]] = {}
    areas: dict[str, dict[str, ScoresByMethod]] = {}
    for row in rows:
        for shown in LEADERBOARD_COLUMNS:
            if (
                row["protocol"] == shown.protocol
                and row["part"].endswith(shown.part_suffix)
                and shown.metric in row["figures"]
            ):
                values = made.setdefault(
                    shown.format_name(row["part"]), (shown.table_name, shown.smaller_is_better, {})
                )[2]
                values.setdefault(row["method"], {})[row["example"]] = row["figures"][shown.metric]
        if row["protocol"].startswith("perturb-"):
            stream, fill, direction = row["part"].split("/")
            values = areas.setdefault(f"gap, {stream}: {fill}", {}).setdefault(direction, {})
            values.setdefault(row["method"], {})[row["example"]] = row["figures"]["probability clearhead"]
    for name, by_direction in areas.items():
        low, high = by_direction["positive"], by_direction["negative"]
        gaps = {
            method: {example: high[method][example] - value for example, value in own.items()}
            for method, own in low.items()
        }
        made[name] = ("gap", False, gaps)
    return made


def align_examples(values: ScoresByMethod) -> dict[str, np.ndarray]:
    """Every method on the same examples, NaN where it has none."""
    examples = sorted({example for own in values.values() for example in own})
    return {method: np.array([own.get(one, np.nan) for one in examples]) for method, own in sorted(values.items())}


def select_well_measured(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The methods that have enough of the examples to be tested against others.

    >>> list(select_well_measured({"a": np.ones(4), "b": np.array([1, np.nan, np.nan, np.nan])}))
    ['a']
    """
    return {name: own for name, own in values.items() if (~np.isnan(own)).mean() >= MIN_EXAMPLE_FRACTION}


def summarise(folder: Path) -> dict[str, Any]:
    models, every = {}, read_models(folder)
    for model, one in every.items():
        tables = {}
        for name, (kind, smaller, values) in one["values"].items():
            own = align_examples(values)
            places = compute_rank_ranges(select_well_measured(own), smaller)
            shown = {}
            for method, numbers in own.items():
                found = compute_mean_interval(numbers, bounds=RATE_BOUNDS if kind in RATE_TABLES else None)
                figures = [_round_or_none(value) for value in (found.mean, found.low, found.high)]
                shown[method] = [*figures, found.count, places.get(method)]
            examples = max(len(numbers) for numbers in own.values())
            tables[name] = {"kind": kind, "smaller": smaller, "examples": examples, "methods": shown}
        models[model] = {**one["about"], "refused": one["refused"], "left_out": one["left_out"], "tables": tables}
    return {"schema": "clearhead/leaderboard", "version": 1, "models": models, "agreement": compute_agreements(every)}


def _round_or_none(value: float) -> float | None:
    """As JSON has it: one example has no interval, and none not even a mean."""
    return None if math.isnan(value) else round(value, 4)


def compute_agreements(models: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kendall's tau of the orders of methods in every two columns of a model, without controls."""
    found = []
    for model, one in models.items():
        apart = {shown.title_suffix for shown in LEADERBOARD_COLUMNS if shown.excluded_from_agreement}
        names = [name for name in one["values"] if not name.endswith(tuple(apart))]
        for place, first in enumerate(names):
            for second in names[place + 1 :]:
                pair = [select_well_measured(align_examples(one["values"][name][2])) for name in (first, second)]
                shared = [m for m in pair[0] if m in pair[1] and m not in CONTROL_METHODS]
                if len(shared) > 4:
                    tau = _compute_tau(*(np.stack([own[m] for m in shared]) for own in pair))
                    found.append({"model": model, "first": first, "second": second, "tau": tau, "methods": len(shared)})
    return found


def _compute_tau(one: np.ndarray, other: np.ndarray) -> list[float]:
    """Tau of the means over examples, with a bootstrap interval (methods × examples)."""
    rng = np.random.default_rng(0)

    def tau(a: np.ndarray, b: np.ndarray) -> float:
        return float(kendalltau(np.nanmean(a, 1), np.nanmean(b, 1)).statistic)

    drawn = []
    for _ in range(NUM_TAU_RESAMPLES):  # the examples of both are the same, in one order, where there are as many
        first = rng.integers(one.shape[1], size=one.shape[1])
        same = one.shape[1] == other.shape[1]
        drawn.append(tau(one[:, first], other[:, first if same else rng.integers(other.shape[1], size=other.shape[1])]))
    return [round(float(value), 3) for value in (tau(one, other), *np.nanquantile(drawn, [0.025, 0.975]))]


def render_page(summary: Mapping[str, Any], introduction: str, cost: Mapping[str, Any] | None = None) -> str:
    parts = [PAGE_HEADER, introduction, _render_best_counts(summary)]
    for kind, (title, said) in TABLE_HEADINGS.items():
        table = _render_table(summary, kind)
        if table:
            parts.append(f"## {title}\n\n{said}\n\n{table}")
    parts += [
        _render_agreement(summary),
        _render_runs(summary),
        *([] if cost is None else [_render_cost(cost)]),
        _render_unmeasured(summary),
    ]
    return "\n".join(part.strip() + "\n" for part in parts)


def _select_tables(summary: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{model}{name.removeprefix(kind)}", table)
        for model, one in summary["models"].items()
        for name, table in one["tables"].items()
        if table["kind"] == kind
    ]


def _parse_best_rank(rank: str) -> int:
    return int(rank.split("–")[0])


def _render_table(summary: Mapping[str, Any], kind: str) -> str:
    found = _select_tables(summary, kind)
    if not found:
        return ""
    methods = {method for _, table in found for method in table["methods"]}

    def mean_rank(method: str) -> float:
        given = [table["methods"][method][4] for _, table in found if method in table["methods"]]
        own = [np.mean([int(end) for end in rank.split("–")]) for rank in given if rank]
        return float(np.mean(own)) if own else np.inf

    lines = ["| method | " + " | ".join(name for name, _ in found) + " |", "| --- |" + " --- |" * len(found)]
    for method in sorted(methods, key=lambda one: (mean_rank(one), one)):
        cells = [
            _format_cell(table["methods"].get(method), table["examples"], _separates_methods(table))
            for _, table in found
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "| examples | " + " | ".join(str(table["examples"]) for _, table in found) + " |"])


def _separates_methods(table: Mapping[str, Any]) -> bool:
    """Whether any two methods can be distinguished; if not, being among the best means nothing."""
    return any(rank is not None and _parse_best_rank(rank) > 1 for *_, rank in table["methods"].values())


def _format_cell(figures: list[Any] | None, examples: int, decided: bool = True) -> str:
    """
    >>> _format_cell([0.5, 0.4, 0.6, 10, "1–3"], 10), _format_cell([0.5, 0.4, 0.6, 4, None], 10)
    ('**0.500 [0.400, 0.600] · 1–3**', '0.500 [0.400, 0.600] (4)')
    >>> _format_cell([0.5, None, None, 1, None], 10)
    '0.500 (no interval) (1)'
    """
    if figures is None or not figures[3]:
        return "–"
    mean, low, high, count, rank = figures
    known = ConfidenceInterval(mean, math.nan if low is None else low, math.nan if high is None else high, count)
    said = known.format_without_count() + (f" ({count})" if count < examples else "")
    if rank is None:
        return said
    return f"**{said} · {rank}**" if decided and _parse_best_rank(rank) == 1 else f"{said} · {rank}"


def _render_best_counts(summary: Mapping[str, Any]) -> str:
    """Count the columns in which a method cannot be distinguished from the best."""
    kinds = [
        kind for kind in TABLE_HEADINGS if any(_separates_methods(table) for _, table in _select_tables(summary, kind))
    ]
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for kind in kinds:
        for table in (table for _, table in _select_tables(summary, kind) if _separates_methods(table)):
            for method, figures in table["methods"].items():
                if figures[4] is None:
                    continue
                best, of = counts.setdefault(method, {}).get(kind, (0, 0))
                counts[method][kind] = (best + (_parse_best_rank(figures[4]) == 1), of + 1)

    def order(method: str) -> tuple[float, str]:
        own = [best / of for kind, (best, of) in counts[method].items() if kind in ("truth", "gap", "sensitivity")]
        return (-float(np.mean(own)) if own else 0.0, method)

    lines = ["## Tied for the best", "", TIES_NOTE, ""]
    lines += ["| method | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for method in sorted(counts, key=order):
        cells = [
            f"{counts[method][kind][0]} of {counts[method][kind][1]}" if kind in counts[method] else "–"
            for kind in kinds
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _render_agreement(summary: Mapping[str, Any]) -> str:
    lines = [
        "## Do the measures agree?",
        "",
        "Kendall's tau-b of the orders of methods by two measures (without controls), with an approximate interval "
        "(from resampled examples, which adds noise: the interval of a high tau is biased downwards): 1 the same "
        "order, 0 no relation, −1 the reverse.",
        "",
        "| model | first measure | second measure | methods | tau |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in summary["agreement"]:
        tau, low, high = (f"{value:.2f}".replace("-", "−") for value in one["tau"])
        lines.append(
            f"| {one['model']} | {one['first']} | {one['second']} | {one['methods']} | {tau} [{low}, {high}] |"
        )
    return "\n".join(lines)


def _render_runs(summary: Mapping[str, Any]) -> str:
    lines = ["## The runs", "", "| model | data | device | dtype | seconds | versions |", "| --- |" + " --- |" * 5]
    for model, one in summary["models"].items():
        where = f"{one['data']} | {one['device']} | {one['dtype']}"
        lines.append(f"| {model} | {where} | {one['seconds']:,.0f} | {one['versions']} |")
    return "\n".join(lines)


def _render_cost(found: Mapping[str, Any]) -> str:
    """Results of benchmarks/perturbation.py: passes, time and memory of a larger run, and the authors' code."""
    ours, machine = found["clearhead"], found["machine"]
    notes = ours["notes"]
    last = notes[-1]
    lines = [
        "## Cost of a run",
        "",
        f"`benchmarks/perturbation.py`: {last['pictures']} images of pets, {len(found['methods'])} methods (including "
        f"the controls), {len(found['fractions'])} fractions, both directions, on {machine['device']} "
        f"({machine['dtype']}, torch {machine['torch']}). `zoo:pets` evaluated {ours['judged']:,} perturbed images, "
        f"each of the {ours['distinct']:,} distinct ones once, and {ours['explained']:,} images were explained by all "
        f"methods in the same pass: {last['seconds']:,.0f} s. Memory by number of images:",
        "",
        "| images | seconds | MiB | peak GPU memory, MiB |",
        "| --- | --- | --- | --- |",
    ]
    for note in _select_evenly(notes):
        gpu = f"{note['cuda mib']:,.0f}" if "cuda mib" in note else "–"
        lines.append(f"| {note['pictures']} | {note['seconds']:,.0f} | {note['mib']:,.0f} | {gpu} |")
    if "compared" in found:
        both, theirs = found["compared"], found["authors"]
        lines += [
            "",
            "The authors' implementation (one method and one image at a time, maps in files, batches of 16), on the "
            f"first {both['pictures']} of them: {theirs['explained']:,} images explained and {theirs['judged']:,} "
            f"evaluated (including those of the two controls), {theirs['distinct']:,} of them distinct, in "
            f"{both['authors']:,.0f} s; clearhead took "
            f"{both['clearhead']:,.0f} s for these ({both['ratio']:.1f} times as fast). {_describe_curve_gap(both)}",
        ]
    return "\n".join(lines)


def _describe_curve_gap(both: Mapping[str, Any]) -> str:
    """
    >>> _describe_curve_gap({"gap": 7e-16})
    'The curves are equal to 7e-16.'
    """
    if both["gap"] < 1e-6:
        return f"The curves are equal to {both['gap']:.0e}."
    units = both["gap of controls"] < 1e-3
    return (
        f"{both['apart']} of {both['curves']:,} curves differ by more than 0.001 (at most {both['gap']:.2f}): a "
        f"different batch size changes rounding, which can swap {'units' if units else 'units or classes'} that are "
        f"nearly tied. (The curves of the controls, whose order is not computed by the model, are equal to "
        f"{both['gap of controls']:.0e}.)"
    )


def _select_evenly(notes: Sequence[Mapping[str, float]], rows: int = 5) -> list[Mapping[str, float]]:
    """Evenly spaced, the last among them."""
    places = np.unique(np.linspace(len(notes) / rows, len(notes), rows).round().astype(int).clip(1)) - 1
    return [notes[place] for place in places]


def _render_unmeasured(summary: Mapping[str, Any]) -> str:
    """By reason: methods that were not measured on a model, with the protocols if others measured it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for model, one in summary["models"].items():
        for method, why in one["left_out"].items():
            reasons.setdefault((method, why), []).append(model)
        measured = {method for table in one["tables"].values() for method in table["methods"]}
        protocols: dict[tuple[str, str], list[str]] = {}
        for what, why in one["refused"].items():
            protocols.setdefault((_parse_method(what), why), []).append(what.partition(": ")[0])
        for (method, why), names in protocols.items():
            where = f"{model} ({', '.join(names)})" if method in measured else model
            reasons.setdefault((method, why), []).append(where)
    lines = [f"- `{method}` on {', '.join(models)}: {why}" for (method, why), models in sorted(reasons.items())]
    return "\n".join(["## Not measured", "", *lines])


def _has_all_methods(model: Mapping[str, Any]) -> bool:
    """Whether all methods were measured: the controls are among them."""
    return any(CONTROL_METHODS[0] in table["methods"] for table in model["tables"].values())


def merge_model_summaries(before: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    """Merge two summaries of a model. Methods that were measured separately are added without a rank.

    The rows of the first summary are not stored, so there is nothing to pair the new ones with.
    """
    if new is None or before is None or _has_all_methods(new):
        made = new or before
        assert made is not None
        return made
    tables = {name: {**table, "methods": dict(table["methods"])} for name, table in before["tables"].items()}
    measured = set()
    for name in tables.keys() & new["tables"].keys():
        found = new["tables"][name]["methods"]
        tables[name]["methods"] |= {method: [*figures[:4], None] for method, figures in found.items()}
        measured |= set(found)
    return {
        **before,
        **{name: _join_names(before[name], new[name]) for name in ("device", "versions")},
        "seconds": round(before["seconds"] + new["seconds"], 1),
        "refused": {w: why for w, why in before["refused"].items() if _parse_method(w) not in measured}
        | new["refused"],
        "left_out": {method: why for method, why in before["left_out"].items() if method not in measured},
        "tables": tables,
    }


def _join_names(before: str, new: str) -> str:
    """
    >>> _join_names("CPU and NVIDIA H200", "CPU")
    'CPU and NVIDIA H200'
    """
    return " and ".join(sorted({*before.split(" and "), *new.split(" and ")}))


def write_leaderboard(rows: Path, docs: Path) -> None:
    """Write the summary of models with rows (those of other models stay the same), and the page."""
    path, findings = docs / "leaderboard.json", Path(__file__).parent / "leaderboard_seen.md"
    summary = summarise(rows)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        new = set(summary["models"])
        whole = {model for model in new if _has_all_methods(summary["models"][model])}
        summary["models"] = {
            model: merge_model_summaries(before["models"].get(model), summary["models"].get(model))
            for model in CASES
            if model in new or model in before["models"]
        }
        agreement = summary["agreement"] + [one for one in before["agreement"] if one["model"] not in whole]
        summary["agreement"] = sorted(agreement, key=lambda one: list(CASES).index(one["model"]))
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    seen = findings.read_text(encoding="utf-8") if findings.exists() else ""
    cost = json.loads(COST_FILE.read_text(encoding="utf-8")) if COST_FILE.exists() else None
    (docs / "leaderboard.md").write_text(render_page(summary, seen, cost), encoding="utf-8")
