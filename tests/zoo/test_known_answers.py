"""The page of known answers: what is measured anew takes the place of what was kept, and nothing else moves."""

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


def wrote(path: Path, where: str, values: dict[tuple[str, str], float]) -> Path:
    """What truth.py writes, of one model: (method, example) → its figures."""
    rows = [
        {"model": "logic", "part": "text", "method": method, "example": example}
        | {"figures": {"minimal precision": value, "minimal average precision": value / 2}}
        for (method, example), value in values.items()
    ]
    path.write_text(json.dumps({"where": where, "rows": rows}), encoding="utf-8")
    return path


def test_a_method_that_is_measured_anew_takes_the_place_of_what_was_kept(known_answers, tmp_path: Path) -> None:
    first = {("lrp", "a"): 0.25, ("lrp", "b"): 0.5, ("generic", "a"): 1.0, ("generic", "b"): 0.75}
    first |= {("random", "a"): 0.1, ("random", "b"): 0.2}
    kept = tmp_path / "kept.json"
    known_answers.write_stored_results(
        kept, known_answers.read_measured_results([wrote(tmp_path / "1.json", "a CPU, float32", first)])
    )
    again = known_answers.read_measured_results(
        [
            wrote(tmp_path / "2.json", "a GPU, float32", {("lrp", "b"): 1.0, ("random", "a"): 0.1}),
            wrote(tmp_path / "3.json", "a GPU, float32", {("lrp", "c"): 0.125}),
        ]
    )
    known = known_answers.merge_results(known_answers.read_stored_results(kept), again)
    known_answers.write_stored_results(kept, known)
    assert known_answers.read_stored_results(kept) == known
    (column,) = known_answers._build_columns("logic", known, "precision")
    assert column.examples == ["a", "b", "c"]
    assert column.values_by_method["lrp"][1:].tolist() == [1.0, 0.125]  # and no longer 0.25 on a
    assert column.values_by_method["generic"][:2].tolist() == [1.0, 0.75]
    assert known_answers.format_devices(known) == "Measured on a GPU, float32; `generic` on a CPU, float32."


def test_controls_stay_where_they_have_more_examples(known_answers, tmp_path: Path) -> None:
    many = {("random", "a"): 0.25, ("random", "b"): 0.5, ("position", "a"): 0.0, ("position", "b"): 1.0}
    few = {("random", "a"): 0.25, ("position", "a"): 0.0, ("lrp", "a"): 1 / 3}
    kept, new = (known_answers.read_measured_results([wrote(tmp_path / "1.json", "a CPU", one)]) for one in (many, few))
    known = known_answers.merge_results(kept, new)
    assert known["logic", "text", "random"].metrics["precision"] == {"a": 0.25, "b": 0.5}
    assert known["logic", "text", "lrp"].metrics["precision"] == {"a": 0.333333333333}
    assert known_answers.merge_results(new, kept)["logic", "text", "position"].metrics["precision"] == {
        "a": 0.0,
        "b": 1.0,
    }


def test_other_examples_of_the_same_name_are_not_paired(known_answers, tmp_path: Path) -> None:
    """As of scenes drawn 24 and 60 at a time: the position baseline gives them away."""
    many = {(m, e): 0.5 for m in ("lrp", "random", "position") for e in ("a", "b", "c")}
    few = {("shap", "a"): 1.0, ("shap", "b"): 0.0, ("position", "a"): 0.25, ("position", "b"): 0.5}
    kept, new = (known_answers.read_measured_results([wrote(tmp_path / "1.json", "a CPU", one)]) for one in (many, few))
    (column,) = known_answers._build_columns("logic", known_answers.merge_results(kept, new), "precision")
    assert column.examples == ["a", "b", "c"] and list(column.values_by_method) == ["lrp", "random", "position"]
    assert column.unranked["shap"].tolist() == [1.0, 0.0]
    assert "(2 others) |" in known_answers.render_markdown_table([column])
