"""Documents of what was found over many inputs: global bars, and a probe's figures."""

from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.explanation.aggregation import Aggregate
from clearhead.explanation.explanation import plain
from clearhead.render.array_codec import packed
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, view

if TYPE_CHECKING:
    from clearhead.probes.probe_result import ProbeResult


def aggregate(found: Aggregate) -> Document:
    """Global bars over many inputs."""
    rows = [[name(what), score, count] for what, score, count in found.rows]
    heading = f"{'Summed' if found.how == 'sum' else 'Mean'} scores by {found.by}"
    return view("aggregate", heading=heading, rows=plain(rows))


def probe(found: "ProbeResult") -> Document:
    """A probe's figures with their intervals, its layer × head tables, and what follows."""
    figures = [
        {"name": name(f.name), "mean": f.value.mean, "low": f.value.low, "high": f.value.high, "count": f.value.count}
        | {"meaning": name(f.meaning)}
        for f in found.findings
    ]
    maps = {}
    for title, table in found.tables.items():
        values = np.asarray(table, dtype=float) if _is_table(table) else None
        if values is not None and values.ndim == 2 and values.size:
            size = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
            maps[name(str(title))] = packed(values, size or 1.0)
    from clearhead.render.views.probes import of_probe

    settings = [[name(str(key)), name(str(value))] for key, value in found.settings.items()]
    return view(
        "probe",
        heading=name(found.probe),
        model=name(found.model),
        settings=settings,
        inputs=len(found.lines),
        figures=plain(figures),
        maps=maps,
        plots=of_probe(found),
        says=found.says,
    )


def _is_table(value: Any) -> bool:
    try:
        return np.asarray(value, dtype=float).ndim == 2
    except (TypeError, ValueError):
        return False
