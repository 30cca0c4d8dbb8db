"""`clearhead report`: HTML, LaTeX and CSV from a run's folder."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from clearhead.bench.export import escape_latex_cell, render_csv_table, render_latex_tables
from clearhead.bench.job import get_protocol
from clearhead.bench.protocols.base import Measurement
from clearhead.bench.report_page import render_run_report
from clearhead.bench.run_results import ProtocolResults, RunResults
from clearhead.bench.store import MeasurementRow, RequestedMethods, ResultStore, Shard
from clearhead.cli import main
from clearhead.errors import InputError
from tests.render.static_html import Page, assert_harmless

pytest.importorskip("pyarrow")
EVIL = "<script>x</script>_1"
#: Images of two and of six pixels: intersections and unions are summed before division.
COUNTS = ((1, 2, 0, 1), (5, 6, 0, 1))


def write_run(folder: Path) -> Path:
    """A synthetic run: two methods and a control, perturbation of four and segmentation of two examples."""
    curve, mask = get_protocol("perturb-text", fills=("mask",)), get_protocol("segmentation", thresholds=("otsu",))
    rows = []
    for method, shift in (("generic", 0.2), (EVIL, 0.1), ("random", 0.0)):
        for i in range(4):
            aopc = shift + 0.01 * i if i != 2 or method != EVIL else 0.9
            figures = {"aopc": aopc, "probability clearhead": 0.5, "correct": float(i > 0)}
            curves = {"fraction": (0.0, 1.0), "probability": (1.0, 0.1 * i), "accuracy": (1.0, 0.0)}
            rows.append(
                MeasurementRow(
                    "m", "d", f"e{i}", method, "perturb-text", curve.hash, "v", "text/mask/positive", figures, curves
                )
            )
        for i, (both, either, ground, ground_either) in enumerate(COUNTS):
            names = ("object both", "object either", "ground both", "ground either", "right", "counted", "f1", "row f1")
            values = (both, either, ground, ground_either, both, either, 0.5, 0.5)
            figures = {f"{name}, otsu": float(value) for name, value in zip(names, values, strict=True)}
            figures |= {"iou, otsu": both / either, "inside mass": 0.5, "average precision": 0.5, "pointing": 1.0}
            rows.append(MeasurementRow("m", "d", f"p{i}", method, "segmentation", mask.hash, "v", "image", figures))
    settings = {protocol.hash: {"protocol": protocol.name, **protocol.settings} for protocol in (curve, mask)}
    store = ResultStore(folder)
    job = {"model": "zoo:logic", "data": EVIL}
    store.prepare_folder({"job": job, "model": "m", "versions": "v", "settings": settings})
    measured_methods = tuple((settings, ("generic", EVIL, "random", "lrp")) for settings in settings)
    store.write_shard(Shard("key", measured_methods, tuple(rows), {"segmentation: lrp": "has no rule"}))
    methods = frozenset(measured_methods[0][1])
    store.write_table(["key"], {protocol.hash: RequestedMethods(protocol.name, methods) for protocol in (curve, mask)})
    (folder / "costs.json").write_text(json.dumps({"methods": {"generic": 0.5, EVIL: 0.25}}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunResults:
    return RunResults(write_run(tmp_path / "run"))


def test_csv_table_holds_means_intervals_and_dataset_metrics(run: RunResults) -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv_table(run))))
    rows_by_key = {(row["figure"], row["method"]): row for row in rows}
    aopc = rows_by_key["aopc", "generic"]
    assert float(aopc["mean"]) == pytest.approx(0.215) and aopc["examples"] == "4" and aopc["better"] == "larger"
    assert float(aopc["low"]) <= 0.215 <= float(aopc["high"])
    assert rows_by_key["probability clearhead", "generic"]["better"] == "smaller"
    assert float(rows_by_key["iou, otsu", "random"]["mean"]) == pytest.approx((1 / 2 + 5 / 6) / 2)
    dataset_row = rows_by_key["mIoU, otsu (over all examples)", "random"]
    assert float(dataset_row["mean"]) == pytest.approx((6 / 8 + 0 / 2) / 2) and dataset_row["rank"] == ""


def test_single_example_has_no_interval(tmp_path: Path) -> None:
    curve = get_protocol("perturb-text", fills=("mask",))
    figures = {"aopc": 0.25, "probability clearhead": 0.5, "correct": 1.0}
    curves = {"fraction": (0.0, 1.0), "probability": (1.0, 0.1), "accuracy": (1.0, 0.0)}
    row = ("perturb-text", curve.hash, "v", "text/mask/positive", figures, curves)
    rows = [MeasurementRow("m", "d", "e", method, *row) for method in ("generic", "random")]
    store = ResultStore(tmp_path)
    settings = {curve.hash: {"protocol": curve.name, **curve.settings}}
    store.prepare_folder({"job": {"model": "m", "data": "d"}, "model": "m", "versions": "v", "settings": settings})
    store.write_shard(Shard("key", ((curve.hash, ("generic", "random")),), tuple(rows), {}))
    store.write_table(["key"], {curve.hash: RequestedMethods(curve.name, frozenset({"generic", "random"}))})
    run = RunResults(tmp_path)
    words = " ".join(text for tag, text in Page(render_run_report(run)).texts if tag not in ("style", "script"))
    assert "0.250, rank" in words and "nan" not in words and "nan" not in render_latex_tables(run)
    assert "0.250" in render_latex_tables(run) and ",0.25,,,1," in render_csv_table(run)


def test_html_report_is_complete_and_escapes_names(run: RunResults) -> None:
    text = render_run_report(run)
    parsed = Page(text)
    words = " ".join(snippet for tag, snippet in parsed.texts if tag not in ("style", "script"))
    assert_harmless(text)
    assert EVIL in words  # shown as text, not executed
    for snippet in (
        "aopc, larger is better",
        "only examples predicted correctly",
        "mIoU, otsu",
        "has no rule",
        "2.0 ×",
    ):
        assert snippet in words
    panels = [part for item in parsed.inputs for part in item["children"] if part["view"] == "panel"]
    line_names = [line["name"] for panel in panels for curve in panel["children"] for line in curve["lines"]]
    assert len(line_names) == 3 * 2  # one line per method in each of two curves
    lines = [line for panel in panels for curve in panel["children"] for line in curve["lines"]]
    for item in lines:
        assert all(low <= mean <= high for low, mean, high in zip(item["low"], item["y"], item["high"], strict=True))
    assert any(low < high for item in lines for low, high in zip(item["low"], item["high"], strict=True))
    parts = [part for item in parsed.inputs for part in item["children"]]
    best = next(part for part in parts if part["title"] == "aopc, larger is better")["rows"][0]
    assert best["name"] == EVIL and best["cells"][0]["texts"][0] == "0.310"


def test_undefined_metric_is_shown_as_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small objects only, the AP of large ones is undefined; rows are sorted by the defined metric."""
    protocol = get_protocol("detections")
    rows, overlap_by_method = [], {"generic": 0.9, "random": 0.1}
    for method, overlap in sorted(overlap_by_method.items(), reverse=True):
        figures = {"overlap": overlap}
        rows.append(MeasurementRow("m", "d", "e0", method, "detections", protocol.hash, "v", "image", figures))
    store = ResultStore(tmp_path)
    settings = {protocol.hash: {"protocol": protocol.name, **protocol.settings}}
    store.prepare_folder(
        {"job": {"model": "m", "data": "d"}, "model": "m", "versions": "torch 2", "settings": settings}
    )
    store.write_shard(Shard("key", ((protocol.hash, tuple(overlap_by_method)),), tuple(rows)))
    store.write_table(["key"], {protocol.hash: RequestedMethods(protocol.name, frozenset(overlap_by_method))})
    dataset_metrics = {
        "image": {
            name: {"AP": value, "AP large": np.nan} for name, value in sorted(overlap_by_method.items(), reverse=True)
        }
    }
    monkeypatch.setattr(ProtocolResults, "compute_dataset_metrics", lambda section: dataset_metrics)
    parsed = Page(render_run_report(RunResults(tmp_path)))
    words = [text for tag, text in parsed.texts if tag not in ("style", "script")]
    assert "nan" not in words and "–" in words
    table = next(part for page_input in parsed.inputs for part in page_input["children"] if "over all" in part["title"])
    assert table["rows"] == [["generic", "0.900", "–"], ["random", "0.100", "–"]]
    assert any("torch 2. Masks cut" in text for text in words)


