"""Write known-answer results to model cards and docs/known-answers.md: which methods find the ground-truth evidence.

    python benchmarks/truth.py --models logic --count 100 --json build/truth/logic.json
    python packages/zoo/train/known_answers.py --from build/truth/*.json [--page docs/known-answers.md]

The first command takes a while on a laptop (every method, model by model), the second a moment. The results of every
method on every example are stored next to the page (`known-answers.json`). A method that is measured again on a model
replaces its stored results there (a control only with at least as many examples), and ranks are computed over all
results. Without --from, the page and the cards are written from the stored results.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cards import write_card_files

import clearhead
import clearhead_zoo
from clearhead.bench.chunk_explanations import CONTROL_METHODS
from clearhead.bench.protocols.base import Measurement
from clearhead.bench.tables import MetricColumn, build_columns, render_markdown_table
from clearhead.stats import RATE_BOUNDS

METRICS = ("precision", "average precision")
#: Patches at the same distance from the centre are tied; another order changes a figure by no more than this.
MAX_TIE_DIFFERENCE = 0.06
#: The means by which clearhead recommends a method (`engine/recommendation.py`).
EVIDENCE_PATH = Path(__file__).parents[3] / "src" / "clearhead" / "engine" / "known_answers.json"
MEASURED_NOTE = (
    "On {count} held-out examples: precision (the fraction of evidence units among the k units with the highest "
    "scores, where k is the number of evidence units) and average precision, each with its 95 % interval. "
    "Special tokens and question words are excluded. If several sets of units are each sufficient, the set that the "
    "method finds best counts. `random` is the chance level."
)
PAGE_HEADER = """# Which methods find the ground-truth evidence?

