"""Plots of synthetic numbers: every probe that has plots, and every kind of plot."""

from typing import Any

import numpy as np

from clearhead.concepts.significance import ConceptTest
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.render import charts, view_model
from clearhead.render.array_codec import encode_array
from clearhead.render.report_blocks import build_panel, build_section
from clearhead.render.views import code, concepts
from clearhead.stats import ConfidenceInterval
from clearhead.studies.code.permutation_tests import compare_groups
from tests.studies.test_error_detector import make_code_attention

HOSTILE_NAME = "<img src=x onerror=alert(1)>"


def result(probe: str, lines: list[dict[str, Any]], **tables: Any) -> ProbeResult:
    estimates = [ProbeEstimate("a figure", ConfidenceInterval(0.5, 0.4, 0.6, len(lines)), "what it is")]
    return ProbeResult(probe, "some/model", {"seed": 0}, lines, estimates, "So it is.", tables)


def probes(count: int = 40) -> dict[str, ProbeResult]:
    """Return a synthetic result of every probe, by kind."""
    rng = np.random.default_rng(0)

    def lines(*columns: str, top: float = 1.0) -> list[dict[str, Any]]:
        return [{name: float(rng.uniform(0, top)) for name in columns} for _ in range(count)]

    answers = [{"prediction": ("yes", "no", HOSTILE_NAME)[i % 3]} for i in range(count)]
    taus = ("τ(last row, gradient)", "τ(last row, left out)", "τ(gradient, left out)")
    correlated = [
        {**answer, **dict.fromkeys(taus, 0.0)} | dict(zip(taus, 2 * rng.random(3) - 1, strict=True))
        for answer in answers
    ]
    correlated[0][taus[0]] = float("nan")
    weights = {"tokens": ["[CLS]", HOSTILE_NAME, "film", "[SEP]"], "own weights": [0.1, 0.2, 0.6, 0.1]}
    largest = {"largest weight": 0.6, "JSD": 0.69, "attainable JSD": 0.69, "TVD": 0.01, "prediction": "yes"}
    largest |= {**weights, "other weights": [0.7, 0.1, 0.1, 0.1]}
    points = [
        *({"point": f"λ {at}", "strength": at, "TVD": 0.1 * at, "JSD": 0.2 + 0.1 * at} for at in range(4)),
        {"point": "uniform", "strength": None, "TVD": 0.35, "JSD": 0.1},
    ]
    heads = [{"layer": layer, "head": head, "ablation": float(rng.random())} for layer in range(4) for head in range(6)]
    pruning = {
        measure: [{"silenced": n, "agreement": 1 - n / 30 * fall} for n in range(0, 25, 4)]
        for measure, fall in (("gradient", 0.4), ("ablation", 0.2), ("random", 0.9))
    }
    skips = [{"layer": k, "flow": 0.5, "norm": 0.6 + 0.02 * k, "gradient": 0.4 + 0.04 * k} for k in range(6)]
    return {
        "permutation": result("permutation", lines("largest weight", "median TVD")),
        "adversary": result("adversary", [*lines("largest weight", "JSD", "attainable JSD", top=0.65), largest]),
        "correlation": result("correlation", correlated),
        "seeds": result("seeds", lines("largest weight", "median JSD", "median TVD", top=0.65)),
        "frontier": result("frontier", points),
        "heads": result("heads", heads, pruning=pruning),
        "skips": result("skips", skips),
    }


def line(concept: str, layer: int, score: float, p: float, rejection_reason: str = "") -> ConceptTest:
    ends = {"low": score - 0.1, "high": min(1.0, score + 0.1), "sd": 0.1, "magnitude": 0.1, "strength": 0.2}
    tests = {"effect": 1.0, "accuracy": 0.9, "p_random": p, "p_half": p, "p_uncorrected": p, "p": p, "corrected": p}
    return ConceptTest(concept, layer, score, **ends, **tests, runs=4, inputs=9, rejection_reason=rejection_reason)


LINES = [
    *(line("striped", layer, 0.7 + 0.05 * layer, 0.01) for layer in (1, 2, 3)),
    *(line(HOSTILE_NAME, layer, 0.4, 0.5, "not told from random" if layer == 2 else "") for layer in (1, 2, 3)),
]


def every_plot() -> view_model.ViewModel:
    """Build a page of all kinds of plots."""
    attention = make_code_attention(planted=1.5)
    comparison = compare_groups(
        np.log2(attention.received_attention),
        attention.is_correct,
        attention.lengths.astype(float),
        num_permutations=500,
    )
    rng = np.random.default_rng(0)
    relative = {("a", "b"): 0.9, ("b", "a"): 0.1}
    overlay = {"image": None, "grid": [4, 4], "name": "input 1", "size": [4, 4]}
    maps = [overlay | {"values": encode_array(rng.normal(size=16), 2.0)}]
    heights = rng.random((2, 6))
    lines = [
        charts.make_curve(name, range(6), y, low=y - 0.1, high=y + 0.1)
        for name, y in zip(("a", HOSTILE_NAME), heights, strict=True)
    ]
    parts = [
        build_panel(
            charts.make_line_chart(
                "Lines with intervals",
                lines,
                "layer",
                "accuracy",
                reference_line=charts.make_reference_line(0.5, "chance"),
            )
        ),
        build_panel(concepts.make_tcav_chart(LINES, "cat"), concepts.make_relative_tcav_chart(relative, 3)),
        build_panel(*code.make_class_attention_charts(attention), note="One point per head."),
        build_panel(*code.make_p_value_charts(comparison, attention.classes)),
        build_panel(code.make_correctness_box_chart(attention), code.make_class_to_class_chart(attention)),
        build_panel(view_model.make_view_model("image_overlays", title="striped, layer 3", maps=maps)),
    ]
    return view_model.build_page_view_model([build_section("Every kind of plot", *parts, note="Made up.")], "Plots")
