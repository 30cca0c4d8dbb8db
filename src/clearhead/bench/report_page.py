"""`clearhead report`: one self-contained HTML page about a run, drawn by the renderer of all pages."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from clearhead.bench.chunk_explanations import CONTROLS, method_of
from clearhead.bench.run_results import Finished, Section, Table
from clearhead.bench.tables import Column, agreement_of_parts, largest_first, ordered
from clearhead.errors import ClearheadError
from clearhead.explanation.explanation import plain
from clearhead.methods import REGISTRY
from clearhead.render.charts import curves, line
from clearhead.render.html import alone
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, one_input, view, whole_page
from clearhead.stats import Interval, band, differences, ranks

FOOT = (
    "Means over examples with 95 % bootstrap intervals. Ranks by Wilcoxon’s signed-rank test between every two "
    "methods, corrected by Holm: methods that the examples cannot tell apart share a range of ranks."
)


def page(run: Finished) -> str:
    """The whole page."""
    job = run.about["job"]
    about = [f"{job['model']} (weights {run.about['model']})", f"{job['data']}", run.about["versions"]]
    parts = [*(_section(run, section) for section in run.sections), *_cost(run), *_refused(run)]
    parts[0]["note"] = ". ".join(part for part in (name(", ".join(about)), parts[0].get("note")) if part)
    eyebrow = " · ".join(["clearhead", name(str(job["model"])), name(str(job["data"]))])
    return alone(whole_page(parts, "Which explanation is true?", eyebrow, FOOT))


def _section(run: Finished, section: Section) -> Document:
    shown = [table for figure in section.headline for table in section.tables(figure)]
    on_correct = [table for figure in section.headline for table in section.tables(figure, section.correct)]
    parts = [
        *(_ranking(f"{table.figure}, {table.better} is better", table) for table in shown),
        *(_ranking(f"{table.figure}, only examples predicted correctly", table) for table in on_correct),
        *_agreement(shown),
        *_overall(section),
        *_curves(section),
        *_disputes(section),
    ]
    more = [*_kept(run, section), *_folded(section, shown)]
    return view("section", heading=name(section.name), note=section.protocol.about, parts=parts, more=more)


def _ranking(title: str, table: Table) -> Document:
    """Methods by rank, with the mean and the interval of each column."""
    intervals = [column.intervals() for column in table.columns]
    places = [ranks(column.values, table.smaller_is_better) for column in table.columns]
    methods = list(dict.fromkeys(method for column in table.columns for method in column.values))
    rows = [
        {
            "name": name(method),
            "control": method in CONTROLS,
            "cells": [_cell(own.get(method), place.get(method)) for own, place in zip(intervals, places, strict=True)],
        }
        for method in ordered(methods, intervals, table.smaller_is_better)
    ]
    columns = [f"{name(column.name)} ({_counted(column)})" for column in table.columns]
    ends = [_ends(own.values()) for own in intervals]
    return view("ranking", title=name(title), columns=columns, ends=plain(ends), rows=rows)


def _agreement(shown: Sequence[Table]) -> Iterator[Document]:
    """Whether the verdict depends on the part: on what stood where units were removed, or on the stream."""
    rows = [
        [f"{table.figure}, {table.better} is better", one, other, _number(tau)]
        for table in shown
        for (one, other), tau in agreement_of_parts(table.columns).items()
    ]
    if rows:
        heads = ["figure", "part", "another", "Kendall’s tau-b of the means"]
        yield _table("Do the parts put methods in the same order?", heads, rows)


def _cell(found: Interval | None, rank: Any) -> Document | None:
    if found is None or not found.count:
        return None
    said = [_number(value) for value in (found.mean, *((found.low, found.high) if found.known else ()))]
    figures: Document = plain({"mean": found.mean, "low": found.low, "high": found.high})
    return {**figures, "said": said, "rank": str(rank)}


def _counted(column: Column) -> str:
    return "1 example" if len(column.examples) == 1 else f"{len(column.examples)} examples"


def _ends(intervals: Iterable[Interval]) -> tuple[float, float]:
    found = [value for one in intervals for value in (one.mean, one.low, one.high) if not math.isnan(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)


def _number(value: float) -> str:
    """Nothing to measure, as the AP of large objects where there is none, is no number."""
    return "–" if math.isnan(value) else f"{value:.3f}".replace("-", "−")


def _overall(section: Section) -> Iterator[Document]:
    for part, by_method in section.overall().items():
        figures = list(next(iter(by_method.values())))
        rows = [[method, *(_number(own[figure]) for figure in figures)] for method, own in largest_first(by_method)]
        yield _table(f"{part}: over all examples at once", ["method", *figures], rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Document:
    shown = [[name(words) for words in row] for row in rows]
    return view("table", title=name(title), heads=[name(words) for words in heads], rows=shown)


def _curves(section: Section) -> Iterator[Document]:
    """Means over examples with their intervals."""
    drawn = []
    for one in section.curves():
        lines = []
        for method, values in one.values.items():
            low, high = band(values)
            ends: dict[str, Any] = {"low": low, "high": high} if len(values) > 1 else {}
            lines.append(line(method, one.at[method], values.mean(0), **ends, grey=method in CONTROLS))
        drawn.append(curves(f"{one.part}: {one.up} by {one.across}", lines, one.across, one.up))
    if drawn:
        yield view("panel", title="Curves, means over examples with 95 % intervals", parts=drawn)


def _disputes(section: Section) -> Iterator[Document]:
    for figure in section.headline[:1]:
        found = section.disputes(figure)
        if found:
            rows = [
                [one.example, one.part, *(f"{method} {_number(value)}" for method, value in (one.best, one.worst))]
                for one in found
            ]
            heads = ["example", "part", f"best by {figure}", "worst"]
            yield _table("Where methods disagree most", heads, rows)


def _kept(run: Finished, section: Section) -> Iterator[Document]:
    """The two explanations of each example in dispute, where the run kept them."""
    disputes = [one for figure in section.headline[:1] for one in section.disputes(figure)]
    pairs = dict.fromkeys((one.example, one.best[0], one.worst[0]) for one in disputes)
    kept = run.kept({(example, method) for example, *both in pairs for method in both})
    marked = run.marked({example for example, *_ in pairs})
    for example, *both in pairs:
        group = [kept[example, method] for method in both if (example, method) in kept]
        if group:
            made = one_input(group, marked.get(example))
            yield {**made, "title": name(f"{example}, as {' and '.join(both)} explain it")}


def _folded(section: Section, shown: Sequence[Table]) -> Iterator[Document]:
    for table in shown:
        for column in table.columns:
            if len(column.values) > 1:
                yield _pairs(f"Every two methods: {table.figure}, {column.name}", column)
    facts = [[key, json.dumps(value, ensure_ascii=False)] for key, value in section.settings.items()]
    yield _table(f"Settings ({section.hash})", ["setting", "value"], facts)


def _pairs(title: str, column: Column) -> Document:
    """Differences with their tests; how many more examples would decide what these do not."""
    rows = []
    for one in sorted(differences(column.values), key=lambda one: (one.holm, -abs(one.effect), one.first, one.second)):
        more = "decided" if one.significant else "no difference" if one.more is None else f"{one.more:,} more"
        found = one.difference
        said = str(found).replace("-", "−")
        effect = "∞" if math.isinf(one.effect) else f"{one.effect:.2f}".replace("-", "−")
        rows.append([f"{one.first} − {one.second}", said, f"{one.holm:.2g}", effect, more])
    return _table(title, ["pair", "difference", "p (Holm)", "effect size", "examples"], rows)


def _cost(run: Finished) -> Iterator[Document]:
    """What a method declares, and the seconds of one explanation alone where they were taken."""
    methods = sorted({one.method for section in run.sections for one in section.measurements})
    costs = run.costs
    cheapest = min((value for value in costs.values() if value > 0), default=math.nan)
    rows = []
    for method in methods:
        taken = costs.get(method, math.nan)
        said = ["–", "–"] if np.isnan(taken) else [f"{taken:.3f} s", f"{taken / cheapest:.1f} ×"]
        rows.append([method, _declared(method), *said])
    heads = ["method", "what it needs", "one explanation alone", "of the cheapest"]
    note = f"Chunks took {run.seconds:,.1f} s in all; methods share their passes there." if run.seconds else None
    yield view("section", heading="Cost per method", parts=[_table("", heads, rows)], note=note, more=[])


def _declared(method: str) -> str:
    try:
        return REGISTRY[method_of(method).name].declaration.cost
    except (KeyError, ClearheadError):
        return "–"


def _refused(run: Finished) -> Iterator[Document]:
    if run.refused:
        rows = [[what, why] for what, why in sorted(run.refused.items())]
        yield view("section", heading="Not measured", parts=[_table("", ["what", "why"], rows)], more=[])
