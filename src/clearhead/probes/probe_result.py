"""What a probe leaves behind: a line for each input, a table with intervals, and what it does and does not show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.explanation.explanation import plain
from clearhead.stats import Interval, interval


@dataclass(frozen=True)
class Finding:
    """One line of a probe's table."""

    name: str
    value: Interval
    #: What the figure means, in a few words.
    meaning: str = ""


@dataclass
class ProbeResult:
    """A probe of one model on some inputs.

    lines: one for each input; findings: means over inputs with bootstrap intervals; says: what follows and what not
    """

    probe: str
    model: str
    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    findings: list[Finding]
    says: str
    #: Figures that belong to no single input, such as a value for each layer and head.
    tables: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> np.ndarray:
        """One figure of every input."""
        return np.array([line[name] for line in self.lines], dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        found = [
            {"name": f.name, "mean": f.value.mean, "low": f.value.low, "high": f.value.high, "count": f.value.count}
            | {"meaning": f.meaning}
            for f in self.findings
        ]
        about = {"schema": "clearhead/probe", "version": 1, "probe": self.probe, "model": self.model}
        rest = {"settings": self.settings, "findings": found, "lines": self.lines, "tables": self.tables}
        return plain({**about, **rest, "says": self.says})

    def markdown(self) -> str:
        """Heading, figure, table, and what follows."""
        told = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        rows = [f"| {f.name} | {f.value} | {f.value.count} | {f.meaning} |" for f in self.findings]
        table = ["| figure | mean [95 % interval] | inputs | what it is |", "| --- | --- | --- | --- |", *rows]
        head = [f"# {self.probe}: {self.model}", "", told, "", f"![{self.probe}](figure.png)", ""]
        return "\n".join([*head, *table, "", self.says, ""])

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        told = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("figure", "mean [95 % interval]", "inputs", "what it is"):
            table.add_column(name)
        for f in self.findings:
            table.add_row(Text(f.name, style="bold"), str(f.value), str(f.value.count), Text(f.meaning))
        head = Text(f"{self.probe} · {self.model} · {len(self.lines)} inputs · {told}")
        return Group(head, table, Text(self.says))


def findings(lines: Sequence[Mapping[str, Any]], meanings: Mapping[str, str], seed: int = 0) -> list[Finding]:
    """The mean of each named figure over all inputs, with its interval."""
    return [
        Finding(name, interval(np.array([line[name] for line in lines], dtype=np.float64), seed=seed), meaning)
        for name, meaning in meanings.items()
    ]
