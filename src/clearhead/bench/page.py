"""`clearhead report`: one self-contained HTML page about a run, in the look of all pages."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

import numpy as np

from clearhead.bench import plots
from clearhead.bench.explaining import method_of
from clearhead.bench.reading_back import Finished, Section, Table
from clearhead.bench.statistics import Interval, differences, ranks
from clearhead.bench.tables import Column, ordered
from clearhead.errors import ClearheadError
from clearhead.methods import REGISTRY
from clearhead.show.html import document_of
from clearhead.show.layout import name
from clearhead.show.markup import Markup, Part, joined, tag

FOOT = (
    "Means over examples with 95 % bootstrap intervals. Ranks by Wilcoxon’s signed-rank test between every two "
    "methods, corrected by Holm: methods that the examples cannot tell apart share a range of ranks."
)


def page(run: Finished) -> str:
    """The whole page."""
    job = run.about["job"]
    about = [f"{job['model']} (weights {run.about['model']})", f"{job['data']}", run.about["versions"]]
    sections = [_section(section) for section in run.sections]
    return document_of(
        " · ".join(["clearhead", name(str(job["model"])), name(str(job["data"]))]),
        "Which explanation is true?",
        [tag("p", name(", ".join(about)), class_="ch-note"), *sections, *_cost(run), *_refused(run)],
        FOOT,
        (files("clearhead.bench") / "report.css").read_text(encoding="utf-8"),
    )


def _section(section: Section) -> Markup:
    shown = [table for figure in section.headline for table in section.tables(figure)]
    on_correct = [table for figure in section.headline for table in section.tables(figure, section.correct)]
    return tag(
        "section",
        tag("h2", name(section.name)),
        *(_panel(f"{table.figure}, {table.better} is better", _table(table)) for table in shown),
        *(_panel(f"{table.figure}, only examples predicted correctly", _table(table)) for table in on_correct),
        *_overall(section),
        _curves(section),
        *_disputes(section),
        tag("div", *_folded(section, shown), class_="ch-more ch-panel"),
        class_="ch-input",
    )


def _panel(title: str, *parts: Part) -> Markup:
    return tag("div", tag("h3", name(title)), *parts, class_="ch-panel")


def _scrolled(table: Markup, label: str) -> Markup:
    return tag("div", table, class_="ch-scroll", tabindex=0, role="region", aria_label=label)


def _table(table: Table) -> Markup:
    intervals = [column.intervals() for column in table.columns]
    places = [ranks(column.values, table.smaller_is_better) for column in table.columns]
    methods = list(dict.fromkeys(method for column in table.columns for method in column.values))
    ends = [_ends(own.values()) for own in intervals]
    rows = []
    for method in ordered(methods, intervals, table.smaller_is_better):
        cells: list[Markup] = []
        for own, place, (low, high) in zip(intervals, places, ends, strict=True):
            if method not in own or not own[method].count:
                cells.append(tag("td", "–"))
                continue
            found = own[method]
            said = tag("small", f" [{_number(found.low)}, {_number(found.high)}] ")
            rank = tag("span", place[method], class_="ch-rank", title="rank")
            cells.append(tag("td", plots.whisker(found, low, high), _number(found.mean), said, rank))
        control = "ch-control" if method in ("random", "position") else None
        rows.append(tag("tr", tag("th", name(method), scope="row"), *cells, class_=control))
    heads = [tag("th", f"{name(c.name)} ({_counted(c)})", scope="col") for c in table.columns]
    head = tag("thead", tag("tr", tag("th", "method", scope="col"), *heads))
    return _scrolled(tag("table", head, tag("tbody", *rows), class_="ch-figures"), table.figure)


def _counted(column: Column) -> str:
    return "1 example" if len(column.examples) == 1 else f"{len(column.examples)} examples"


def _ends(intervals: Iterable[Interval]) -> tuple[float, float]:
    found = [value for one in intervals for value in (one.low, one.high) if not math.isnan(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _overall(section: Section) -> Iterator[Markup]:
    for part, by_method in section.overall().items():
        figures = list(next(iter(by_method.values())))
        rows = [
            [method, *(_number(own[figure]) for figure in figures)]
            for method, own in sorted(by_method.items(), key=lambda one: -one[1][figures[-1]])
        ]
        yield _panel(f"{part}: over all examples at once", _plain(["method", *figures], rows))


def _plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", name(words), scope="col") for words in heads)))
    made = [
        tag("tr", tag("th", name(first), scope="row"), *(tag("td", name(words)) for words in rest))
        for first, *rest in rows
    ]
    return _scrolled(tag("table", head, tag("tbody", *made), class_="ch-figures"), heads[0])


def _curves(section: Section) -> Part:
    drawn = [plots.curves(name(title), by_method) for title, by_method in section.curves().items()]
    return _panel("Curves, means over examples", tag("div", *drawn, class_="ch-plots")) if drawn else None


def _disputes(section: Section) -> Iterator[Markup]:
    for figure in section.headline[:1]:
        found = section.disputes(figure)
        if found:
            rows = [
                [one.example, one.part, *(f"{method} {_number(value)}" for method, value in (one.best, one.worst))]
                for one in found
            ]
            heads = ["example", "part", f"best by {figure}", "worst"]
            yield _panel("Where methods disagree most", _plain(heads, rows))


def _folded(section: Section, shown: Sequence[Table]) -> Iterator[Markup]:
    for table in shown:
        for column in table.columns:
            if len(column.values) > 1:
                title = f"Every two methods: {table.figure}, {column.name}"
                yield tag("details", tag("summary", name(title)), _pairs(column))
    facts = [
        tag("tr", tag("th", key, scope="row"), tag("td", name(json.dumps(value, ensure_ascii=False))))
        for key, value in section.settings.items()
    ]
    table_of_facts = tag("table", tag("tbody", *facts), class_="ch-facts")
    yield tag("details", tag("summary", f"Settings ({section.hash})"), table_of_facts)


def _pairs(column: Column) -> Markup:
    """Differences with their tests; how many more examples would decide what these do not."""
    rows = []
    for one in sorted(differences(column.values), key=lambda one: (one.holm, -abs(one.effect), one.first, one.second)):
        more = "decided" if one.significant else "no difference" if one.more is None else f"{one.more:,} more"
        found = one.difference
        said = f"{_number(found.mean)} [{_number(found.low)}, {_number(found.high)}]"
        effect = "∞" if math.isinf(one.effect) else f"{one.effect:.2f}".replace("-", "−")
        rows.append([f"{one.first} − {one.second}", said, f"{one.holm:.2g}", effect, more])
    return _plain(["pair", "difference", "p (Holm)", "effect size", "examples"], rows)


def _cost(run: Finished) -> Iterator[Markup]:
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
    panel = joined(_plain(heads, rows), tag("p", note, class_="ch-note") if note else None)
    yield tag("section", tag("h2", "Cost per method"), tag("div", panel, class_="ch-panel"), class_="ch-input")


def _declared(method: str) -> str:
    try:
        return REGISTRY[method_of(method).name].declaration.cost
    except (KeyError, ClearheadError):
        return "–"


def _refused(run: Finished) -> Iterator[Markup]:
    if run.refused:
        rows = [[what, why] for what, why in sorted(run.refused.items())]
        panel = tag("div", _plain(["what", "why"], rows), class_="ch-panel")
        yield tag("section", tag("h2", "Not measured"), panel, class_="ch-input")
