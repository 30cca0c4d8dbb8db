"""A run's tables for papers and for other programs: LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Iterator, Mapping

from clearhead.bench.run_results import Finished, Section, Table
from clearhead.bench.tables import largest_first, ordered
from clearhead.stats import ranks

COLUMNS = ("protocol", "settings", "part", "figure", "better", "method", "mean", "low", "high", "examples", "rank")
_SPECIAL = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
_SPECIAL |= {"^": r"\textasciicircum{}", "–": "--", "−": "$-$", "×": r"$\times$", "→": r"$\to$", "<": "$<$", ">": "$>$"}


def csv_text(run: Finished) -> str:
    """Every figure of every method, with its interval and its rank; over all examples at once: no interval, no rank."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in run.sections:
        writer.writerows(_lines(section))
    return out.getvalue()


def _lines(section: Section) -> Iterator[list[object]]:
    for figure in section.figures:
        for table in section.tables(figure):
            for column in table.columns:
                places = ranks(column.values, table.smaller_is_better)
                for method, found in sorted(column.intervals().items()):
                    ends = (repr(found.low), repr(found.high)) if found.known else ("", "")
                    yield [
                        *(section.name, section.hash, column.name, figure, table.better, method),
                        *(repr(found.mean), *ends, found.count, places[method]),
                    ]
    for part, by_method in section.overall().items():
        for method, figures in by_method.items():
            for figure, value in figures.items():
                name = f"{figure} (over all examples)"
                yield [section.name, section.hash, part, name, "larger", method, repr(value), "", "", "", ""]


def latex_text(run: Finished) -> str:
    """A tabular for each headline figure, for the package booktabs, ranks behind the bar; then what is no mean."""
    made = []
    for section in run.sections:
        made += [_tabular(section, table) for figure in section.headline for table in section.tables(figure)]
        made += [_overall(section, part, by_method) for part, by_method in section.overall().items()]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(made)


def _tabular(section: Section, table: Table) -> str:
    head = " & ".join(["method", *(escaped(column.name) for column in table.columns)])
    intervals = [column.intervals() for column in table.columns]
    places = [ranks(column.values, table.smaller_is_better) for column in table.columns]
    methods = list(dict.fromkeys(method for column in table.columns for method in column.values))
    lines = [
        f"% {section.name}: {table.figure} ({table.better} is better); mean [95% interval] | rank",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
    ]
    for method in ordered(methods, intervals, table.smaller_is_better):
        cells = [
            f"{str(own[method]).replace('-', '$-$')} $|$ {escaped(place[method])}" if method in own else "--"
            for own, place in zip(intervals, places, strict=True)
        ]
        lines.append(rf"{' & '.join([escaped(method), *cells])} \\")
    counts = " & ".join(["examples", *(str(len(column.examples)) for column in table.columns)])
    return "\n".join([*lines, r"\midrule", rf"{counts} \\", r"\bottomrule", r"\end{tabular}", ""])


def _overall(section: Section, part: str, by_method: Mapping[str, Mapping[str, float]]) -> str:
    """Figures over all examples at once, as mIoU and COCO's AP: they have no interval."""
    figures = list(next(iter(by_method.values())))
    lines = [
        f"% {section.name}: {part}, over all examples at once",
        rf"\begin{{tabular}}{{l{'r' * len(figures)}}}",
        r"\toprule",
        rf"{' & '.join(['method', *map(escaped, figures)])} \\",
        r"\midrule",
    ]
    for method, own in largest_first(by_method):
        cells = ["--" if math.isnan(own[figure]) else f"{own[figure]:.3f}" for figure in figures]
        lines.append(rf"{' & '.join([escaped(method), *cells])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escaped(text: str) -> str:
    """
    >>> escaped("attention_x & 10 %")
    'attention\\\\_x \\\\& 10 \\\\%'
    """
    return "".join(_SPECIAL.get(sign, sign) for sign in text)