Every method of clearhead with its default settings, on the zoo's models whose evidence is known by construction.
{measured} The range after the dot is the rank: methods that cannot be distinguished on these examples (paired t tests
corrected for skewness, Holm's correction; [how intervals and tests hold](statistics.md)) share a range of ranks. Rows
are sorted by their means over the columns, for orientation only: the order is not a ranking.{others} "–": the method
does not apply; `ex.methods()` gives the reason.{missing}
`recall-4k`, whose inputs are long, is in the [leaderboard](leaderboard.md) and not on this page.

{where}

Made by `make known-answers`.
"""

OTHER_EXAMPLES_NOTE = (
    ' "(24 others)": measured on this number of examples, which are not those of the other methods, so there is a mean '
    "and no rank."
)

#: A model's stream and a method's name.
ResultKey = tuple[str, str, str]


@dataclass
class MethodResults:
    """What one method had on a model's examples: each figure by example, and where it ran."""

    device_name: str
    metrics: dict[str, dict[str, float]] = field(default_factory=lambda: {figure: {} for figure in METRICS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="measured", type=Path, nargs="*", default=[], help="result files of truth.py")
    parser.add_argument("--page", type=Path, default=Path("docs/known-answers.md"), help="the page to write")
    options = parser.parse_args()
    kept = options.page.with_suffix(".json")
    known = merge_results(read_stored_results(kept), read_measured_results(options.measured))
    write_stored_results(kept, known)
    write_evidence(EVIDENCE_PATH, known)
    tables = build_tables(known)
    models = _list_models(known)
    for model in models:
        _write_card(model, tables)
    options.page.write_text(render_page(known, tables), encoding="utf-8")
    print(f"{options.page} and the cards of {', '.join(models)}")


def write_evidence(path: Path, known: Mapping[ResultKey, MethodResults]) -> None:
    """Write the mean average precision of each method by model and stream, on the examples of the controls."""
    columns: dict[str, dict[str, float]] = {}
    for (model, part, method), results in known.items():
        examples = known[model, part, "position"].metrics["average precision"]
        values = [x for example, x in results.metrics["average precision"].items() if example in examples]
        if len(values) == len(examples):
            columns.setdefault(f"{model}/{part}", {})[method] = round(float(np.mean(values)), 4)
    content = {"figure": "minimal average precision", "columns": columns}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def build_tables(known: Mapping[ResultKey, MethodResults]) -> dict[str, list[MetricColumn]]:
    return {
        figure: [c for model in _list_models(known) for c in _build_columns(model, known, figure)] for figure in METRICS
    }


def render_page(known: Mapping[ResultKey, MethodResults], tables: Mapping[str, list[MetricColumn]]) -> str:
    count = max(len(column.examples) for column in tables[METRICS[0]])
    others = OTHER_EXAMPLES_NOTE if any(column.unranked for table in tables.values() for column in table) else ""
    told = MEASURED_NOTE.format(count=f"up to {count}")
    head = PAGE_HEADER.format(
        measured=told, others=others, where=format_devices(known), missing=format_missing_methods(known)
    )
    parts = [f"## {figure.capitalize()}\n\n{render_markdown_table(table)}\n" for figure, table in tables.items()]
    return "\n".join([head, *parts])


def _list_models(known: Mapping[ResultKey, MethodResults]) -> list[str]:
    return list(dict.fromkeys(model for model, _, _ in known))


def merge_results(
    stored: Mapping[ResultKey, MethodResults], measured_results: Mapping[ResultKey, MethodResults]
) -> dict[ResultKey, MethodResults]:
    """What is measured again takes the place of what was kept; a control, which is in every run, not that of more.

    Scenes of `shapes` depend on how many are drawn: the first of 24 and the first of 60 have one name and are two.
    `position` has the same figures on the same examples, anywhere; where it has not, the new ones get other names.
    """
    known = dict(stored)
    for (model, part, method), one in measured_results.items():
        baseline = (model, part, "position")
        if (
            baseline in stored
            and baseline in measured_results
            and not _agree(stored[baseline], measured_results[baseline])
        ):
            one = _rename_examples(one, f" of {len(measured_results[baseline].metrics[METRICS[0]])}")
        before = known.get((model, part, method))
        if before is None or method not in CONTROL_METHODS or _count_examples(one) >= _count_examples(before):
            known[model, part, method] = one
    return known


def _count_examples(one: MethodResults) -> int:
    return len(one.metrics[METRICS[0]])


def _agree(one: MethodResults, other: MethodResults) -> bool:
    """Whether they agree where both have a figure, but for the order of tied patches."""
    pairs = [(x, other.metrics[f][e]) for f in METRICS for e, x in one.metrics[f].items() if e in other.metrics[f]]
    return all(abs(x - y) < MAX_TIE_DIFFERENCE for x, y in pairs)


def _rename_examples(one: MethodResults, end: str) -> MethodResults:
    return MethodResults(one.device_name, {f: {e + end: x for e, x in own.items()} for f, own in one.metrics.items()})


def read_measured_results(files: Sequence[Path]) -> dict[ResultKey, MethodResults]:
    """What `truth.py` wrote; a method's examples may be in several files, and the controls are in each."""
    known: dict[ResultKey, MethodResults] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        for row in content["rows"]:
            one = known.setdefault((row["model"], row["part"], row["method"]), MethodResults(content["where"]))
            for figure in METRICS:
                one.metrics[figure][row["example"]] = round(row["figures"][f"minimal {figure}"], 12)
    return known


def read_stored_results(file: Path) -> dict[ResultKey, MethodResults]:
    if not file.exists():
        return {}
    known = {}
    for model, parts in json.loads(file.read_text(encoding="utf-8")).items():
        for part, kept in parts.items():
            for method, own in kept["methods"].items():
                pairs = {figure: zip(kept["examples"], own[figure], strict=True) for figure in METRICS}
                figures = {figure: {e: x for e, x in both if x is not None} for figure, both in pairs.items()}
                known[model, part, method] = MethodResults(own["where"], figures)
    return known


def write_stored_results(file: Path, known: Mapping[ResultKey, MethodResults]) -> None:
    """By model and stream: the examples' names once, and what each method had on them."""
    content: dict[str, dict[str, Any]] = {}
    for model, part in dict.fromkeys((model, part) for model, part, _ in known):
        own = {method: one for (m, p, method), one in known.items() if (m, p) == (model, part)}
        examples = sorted({example for one in own.values() for example in one.metrics[METRICS[0]]})
        listed = {
            method: {"where": one.device_name, **{f: [one.metrics[f].get(e) for e in examples] for f in METRICS}}
            for method, one in own.items()
        }
        content.setdefault(model, {})[part] = {"examples": examples, "methods": listed}
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def format_missing_methods(known: Mapping[ResultKey, MethodResults]) -> str:
    """Which methods apply to a model and are not on the page: what its card has of an earlier run, what was never."""
    there: dict[str, set[str]] = {}
    for model, _, method in known:
        there.setdefault(model, set()).add(method)
    earlier: list[str] = []
    never: list[str] = []
    for model, methods in there.items():
        card = {name for own in clearhead_zoo.card(model).get("truth", {}).get("found", {}).values() for name in own}
        applies = [line.name for line in clearhead.load(f"zoo:{model}").methods() if line.applies]
        left = [name for name in applies if name not in methods]
        for names, said in (([n for n in left if n in card], earlier), ([n for n in left if n not in card], never)):
            if names:
                said.append(f"{', '.join(f'`{name}`' for name in names)} on {model}")
    told = (
        f" Or only an earlier run measured it, and the model's card has its figures: {'; '.join(earlier)}."
        if earlier
        else ""
    )
    return told + (f" Or it was never measured: {'; '.join(never)}." if never else "")


def format_devices(known: Mapping[ResultKey, MethodResults]) -> str:
    """Where most was measured, and which methods were measured elsewhere; controls are the same anywhere."""
    ran: dict[str, dict[str, set[str]]] = {}
    for (model, _, method), one in known.items():
        if method not in CONTROL_METHODS:
            ran.setdefault(method, {}).setdefault(one.device_name, set()).add(model)
    usual = Counter(where for places in ran.values() for where in places).most_common(1)[0][0]
    others: dict[str, list[str]] = {}
    for method, places in sorted(ran.items()):
        for where, models in places.items():
            if where != usual:
                of = f" for {', '.join(sorted(models))}" if len(places) > 1 else ""
                others.setdefault(where + of, []).append(f"`{method}`")
    rest = [f"{', '.join(methods)} on {where}" for where, methods in others.items()]
    return f"Measured on {usual}" + (f"; {'; '.join(rest)}." if rest else ".")


def _build_columns(model: str, known: Mapping[ResultKey, MethodResults], figure: str) -> list[MetricColumn]:
    own = [
        Measurement(example, method, part, {figure: value})
        for (m, part, method), one in known.items()
        if m == model
        for example, value in one.metrics[figure].items()
    ]
    return [_separate_incomparable(column) for column in build_columns(model, own, figure, bounds=RATE_BOUNDS)]


def _separate_incomparable(column: MetricColumn) -> MetricColumn:
    """Methods that share no example with the controls cannot be compared with the others, pair by pair."""
    controls = [~np.isnan(own) for method, own in column.values_by_method.items() if method in CONTROL_METHODS]
    if not controls:
        return column
    here = np.any(controls, axis=0)
    apart = {m: own[~np.isnan(own)] for m, own in column.values_by_method.items() if np.isnan(own[here]).all()}
    among = {m: own for m, own in column.values_by_method.items() if m not in apart}
    used = ~np.all([np.isnan(own) for own in among.values()], axis=0)
    examples = [example for example, is_used in zip(column.examples, used, strict=True) if is_used]
    return replace(
        column, examples=examples, values_by_method={m: own[used] for m, own in among.items()}, unranked=apart
    )


def _write_card(model: str, tables: dict[str, list[MetricColumn]]) -> None:
    found: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    count = 0
    others: dict[str, int] = {}
    for figure, table in tables.items():
        for column in table:
            if column.name.split(", ")[0] == model:
                part = found.setdefault(column.name.removeprefix(f"{model}, "), {})
                count = max(count, len(column.examples))
                for method, one in column.compute_intervals().items():
                    ends = (one.low, one.high) if one.has_bounds else (None, None)
                    part.setdefault(method, {})[figure] = [x if x is None else round(x, 3) for x in (one.mean, *ends)]
                for method, own in column.unranked.items():
                    others[method] = max(others.get(method, 0), len(own))
    folder = clearhead_zoo.path(model)
    card = clearhead_zoo.card(model)
    before = card.get("truth", {}).get("found", {})  # what was not measured again stays as it was
    joined = {part: {**before.get(part, {}), **own} for part, own in found.items()}
    ordered = {part: dict(sorted(own.items(), key=_get_sort_key)) for part, own in joined.items()}
    told = MEASURED_NOTE.format(count=count) + "".join(
        f" `{m}`: on {few} other examples." for m, few in sorted(others.items())
    )
    write_card_files(folder, {**card, "truth": {"measured": told, "found": ordered}})


def _get_sort_key(item: tuple[str, dict[str, list[float]]]) -> float:
    return -item[1]["average precision"][0]


if __name__ == "__main__":
    main()
