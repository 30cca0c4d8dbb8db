"""`clearhead report`: a page, LaTeX and CSV from a run's folder alone."""

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
#: Pictures of two and of six pixels: intersections and unions are summed before they are divided.
COUNTS = ((1, 2, 0, 1), (5, 6, 0, 1))


def finished(folder: Path) -> Path:
    """A run that nobody computed: two methods and a control, perturbation and segmentation of four and two examples."""
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
    settings = {one.hash: {"protocol": one.name, **one.settings} for one in (curve, mask)}
    store = ResultStore(folder)
    job = {"model": "zoo:logic", "data": EVIL}
    store.initialise_folder({"job": job, "model": "m", "versions": "v", "settings": settings})
    made_for = tuple((settings, ("generic", EVIL, "random", "lrp")) for settings in settings)
    store.write_shard(Shard("key", made_for, tuple(rows), {"segmentation: lrp": "has no rule"}))
    methods = frozenset(made_for[0][1])
    store.write_table(["key"], {one.hash: RequestedMethods(one.name, methods) for one in (curve, mask)})
    (folder / "costs.json").write_text(json.dumps({"methods": {"generic": 0.5, EVIL: 0.25}}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunResults:
    return RunResults(finished(tmp_path / "run"))


def test_the_csv_table_holds_means_intervals_and_sums_first(run: RunResults) -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv_table(run))))
    found = {(row["figure"], row["method"]): row for row in rows}
    aopc = found["aopc", "generic"]
    assert float(aopc["mean"]) == pytest.approx(0.215) and aopc["examples"] == "4" and aopc["better"] == "larger"
    assert float(aopc["low"]) <= 0.215 <= float(aopc["high"])
    assert found["probability clearhead", "generic"]["better"] == "smaller"
    assert float(found["iou, otsu", "random"]["mean"]) == pytest.approx((1 / 2 + 5 / 6) / 2)
    over_all = found["mIoU, otsu (over all examples)", "random"]
    assert float(over_all["mean"]) == pytest.approx((6 / 8 + 0 / 2) / 2) and over_all["rank"] == ""


def test_one_example_is_shown_without_an_interval(tmp_path: Path) -> None:
    curve = get_protocol("perturb-text", fills=("mask",))
    figures = {"aopc": 0.25, "probability clearhead": 0.5, "correct": 1.0}
    curves = {"fraction": (0.0, 1.0), "probability": (1.0, 0.1), "accuracy": (1.0, 0.0)}
    row = ("perturb-text", curve.hash, "v", "text/mask/positive", figures, curves)
    rows = [MeasurementRow("m", "d", "e", method, *row) for method in ("generic", "random")]
    store = ResultStore(tmp_path)
    settings = {curve.hash: {"protocol": curve.name, **curve.settings}}
    store.initialise_folder({"job": {"model": "m", "data": "d"}, "model": "m", "versions": "v", "settings": settings})
    store.write_shard(Shard("key", ((curve.hash, ("generic", "random")),), tuple(rows), {}))
    store.write_table(["key"], {curve.hash: RequestedMethods(curve.name, frozenset({"generic", "random"}))})
    run = RunResults(tmp_path)
    words = " ".join(said for where, said in Page(render_run_report(run)).texts if where not in ("style", "script"))
    assert "0.250, rank" in words and "nan" not in words and "nan" not in render_latex_tables(run)
    assert "0.250" in render_latex_tables(run) and ",0.25,,,1," in render_csv_table(run)


def test_the_page_is_whole_safe_and_says_everything(run: RunResults) -> None:
    text = render_run_report(run)
    parsed = Page(text)
    words = " ".join(said for where, said in parsed.texts if where not in ("style", "script"))
    assert_harmless(text)
    assert EVIL in words  # shown, and never run
    for said in ("aopc, larger is better", "only examples predicted correctly", "mIoU, otsu", "has no rule", "2.0 ×"):
        assert said in words
    panels = [part for one in parsed.inputs for part in one["parts"] if part["view"] == "panel"]
    drawn = [line["name"] for panel in panels for curve in panel["parts"] for line in curve["lines"]]
    assert len(drawn) == 3 * 2  # a line for each method in each of two curves
    lines = [line for panel in panels for curve in panel["parts"] for line in curve["lines"]]
    for one in lines:
        assert all(low <= mean <= high for low, mean, high in zip(one["low"], one["y"], one["high"], strict=True))
    assert any(low < high for one in lines for low, high in zip(one["low"], one["high"], strict=True))
    every = [part for one in parsed.inputs for part in one["parts"]]
    best = next(part for part in every if part["title"] == "aopc, larger is better")["rows"][0]
    assert best["name"] == EVIL and best["cells"][0]["said"][0] == "0.310"


