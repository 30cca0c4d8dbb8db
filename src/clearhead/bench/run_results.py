"""A finished run, read back for a report: no model, no data and no GPU, only the folder."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.bench import explanation_store
from clearhead.bench.chunk_explanations import CONTROLS
from clearhead.bench.job import named
from clearhead.bench.protocols.base import Measurement, Protocol
from clearhead.bench.store import Store
from clearhead.bench.tables import Column, columns
from clearhead.errors import ClearheadError, InputError
from clearhead.explanation.multi_stream import AnyExplanation


@dataclass(frozen=True)
class Table:
    """One figure, a column for each part in which it is better the same way."""

    figure: str
    smaller_is_better: bool
    columns: list[Column]

    @property
    def better(self) -> str:
        return "smaller" if self.smaller_is_better else "larger"


@dataclass(frozen=True)
class Dispute:
    """An example that methods are judged by most differently, and who is best and worst on it."""

    example: str
    part: str
    best: tuple[str, float]
    worst: tuple[str, float]

    @property
    def spread(self) -> float:
        return abs(self.best[1] - self.worst[1])


@dataclass(frozen=True)
class Section:
    """One protocol with its settings, and all that was measured by it."""

    name: str
    hash: str
    settings: Mapping[str, Any]
    protocol: Protocol
    measurements: Sequence[Measurement]

    @property
    def figures(self) -> list[str]:
        """Every figure that was measured, the headline's first."""
        found = dict.fromkeys(name for one in self.measurements for name in one.figures)
        return [*(name for name in self.protocol.headline if name in found), *(sorted(set(found) - set(self.headline)))]

    @property
    def headline(self) -> list[str]:
        there = {name for one in self.measurements for name in one.figures}
        return [name for name in self.protocol.headline if name in there] or sorted(there)[:1]

    def tables(self, figure: str, measurements: Sequence[Measurement] | None = None) -> Iterator[Table]:
        """One figure: a table of the parts where more is better, and one of those where less is."""
        given = self.measurements if measurements is None else measurements
        for smaller in (False, True):
            own = [one for one in given if self.protocol.smaller(figure, one.part) == smaller]
            parts = sorted({one.part for one in own})
            made = [
                column for part in parts for column in columns(part, [one for one in own if one.part == part], figure)
            ]
            if made:
                yield Table(figure, smaller, made)

    @cached_property
    def correct(self) -> list[Measurement]:
        """Those of examples that were predicted correctly, where some were and some were not."""
        kept = [one for one in self.measurements if one.figures.get("correct") == 1]
        return kept if len(kept) < len(self.measurements) else []

    def overall(self) -> dict[str, dict[str, dict[str, float]]]:
        """By part and method, what is no mean over examples."""
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for one in self.measurements:
            groups.setdefault((one.part, one.method), []).append(one)
        made: dict[str, dict[str, dict[str, float]]] = {}
        for (part, method), own in sorted(groups.items()):
            found = self.protocol.overall(own)
            if found:
                made.setdefault(part, {})[method] = found
        return made

    def disputes(self, figure: str, count: int = 5) -> list[Dispute]:
        """The examples on which a figure differs most between methods, controls aside."""
        made = []
        for table in self.tables(figure):
            for column in table.columns:
                rivals = {method: own for method, own in column.values.items() if method not in CONTROLS}
                for place, example in enumerate(column.examples):
                    found = [(m, float(own[place])) for m, own in rivals.items() if not np.isnan(own[place])]
                    found.sort(key=lambda one: (one[1] if table.smaller_is_better else -one[1], one[0]))
                    if len(found) > 1 and found[0][1] != found[-1][1]:
                        made.append(Dispute(example, column.name, found[0], found[-1]))
        return sorted(made, key=lambda one: (-one.spread, one.part, one.example))[:count]

    def curves(self) -> list["Curve"]:
        """By part and figure: each method's values at every place, example by example."""
        groups: dict[tuple[str, str, str], dict[str, list[tuple[Sequence[float], Sequence[float]]]]] = {}
        for one in self.measurements:
            for across, ups in (("fraction", ("probability", "accuracy")), ("recall", ("precision",))):
                for up in ups if across in one.curves else ():
                    part = groups.setdefault((one.part, up, across), {})
                    part.setdefault(one.method, []).append((one.curves[across], one.curves[up]))
        made = []
        for which, by_method in sorted(groups.items()):
            shared = {method: _at_shared_places(own) for method, own in sorted(by_method.items())}
            at = {method: list(places) for method, (places, _) in shared.items()}
            made.append(Curve(*which, at=at, values={method: values for method, (_, values) in shared.items()}))
        return made


def _at_shared_places(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> "tuple[Sequence[float], Float[np.ndarray, 'example place']]":
    """Curves at the places of the finest: where tokens go one by one, each example has points of its own."""
    places = max((x for x, _ in curves), key=len)
    return places, np.array([np.interp(places, x, y) for x, y in curves])


@dataclass(frozen=True)
class Curve:
    """What a figure of one part is at every place, by method and example."""

    part: str
    up: str
    across: str
    at: dict[str, list[float]]
    values: "dict[str, Float[np.ndarray, 'example place']]"


class Finished:
    """A run's folder, opened to be told about."""

    def __init__(self, folder: str | Path) -> None:
        self.store = Store(folder)
        self.about = {**self.store.about(), **self.store.about_table()}

    @cached_property
    def sections(self) -> list[Section]:
        found: dict[str, list[Any]] = {}
        for row in self.store.table():
            found.setdefault(row.settings, []).append(row)
        if not found:
            raise InputError(f"the table of {str(self.store.folder)!r} is empty: {self._why_empty()}")
        return [
            self._section(settings, rows)
            for settings, rows in sorted(found.items(), key=lambda own: own[1][0].protocol)
        ]

    def _section(self, settings: str, rows: Sequence[Any]) -> Section:
        known = dict(self.about["settings"].get(settings, {}))
        name = known.pop("protocol", rows[0].protocol)
        tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in known.items()}
        try:
            protocol = named(name, **tuples)
        except ClearheadError:  # one of somebody's own, that is not registered here: larger is taken for better
            protocol = Protocol()
        return Section(name, settings, known, protocol, [row.measurement for row in rows])

    @cached_property
    def refused(self) -> dict[str, str]:
        lacks: dict[str, str] = self.about.get("refused", {})
        return lacks

    def _why_empty(self) -> str:
        return "; ".join(f"{what}: {why}" for what, why in sorted(self.refused.items())) or "it had no examples"

    def kept(self, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], AnyExplanation]:
        """The explanations of these examples and methods, as far as the run kept them."""
        return explanation_store.read(self.store.folder, wanted)

    def marked(self, examples: Collection[str]) -> dict[str, list[int]]:
        """By example, the places of the units that people marked, as far as the run kept them."""
        return explanation_store.marked(self.store.folder, examples)

    @property
    def costs(self) -> dict[str, float]:
        """By method, the seconds of one explanation alone, where they were taken before the run began."""
        try:
            read: dict[str, float] = json.loads((self.store.folder / "costs.json").read_text(encoding="utf-8"))[
                "methods"
            ]
        except (OSError, ValueError, KeyError):
            return {}
        return read

    @property
    def seconds(self) -> float:
        """What the chunks took, one after the other."""
        try:
            lines = (self.store.folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0.0
        return float(sum(map(_seconds, lines)))


def _seconds(line: str) -> float:
    """Of a line that a killed run left half written, none."""
    try:
        return float(json.loads(line)["seconds"])
    except (ValueError, KeyError, TypeError):
        return 0.0
