"""Results of a finished run, read from its folder for a report; needs no model, no data and no GPU."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.bench import explanation_store
from clearhead.bench.chunk_explanations import CONTROL_METHODS
from clearhead.bench.job import get_protocol
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement
from clearhead.bench.store import ResultStore
from clearhead.bench.tables import MetricColumn, build_columns
from clearhead.errors import ClearheadError, InputError
from clearhead.explanation.multi_stream import AnyExplanation


@dataclass(frozen=True)
class MetricTable:
    """One metric, with a column for each part in which it has the same direction.

    Attributes:
        metric: Name of the metric.
        smaller_is_better: Whether smaller values are better, in all columns.
        columns: One column per part.
    """

    metric: str
    smaller_is_better: bool
    columns: list[MetricColumn]

    @property
    def better_direction(self) -> str:
        """Direction of the metric: "smaller" or "larger"."""
        return "smaller" if self.smaller_is_better else "larger"


@dataclass(frozen=True)
class Disagreement:
    """An example on which a metric differs strongly between methods, with the best and the worst method.

    Attributes:
        example: Id of the example.
        part: The measured part.
        best: Name and value of the best method.
        worst: Name and value of the worst method.
    """

    example: str
    part: str
    best: tuple[str, float]
    worst: tuple[str, float]

    @property
    def spread(self) -> float:
        """Difference between the best and the worst value."""
        return abs(self.best[1] - self.worst[1])


@dataclass(frozen=True)
class ProtocolResults:
    """All measurements of one protocol with one set of settings.

    Attributes:
        name: Name of the protocol.
        hash: Hash of its settings.
        settings: The settings, without the name.
        protocol: The protocol.
        measurements: The measurements.
    """

    name: str
    hash: str
    settings: Mapping[str, Any]
    protocol: BenchmarkProtocol
    measurements: Sequence[Measurement]

    @property
    def metrics(self) -> list[str]:
        """Names of all measured metrics, headline metrics first."""
        measured = {name for measurement in self.measurements for name in measurement.figures}
        return [
            *(name for name in self.protocol.headline_metrics if name in measured),
            *(sorted(measured - set(self.headline_metrics))),
        ]

    @property
    def headline_metrics(self) -> list[str]:
        """Names of the measured headline metrics, or of the alphabetically first metric if there are none."""
        measured = {name for measurement in self.measurements for name in measurement.figures}
        return [name for name in self.protocol.headline_metrics if name in measured] or sorted(measured)[:1]

    def iter_tables(self, metric: str, measurements: Sequence[Measurement] | None = None) -> Iterator[MetricTable]:
        """Yield a table of the parts where a larger value is better, and one of those where a smaller value is.

        Args:
            metric: Name of the metric.
            measurements: Measurements to use instead of all.

        Yields:
            The tables that have columns.
        """
        if measurements is None:
            measurements = self.measurements
        for smaller_is_better in (False, True):
            measurements_by_part: dict[str, list[Measurement]] = {}
            for measurement in measurements:
                if self.protocol.is_smaller_better(metric, measurement.part) == smaller_is_better:
                    measurements_by_part.setdefault(measurement.part, []).append(measurement)
            columns = [
                column
                for part_name, part_measurements in sorted(measurements_by_part.items())
                for column in build_columns(
                    part_name, part_measurements, metric, bounds=self.protocol.get_bounds(metric)
                )
            ]
            if columns:
                yield MetricTable(metric, smaller_is_better, columns)

    @cached_property
    def correct_measurements(self) -> list[Measurement]:
        """Measurements of correctly predicted examples; empty if all examples are correct."""
        correct = [measurement for measurement in self.measurements if measurement.figures.get("correct") == 1]
        return correct if len(correct) < len(self.measurements) else []

    def compute_dataset_metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """Compute the metrics that are not means over examples.

        Returns:
            Part → method → metrics.
        """
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for measurement in self.measurements:
            groups.setdefault((measurement.part, measurement.method), []).append(measurement)
        metrics_by_part: dict[str, dict[str, dict[str, float]]] = {}
        for (part_name, method), measurements in sorted(groups.items()):
            metrics = self.protocol.compute_dataset_metrics(measurements)
            if metrics:
                metrics_by_part.setdefault(part_name, {})[method] = metrics
        return metrics_by_part

    def find_disagreements(self, metric: str, count: int = 5) -> list[Disagreement]:
        """Find the examples on which a metric differs most between methods, controls excluded.

        Args:
            metric: Name of the metric.
            count: Number of examples.

        Returns:
            The examples, the largest difference first.
        """
        disagreements = []
        for table in self.iter_tables(metric):
            for column in table.columns:
                values_by_method = {
                    method: values
                    for method, values in column.values_by_method.items()
                    if method not in CONTROL_METHODS
                }
                for index, example in enumerate(column.examples):
                    values = {method: float(scores[index]) for method, scores in values_by_method.items()}
                    ranked = _rank_methods(values, table.smaller_is_better)
                    if len(ranked) > 1 and ranked[0][1] != ranked[-1][1]:
                        disagreements.append(Disagreement(example, column.name, ranked[0], ranked[-1]))
        disagreements.sort(key=lambda disagreement: (-disagreement.spread, disagreement.part, disagreement.example))
        return disagreements[:count]

    def build_curve_sets(self) -> list["CurveSet"]:
        """Collect the curves by part and metric, interpolated to shared points.

        Returns:
            One set for each part and metric, sorted.
        """
        curves_by_group: dict[tuple[str, str, str], dict[str, list[tuple[Sequence[float], Sequence[float]]]]] = {}
        for measurement in self.measurements:
            curves = measurement.curves
            for x_name, y_name in (("fraction", "probability"), ("fraction", "accuracy"), ("recall", "precision")):
                if x_name in curves:
                    curves_by_method = curves_by_group.setdefault((measurement.part, y_name, x_name), {})
                    curves_by_method.setdefault(measurement.method, []).append((curves[x_name], curves[y_name]))
        curve_sets = []
        for (part_name, y_name, x_name), curves_by_method in sorted(curves_by_group.items()):
            x_by_method: dict[str, list[float]] = {}
            y_by_method: dict[str, Float[np.ndarray, "example place"]] = {}
            for method, method_curves in sorted(curves_by_method.items()):
                x, y_by_method[method] = _interpolate_to_shared_points(method_curves)
                x_by_method[method] = list(x)
            curve_sets.append(CurveSet(part_name, y_name, x_name, x_by_method, y_by_method))
        return curve_sets


def _rank_methods(values: Mapping[str, float], smaller_is_better: bool) -> list[tuple[str, float]]:
    """Sort methods from best to worst, then by name; NaN is left out."""
    sign = 1 if smaller_is_better else -1
    measured = [(method, value) for method, value in values.items() if not np.isnan(value)]
    return sorted(measured, key=lambda item: (sign * item[1], item[0]))


def _interpolate_to_shared_points(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> "tuple[Sequence[float], Float[np.ndarray, 'example place']]":
    """Interpolate to the points of the finest curve: with one unit per step, examples have different points."""
    points = max((x for x, _ in curves), key=len)
    return points, np.array([np.interp(points, x, y) for x, y in curves])


@dataclass(frozen=True)
class CurveSet:
    """Curves of one metric and part: the points of each method, and its values for every example.

    Attributes:
        part: The measured part.
        y_name: Name of the values.
        x_name: Name of the positions.
        x_by_method: Positions of the points of each method.
        y_by_method: Values of each method, one row per example.
    """

    part: str
    y_name: str
    x_name: str
    x_by_method: dict[str, list[float]]
    y_by_method: "dict[str, Float[np.ndarray, 'example place']]"


class RunResults:
    """Results of a finished run, read from its folder."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder of a run.

        Args:
            folder: The folder (`clearhead bench --out`).

        Raises:
            InputError: If the folder is not a run, or its table is not finished.
        """
        self.store = ResultStore(folder)
        self.manifest = {**self.store.read_manifest(), **self.store.read_table_metadata()}

    @cached_property
    def protocol_results(self) -> list[ProtocolResults]:
        """Results by protocol and settings, sorted by the protocol's name."""
        rows_by_settings: dict[str, list[Any]] = {}
        for row in self.store.iter_table_rows():
            rows_by_settings.setdefault(row.settings, []).append(row)
        if not rows_by_settings:
            raise InputError(f"the table of {str(self.store.folder)!r} is empty: {self._explain_empty_table()}")
        return [
            self._build_protocol_results(settings_hash, rows)
            for settings_hash, rows in sorted(rows_by_settings.items(), key=lambda item: item[1][0].protocol)
        ]

    def _build_protocol_results(self, settings_hash: str, rows: Sequence[Any]) -> ProtocolResults:
        settings = dict(self.manifest["settings"].get(settings_hash, {}))
        name = settings.pop("protocol", rows[0].protocol)
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        try:
            protocol = get_protocol(name, **arguments)
        except ClearheadError:  # a custom protocol that is not registered here: assume that larger is better
            protocol = BenchmarkProtocol()
        return ProtocolResults(name, settings_hash, settings, protocol, [row.measurement for row in rows])

    @cached_property
    def failure_reasons(self) -> dict[str, str]:
        """Reasons why methods were not measured, by "PROTOCOL: METHOD"."""
        reasons: dict[str, str] = self.manifest.get("refused", {})
        return reasons

    def _explain_empty_table(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.failure_reasons.items()))
        return reasons or "it had no examples"

    def load_explanations(self, keys: set[tuple[str, str]]) -> dict[tuple[str, str], AnyExplanation]:
        """Load stored explanations by (example, method); those that the run did not keep are missing.

        Args:
            keys: Pairs of example and method.

        Returns:
            The explanations that were found, by the same pairs.
        """
        return explanation_store.load_stored_explanations(self.store.folder, keys)

    def load_annotations(self, examples: Collection[str]) -> dict[str, list[int]]:
        """Load the indices of annotated units by example; those that the run did not keep are missing.

        Args:
            examples: Names of examples.

        Returns:
            Indices of units by name of the example.
        """
        return explanation_store.load_stored_annotations(self.store.folder, examples)

    @property
    def seconds_by_method(self) -> dict[str, float]:
        """Method → seconds of a single explanation, if they were measured before the run."""
        try:
            text = (self.store.folder / "costs.json").read_text(encoding="utf-8")
            seconds: dict[str, float] = json.loads(text)["methods"]
        except (OSError, ValueError, KeyError):
            return {}
        return seconds

    @property
    def total_seconds(self) -> float:
        """Sum of the chunks' durations."""
        try:
            lines = (self.store.folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0.0
        return float(sum(map(_parse_seconds, lines)))


def _parse_seconds(line: str) -> float:
    """Parse the duration of a chunk; 0 for a line that a killed run left incomplete."""
    try:
        return float(json.loads(line)["seconds"])
    except (ValueError, KeyError, TypeError):
        return 0.0
