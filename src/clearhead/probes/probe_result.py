"""Result of a probe: a record for each input, estimates with intervals, and a conclusion with its limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.explanation.explanation import to_json_value
from clearhead.explanation.json_keys import to_snake_case_keys
from clearhead.stats import RATE_BOUNDS, ConfidenceInterval, compute_mean_interval

#: Beginnings of the names of metrics from 0 to 1 that often are exactly 0 or 1.
RATE_METRIC_PREFIXES = ("accuracy", "flips")


@dataclass(frozen=True)
class ProbeEstimate:
    """One line of a probe's table.

    Attributes:
        name: Name of the metric.
        interval: Its mean over inputs with an interval.
        description: Meaning of the metric.
    """

    name: str
    interval: ConfidenceInterval
    description: str = ""


@dataclass
class ProbeResult:
    """Result of a probe of one model on some inputs.

    Attributes:
        probe: Name of the probe.
        model: Name of the model.
        settings: The settings of the run.
        records: The metrics of each input (or layer, head or point, depending on the probe).
        estimates: Means with intervals.
        conclusion: What follows from the result, and what does not.
        tables: Values that belong to no single input, such as one for each layer and head.
    """

    probe: str
    model: str
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    estimates: list[ProbeEstimate]
    conclusion: str
    tables: dict[str, Any] = field(default_factory=dict)

    def get_column(self, name: str) -> np.ndarray:
        """Return one metric of every record.

        Args:
            name: Key of the records.

        Returns:
            One number per record.

        Raises:
            KeyError: If the records have no such metric.
        """
        return np.array([record[name] for record in self.records], dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON; spaces in keys become underscores.

        Returns:
            Plain JSON values, schema "clearhead/probe"; non-finite numbers become null.
        """
        estimates = [
            {
                "name": estimate.name,
                "mean": estimate.interval.mean,
                "low": estimate.interval.low,
                "high": estimate.interval.high,
                "count": estimate.interval.count,
                "description": estimate.description,
            }
            for estimate in self.estimates
        ]
        return to_json_value(
            {
                "schema": "clearhead/probe",
                "version": 2,
                "probe": self.probe,
                "model": self.model,
                "settings": to_snake_case_keys(self.settings),
                "estimates": estimates,
                "records": to_snake_case_keys(self.records),
                "tables": to_snake_case_keys(self.tables),
                "conclusion": self.conclusion,
            }
        )

    def to_markdown(self) -> str:
        """Return a report in Markdown: settings, figure, table and conclusion.

        Returns:
            The text; it shows the figure of the file "figure.png", which must be saved next to it.
        """
        rows = [
            f"| {estimate.name} | {interval.format_without_count()} | {interval.count} | {estimate.description} |"
            for estimate in self.estimates
            for interval in [estimate.interval]
        ]
        lines = [
            f"# {self.probe}: {self.model}",
            "",
            self._format_settings(),
            "",
            f"![{self.probe}](figure.png)",
            "",
            "| metric | mean [95 % interval] | inputs | description |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            self.conclusion,
            "",
        ]
        return "\n".join(lines)

    def _format_settings(self) -> str:
        """Format the settings as names and values, separated by commas."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("metric", "mean [95 % interval]", "inputs", "description"):
            table.add_column(name)
        for estimate in self.estimates:
            bold_name = Text(estimate.name, style="bold")
            interval = estimate.interval
            table.add_row(bold_name, interval.format_without_count(), str(interval.count), Text(estimate.description))
        title = Text(
            f"{self.probe} · {self.model} · {len(self.records)} input{'' if len(self.records) == 1 else 's'} · "
            f"{self._format_settings()}"
        )
        return Group(title, table, Text(self.conclusion))


def compute_estimates(records: Sequence[Mapping[str, Any]], descriptions: Mapping[str, str]) -> list[ProbeEstimate]:
    """Compute the mean of each described metric over all records, with its interval."""
    estimates = []
    for name, description in descriptions.items():
        values = np.array([record[name] for record in records], dtype=np.float64)
        bounds = RATE_BOUNDS if name.startswith(RATE_METRIC_PREFIXES) else None
        estimates.append(ProbeEstimate(name, compute_mean_interval(values, bounds=bounds), description))
    return estimates
