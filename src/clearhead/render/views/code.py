"""View data of plots of syntax in code models: attention between syntax classes by layer, and tests of groups."""

from typing import TYPE_CHECKING

import numpy as np

from clearhead.render import charts
from clearhead.render.mpl.code import MAX_ATTENTION_RATIO, MIN_DRAWN_P_VALUE
from clearhead.render.view_model import ViewModel

if TYPE_CHECKING:
    from clearhead.studies.code.attention import CodeAttention
    from clearhead.studies.code.permutation_tests import GroupDifferences

UNIFORM_REFERENCE_LINE = charts.make_reference_line(1.0, "uniform attention")
RECEIVED_ATTENTION_LABEL = "attention received"


def make_class_attention_charts(code_attention: "CodeAttention") -> list[ViewModel]:
    """Every head a point, mean over questions; the line is the mean over heads; 1 is what uniform attention gives."""
    means = np.nanmean(code_attention.received_attention, 0)
    layers, heads, _ = means.shape
    across = np.repeat(np.arange(layers), heads)
    names = [f"layer {layer}, head {head}" for layer in range(layers) for head in range(heads)]
    return [
        charts.make_scatter_chart(
            own,
            [charts.make_point_series("heads", across, means[..., place].ravel(), point_names=names)],
            "layer",
            RECEIVED_ATTENTION_LABEL,
            mean_curve=charts.make_point_series("mean", range(layers), means[..., place].mean(1)),
            y_range=(1 / MAX_ATTENTION_RATIO, MAX_ATTENTION_RATIO),
            log_scale=True,
            reference_line=UNIFORM_REFERENCE_LINE,
            integer_axis=True,
            small=True,
        )
        for place, own in enumerate(code_attention.classes)
    ]


def make_class_to_class_chart(code_attention: "CodeAttention") -> ViewModel:
    """Rows look at columns: how many times what chance gives, mean over questions and layers."""
    paid = code_attention.paid_attention.mean(1)
    count = (~np.isnan(paid)).sum(0)
    times = np.where(count > 0, np.nansum(paid, 0) / np.maximum(count, 1), np.nan)
    words = [["–" if np.isnan(value) else f"{value:.2f}×" for value in row] for row in times]
    with np.errstate(divide="ignore"):
        doublings = np.log2(times)
    more = {"texts": words, "show_texts": True, "vmax_label": "four times chance, or a quarter"}
    classes = code_attention.classes
    return charts.make_heat_map_chart(
        "Attention between classes", doublings, classes, classes, "query", "key", 2.0, **more
    )


def make_p_value_charts(differences: "GroupDifferences", classes: tuple[str, ...]) -> list[ViewModel]:
    """Layer × head for each class: p of the permutation test; a dot where it stands after the correction."""
    layers, heads, _ = differences.p_values.shape
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    made = []
    for place, own in enumerate(classes):
        p, stands = differences.p_values[..., place], differences.is_significant[..., place]
        words = [
            [_format_p_value(p[row, column]) + (" ●" if stands[row, column] else "") for column in range(heads)]
            for row in range(layers)
        ]
        more = {
            "texts": words,
            "marks": np.argwhere(stands),
            "marks_note": "a dot: significant after the correction",
            "vmax_label": "p ≤ 0.0001",
        }
        strength, sure = -np.log10(np.clip(p, MIN_DRAWN_P_VALUE, 1)), -float(np.log10(MIN_DRAWN_P_VALUE))
        made.append(
            charts.make_heat_map_chart(
                own, strength, rows, columns, "layer", "head", sure, unsigned=True, small=True, **more
            )
        )
    return made


def _format_p_value(p: float) -> str:
    return "–" if np.isnan(p) else f"p {p:.2g}"


def make_correctness_box_chart(code_attention: "CodeAttention") -> ViewModel:
    """One number a question, mean over layers and heads: right answers beside wrong ones, class by class."""
    own = code_attention.received_attention.mean((1, 2))
    series = {
        f"{said} ({int(group.sum())})": [charts.compute_box_statistics(column) for column in own[group].T]
        for said, group in (("right", code_attention.is_correct), ("wrong", ~code_attention.is_correct))
    }
    return charts.make_box_chart(
        "Right and wrong answers",
        code_attention.classes,
        series,
        RECEIVED_ATTENTION_LABEL,
        reference_line=UNIFORM_REFERENCE_LINE,
    )