def test_what_could_not_be_measured_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small objects alone: AP of large ones has no value, and the best comes first by what has one."""
    rules = get_protocol("detections")
    rows, count = [], {"generic": 0.9, "random": 0.1}
    for method, overlap in sorted(count.items(), reverse=True):
        figures = {"overlap": overlap}
        rows.append(MeasurementRow("m", "d", "e0", method, "detections", rules.hash, "v", "image", figures))
    store = ResultStore(tmp_path)
    settings = {rules.hash: {"protocol": rules.name, **rules.settings}}
    store.initialise_folder(
        {"job": {"model": "m", "data": "d"}, "model": "m", "versions": "torch 2", "settings": settings}
    )
    store.write_shard(Shard("key", ((rules.hash, tuple(count)),), tuple(rows)))
    store.write_table(["key"], {rules.hash: RequestedMethods(rules.name, frozenset(count))})
    over_all = {"image": {name: {"AP": own, "AP large": np.nan} for name, own in sorted(count.items(), reverse=True)}}
    monkeypatch.setattr(ProtocolResults, "compute_dataset_metrics", lambda section: over_all)
    parsed = Page(render_run_report(RunResults(tmp_path)))
    words = [said for where, said in parsed.texts if where not in ("style", "script")]
    assert "nan" not in words and "–" in words
    table = next(part for one in parsed.inputs for part in one["parts"] if "over all" in part["title"])
    assert table["rows"] == [["generic", "0.900", "–"], ["random", "0.100", "–"]]
    assert any("torch 2. Masks cut" in said for said in words)


def test_the_examples_where_methods_disagree_most_come_first(run: RunResults) -> None:
    section = next(one for one in run.protocol_results if one.name == "perturb-text")
    first = section.find_disagreements("aopc")[0]
    assert (first.example, first.best, first.worst[0]) == ("e2", (EVIL, 0.9), "generic")
    assert {one.example for one in section.correct_measurements} == {"e1", "e2", "e3"}
    curve = next(
        one for one in section.build_curve_sets() if (one.part, one.y_name) == ("text/mask/positive", "probability")
    )
    values = next(iter(curve.y_by_method.values()))
    assert values.mean(0) == pytest.approx([1.0, np.mean([0.0, 0.1, 0.2, 0.3])])


def test_two_fills_say_how_far_they_agree(tmp_path: Path) -> None:
    """Three methods, whose order the second fill turns round for two of them: two of three pairs agree."""
    curve = get_protocol("perturb-text", fills=("mask", "pad"))
    means = {"text/mask/positive": (0.3, 0.2, 0.1), "text/pad/positive": (0.2, 0.3, 0.1)}
    rows = [
        MeasurementRow("m", "d", f"e{i}", method, "perturb-text", curve.hash, "v", part, {"aopc": mean}, {})
        for part, own in means.items()
        for method, mean in zip(("generic", "lime", "random"), own, strict=True)
        for i in range(3)
    ]
    store, methods = ResultStore(tmp_path / "run"), ("generic", "lime", "random")
    settings = {curve.hash: {"protocol": curve.name, **curve.settings}}
    store.initialise_folder({"job": {"model": "a", "data": "b"}, "model": "m", "versions": "v", "settings": settings})
    store.write_shard(Shard("key", ((curve.hash, methods),), tuple(rows), {}))
    store.write_table(["key"], {curve.hash: RequestedMethods(curve.name, frozenset(methods))})
    parts = [part for one in Page(render_run_report(RunResults(tmp_path / "run"))).inputs for part in one["parts"]]
    table = next(part for part in parts if part["title"].startswith("Do the parts rank the methods in the same order?"))
    assert table["rows"] == [["aopc, larger is better", "text/mask/positive", "text/pad/positive", "0.333"]]


def test_curves_of_examples_of_other_lengths_meet_at_the_places_of_the_longest() -> None:
    how = get_protocol("idl-text")
    made = [
        Measurement(str(i), "m", "text/pad/positive", {}, {"fraction": x, "probability": y, "accuracy": y})
        for i, (x, y) in enumerate([((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.25, 1.0), (0.5, 0.1, 0.2))])
    ]
    curve = next(
        one
        for one in ProtocolResults("idl-text", how.hash, how.settings, how, made).build_curve_sets()
        if one.y_name != "accuracy"
    )
    assert curve.x_by_method == {"m": [0.0, 0.25, 1.0]}
    assert curve.y_by_method["m"].tolist() == [[1.0, 0.75, 0.0], [0.5, 0.1, 0.2]]


def test_latex_is_escaped_and_balanced(run: RunResults) -> None:
    text = render_latex_tables(run)
    assert r"$<$script$>$x$<$/script$>$\_1 & " in text and text.count(r"\begin{tabular}") == text.count(
        r"\end{tabular}"
    )
    # (6/8 + 0)/2 over both pictures: what is no mean over examples stands there, too
    assert r"method & pixel accuracy, otsu & mIoU, otsu \\" in text and r"generic & 0.750 & 0.375 \\" in text
    assert escape_latex_cell("−1 % of {a_b}") == r"$-$1 \% of \{a\_b\}"


def test_the_command_writes_three_files_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--out", str(tmp_path / "paper")])
    assert ended.value.code == 0
    assert sorted(path.name for path in (tmp_path / "paper").iterdir()) == ["report.html", "tables.csv", "tables.tex"]
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2 and "holds no benchmark run" in capsys.readouterr().err


def test_the_page_names_the_model_of_its_table_and_not_of_a_job_that_was_stopped(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = render_run_report(RunResults(folder))
    job = {"model": "zoo:sentiment", "data": "sst2"}
    ResultStore(folder).initialise_folder(
        {"job": job, "model": "other", "versions": "later", "settings": {}}
    )  # and killed
    assert render_run_report(RunResults(folder)) == before


def test_a_run_in_which_everything_was_refused_says_why(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "run")
    store.initialise_folder({"settings": {}})
    store.write_shard(Shard("key", (("hash", ("lrp",)),), (), {"truth: lrp": "has no rule"}))
    store.write_table(["key"], {"hash": RequestedMethods("truth", frozenset({"lrp"}))})
    with pytest.raises(InputError, match="truth: lrp: has no rule"):
        RunResults(tmp_path / "run").protocol_results  # noqa: B018
