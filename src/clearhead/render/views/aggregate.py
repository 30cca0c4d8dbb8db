"""View models of results over many inputs: bar charts of aggregated scores, and the figures of a probe."""

from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.explanation.aggregation import AggregatedScores
from clearhead.explanation.explanation import to_json_value
from clearhead.render.array_codec import encode_array
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, make_view_model

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult


def build_aggregate_view_model(aggregated_scores: AggregatedScores) -> ViewModel:
    """Global bars over many inputs."""
    rows = [[escape_invisible(what), score, count] for what, score, count in aggregated_scores.rows]
    heading = f"{'Summed' if aggregated_scores.reduction == 'sum' else 'Mean'} scores by {aggregated_scores.group_by}"
    return make_view_model("aggregate", heading=heading, rows=to_json_value(rows))


def build_probe_view_model(result: "ProbeResult") -> ViewModel:
    """A probe's figures with their intervals, its layer × head tables, and what follows."""
    estimates = [
        {
            "name": escape_invisible(f.name),
            "mean": f.interval.mean,
            "low": f.interval.low,
            "high": f.interval.high,
            "count": f.interval.count,
        }
        | {"description": escape_invisible(f.description)}
        for f in result.estimates
    ]
    maps = {}
    for title, table in result.tables.items():
        values = np.asarray(table, dtype=float) if _is_numeric_matrix(table) else None
        if values is not None and values.ndim == 2 and values.size:
            size = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
            maps[escape_invisible(str(title))] = encode_array(values, size or 1.0)
    from clearhead.render.views.probes import make_probe_charts

    settings = [[escape_invisible(str(key)), escape_invisible(str(value))] for key, value in result.settings.items()]
    return make_view_model(
        "probe",
        heading=escape_invisible(result.probe),
        model=escape_invisible(result.model),
        settings=settings,
        num_inputs=len(result.records),
        estimates=to_json_value(estimates),
        maps=maps,
        charts=make_probe_charts(result),
        conclusion=result.conclusion,
    )


def _is_numeric_matrix(value: Any) -> bool:
    try:
        return np.asarray(value, dtype=float).ndim == 2
    except (TypeError, ValueError):
        return False
