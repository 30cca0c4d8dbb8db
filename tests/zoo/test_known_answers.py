"""The page of known answers: new measurements replace stored ones, and all others are kept."""

import json
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "packages" / "zoo" / "train"


@pytest.fixture
def known_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAIN))
    import known_answers

    yield known_answers
    sys.modules.pop("known_answers")


def write_measurements(path: Path, device: str, values: dict[tuple[str, str], float]) -> Path:
    """Write results as truth.py does, for one model: (method, example) → value."""
    rows = [
        {"model": "logic", "part": "text", "method": method, "example": example}
        | {"figures": {"minimal precision": value, "minimal average precision": value / 2}}
        for (method, example), value in values.items()
    ]
    path.write_text(json.dumps({"where": device, "rows": rows}), encoding="utf-8")
    return path


def test_new_measurement_replaces_stored_result_of_the_method(known_answers, tmp_path: Path) -> None:
    first = {("lrp", "a"): 0.25, ("lrp", "b"): 0.5, ("generic", "a"): 1.0, ("generic", "b"): 0.75}
    first |= {("random", "a"): 0.1, ("random", "b"): 0.2}
    stored = tmp_path / "kept.json"
    known_answers.write_stored_results(
        stored, known_answers.read_measured_results([write_measurements(tmp_path / "1.json", "a CPU, float32", first)])
    )
    new = known_answers.read_measured_results(
        [
            write_measurements(tmp_path / "2.json", "a GPU, float32", {("lrp", "b"): 1.0, ("random", "a"): 0.1}),
            write_measurements(tmp_path / "3.json", "a GPU, float32", {("lrp", "c"): 0.125}),
        ]
    )
    merged = known_answers.merge_results(known_answers.read_stored_results(stored), new)
    known_answers.write_stored_results(stored, merged)
    assert known_answers.read_stored_results(stored) == merged
    (column,) = known_answers._build_columns("logic", merged, "precision")
    assert column.examples == ["a", "b", "c"]
    assert column.values_by_method["lrp"][1:].tolist() == [1.0, 0.125]  # 0.25 on example a is gone
    assert column.values_by_method["generic"][:2].tolist() == [1.0, 0.75]
    assert known_answers.format_devices(merged) == "Measured on a GPU, float32; `generic` on a CPU, float32."


def test_controls_with_more_examples_are_kept(known_answers, tmp_path: Path) -> None:
    many = {("random", "a"): 0.25, ("random", "b"): 0.5, ("position", "a"): 0.0, ("position", "b"): 1.0}
    few = {("random", "a"): 0.25, ("position", "a"): 0.0, ("lrp", "a"): 1 / 3}
    stored, new = (
        known_answers.read_measured_results([write_measurements(tmp_path / "1.json", "a CPU", values)])
        for values in (many, few)
    )
    merged = known_answers.merge_results(stored, new)
    assert merged["logic", "text", "random"].metrics["precision"] == {"a": 0.25, "b": 0.5}
    assert merged["logic", "text", "lrp"].metrics["precision"] == {"a": 0.333333333333}
    assert known_answers.merge_results(new, stored)["logic", "text", "position"].metrics["precision"] == {
        "a": 0.0,
        "b": 1.0,
    }


def test_examples_with_different_control_scores_are_not_paired(known_answers, tmp_path: Path) -> None:
    """As of scenes drawn 24 and 60 at a time: their position baselines differ."""
    many = {(m, e): 0.5 for m in ("lrp", "random", "position") for e in ("a", "b", "c")}
    few = {("shap", "a"): 1.0, ("shap", "b"): 0.0, ("position", "a"): 0.25, ("position", "b"): 0.5}
    stored, new = (
        known_answers.read_measured_results([write_measurements(tmp_path / "1.json", "a CPU", values)])
        for values in (many, few)
    )
    (column,) = known_answers._build_columns("logic", known_answers.merge_results(stored, new), "precision")
    assert column.examples == ["a", "b", "c"] and list(column.values_by_method) == ["lrp", "random", "position"]
    assert column.unranked["shap"].tolist() == [1.0, 0.0]
    assert "(2 others) |" in known_answers.render_markdown_table([column])