def test_disagreements_are_sorted_and_curves_use_correct_examples(run: RunResults) -> None:
    section = next(item for item in run.protocol_results if item.name == "perturb-text")
    first = section.find_disagreements("aopc")[0]
    assert (first.example, first.best, first.worst[0]) == ("e2", (EVIL, 0.9), "generic")
    assert {item.example for item in section.correct_measurements} == {"e1", "e2", "e3"}
    curve = next(
        item for item in section.build_curve_sets() if (item.part, item.y_name) == ("text/mask/positive", "probability")
    )
    values = next(iter(curve.y_by_method.values()))
    assert values.mean(0) == pytest.approx([1.0, np.mean([0.0, 0.1, 0.2, 0.3])])


def test_report_shows_rank_agreement_of_two_fills(tmp_path: Path) -> None:
    """Three methods, two of which swap their order with the second fill: two of three pairs agree."""
    curve = get_protocol("perturb-text", fills=("mask", "pad"))
    means = {"text/mask/positive": (0.3, 0.2, 0.1), "text/pad/positive": (0.2, 0.3, 0.1)}
    rows = [
        MeasurementRow("m", "d", f"e{i}", method, "perturb-text", curve.hash, "v", part, {"aopc": mean}, {})
        for part, values in means.items()
        for method, mean in zip(("generic", "lime", "random"), values, strict=True)
        for i in range(3)
    ]
    store, methods = ResultStore(tmp_path / "run"), ("generic", "lime", "random")
    settings = {curve.hash: {"protocol": curve.name, **curve.settings}}
    store.prepare_folder({"job": {"model": "a", "data": "b"}, "model": "m", "versions": "v", "settings": settings})
    store.write_shard(Shard("key", ((curve.hash, methods),), tuple(rows), {}))
    store.write_table(["key"], {curve.hash: RequestedMethods(curve.name, frozenset(methods))})
    parts = [
        part
        for page_input in Page(render_run_report(RunResults(tmp_path / "run"))).inputs
        for part in page_input["children"]
    ]
    table = next(part for part in parts if part["title"].startswith("Do the parts rank the methods in the same order?"))
    assert table["rows"] == [["aopc, larger is better", "text/mask/positive", "text/pad/positive", "0.333"]]


def test_curves_of_different_lengths_are_interpolated_to_longest() -> None:
    protocol = get_protocol("idl-text")
    measurements = [
        Measurement(str(i), "m", "text/pad/positive", {}, {"fraction": x, "probability": y, "accuracy": y})
        for i, (x, y) in enumerate([((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.25, 1.0), (0.5, 0.1, 0.2))])
    ]
    curve = next(
        curve_set
        for curve_set in ProtocolResults(
            "idl-text", protocol.hash, protocol.settings, protocol, measurements
        ).build_curve_sets()
        if curve_set.y_name != "accuracy"
    )
    assert curve.x_by_method == {"m": [0.0, 0.25, 1.0]}
    assert curve.y_by_method["m"].tolist() == [[1.0, 0.75, 0.0], [0.5, 0.1, 0.2]]


def test_latex_tables_are_escaped_and_balanced(run: RunResults) -> None:
    text = render_latex_tables(run)
    assert r"$<$script$>$x$<$/script$>$\_1 & " in text and text.count(r"\begin{tabular}") == text.count(
        r"\end{tabular}"
    )
    # (6/8 + 0)/2 over both images: dataset metrics that are not means over examples are included
    assert r"method & pixel accuracy, otsu & mIoU, otsu \\" in text and r"generic & 0.750 & 0.375 \\" in text
    assert escape_latex_cell("−1 % of {a_b}") == r"$-$1 \% of \{a\_b\}"


def test_report_command_writes_three_files_and_rejects_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(folder), "--out", str(tmp_path / "paper")])
    assert exit_info.value.code == 0
    assert sorted(path.name for path in (tmp_path / "paper").iterdir()) == ["report.html", "tables.csv", "tables.tex"]
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path)])
    assert exit_info.value.code == 2 and "contains no benchmark run" in capsys.readouterr().err


def test_report_ignores_manifest_of_unfinished_job(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = render_run_report(RunResults(folder))
    job = {"model": "zoo:sentiment", "data": "sst2"}
    ResultStore(folder).prepare_folder(
        {"job": job, "model": "other", "versions": "later", "settings": {}}
    )  # and killed
    assert render_run_report(RunResults(folder)) == before


def test_run_without_results_raises_with_failure_reasons(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "run")
    store.prepare_folder({"settings": {}})
    store.write_shard(Shard("key", (("hash", ("lrp",)),), (), {"truth: lrp": "has no rule"}))
    store.write_table(["key"], {"hash": RequestedMethods("truth", frozenset({"lrp"}))})
    with pytest.raises(InputError, match="truth: lrp: has no rule"):
        RunResults(tmp_path / "run").protocol_results  # noqa: B018
