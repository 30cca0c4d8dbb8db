"""`clearhead bench` as a person types it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.bench.store import ResultStore
from clearhead.cli import main

pytest.importorskip("pyarrow")
pytest.importorskip("clearhead_zoo")
Said = tuple[int, str, str]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*arguments: object) -> Said:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, arguments)])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return call


def command(out: Path, *more: Any) -> tuple[Any, ...]:
    return ("--model", "zoo:logic", "--data", "known:logic", "--protocols", "truth", "--limit", 4, "--out", out, *more)


def test_a_run_shows_its_cost_and_its_table_and_goes_on(bench: Callable[..., Said], tmp_path: Path) -> None:
    code, out, _ = bench(*command(tmp_path / "run", "--methods", "saliency"))
    assert code == 0 and out.startswith("4 examples × 3 methods, 1 of 1 chunks to do")
    assert (
        "truth: minimal average precision (larger is better)" in out and "| saliency |" in out and "| random |" in out
    )
    more = ("--methods", "saliency", "--set", "truth.by=magnitude", "--json")
    code, out, _ = bench(*command(tmp_path / "run", *more))
    report = json.loads(out)
    assert code == 0 and (report["computed"], report["there_before"]) == (1, 0)
    code, out, _ = bench(*command(tmp_path / "run", *more))
    assert json.loads(out)["computed"] == 0
    code, out, _ = bench(*command(tmp_path / "run", *more[:-1]))
    assert out.startswith("4 examples × 3 methods, 0 of 1 chunks to do: all is there\n")
    assert (
        len(ResultStore(tmp_path / "run").read_manifest()["settings"]) == 2
    )  # both settings are known by their hashes


def test_rows_of_other_versions_are_told_once(
    bench: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = command(tmp_path / "run", "--methods", "saliency", "--json")
    assert "versions" not in bench(*given)[2]
    for module in ("runner", "worker"):
        monkeypatch.setattr(f"clearhead.bench.{module}.format_versions", lambda: "torch 99")
    code, out, said = bench(*given)
    told = [line for line in said.splitlines() if "other versions" in line]
    assert code == 0 and json.loads(out)["computed"] == 1
    assert len(told) == 1 and "12 rows" in told[0] and "now: torch 99" in told[0]
    assert "versions" not in bench(*given)[2]


def test_what_another_run_measured_is_taken_over(bench: Callable[..., Said], tmp_path: Path) -> None:
    for name in ("saliency", "rollout"):
        assert bench(*command(tmp_path / name, "--methods", name))[0] == 0
    both = (
        "--methods",
        "saliency,rollout",
        "--merge",
        tmp_path / "saliency",
        "--merge",
        tmp_path / "rollout",
        "--json",
    )
    code, out, _ = bench(*command(tmp_path / "both", *both))
    assert code == 0 and (json.loads(out)["computed"], json.loads(out)["there_before"]) == (0, 1)
    assert bench(*command(tmp_path / "whole", "--methods", "saliency,rollout"))[0] == 0
    assert (tmp_path / "both/table.parquet").read_bytes() == (tmp_path / "whole/table.parquet").read_bytes()
    code, _, said = bench(*command(tmp_path / "both", "--merge", tmp_path / "nothing"))
    assert code == 2 and "holds no benchmark run" in said


def test_a_reason_is_said_once_for_all_methods(bench: Callable[..., Said], tmp_path: Path) -> None:
    more = ("--methods", "saliency", "--protocols", "input-invariance")
    code, out, _ = bench(*command(tmp_path / "run", *more))
    assert code == 3 and out.count("not measured") == 1
    assert "not measured: input-invariance: position, random, saliency: input-invariance needs an image model" in out


def test_a_setting_that_a_protocol_cannot_do_without_is_asked_for(bench: Callable[..., Said], tmp_path: Path) -> None:
    code, _, said = bench(*command(tmp_path / "run", "--methods", "saliency", "--protocols", "label-randomisation"))
    assert code == 2 and "needs the model trained on permuted labels: other=NAME" in said
    assert not (tmp_path / "run").exists()


def test_an_empty_list_of_examples_is_refused(bench: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    code, _, said = bench(*command(tmp_path / "run", "--indices", tmp_path / "none.txt"))
    assert code == 2 and "is empty: list the indices of examples" in said


def test_settings_that_leave_no_example_are_told(bench: Callable[..., Said], tmp_path: Path) -> None:
    more = ("--methods", "saliency", "--protocols", "perturb-text", "--set", "perturb-text.examples=wrong")
    code, out, _ = bench(*command(tmp_path / "run", *more))  # the model of this task errs on none of the four
    assert code == 3 and "not measured: perturb-text: no example meets its requirements" in out


def test_labels_of_a_table_of_ones_own_are_read_from_the_column_that_is_named(
    bench: Callable[..., Said], tmp_path: Path
) -> None:
    (tmp_path / "texts.csv").write_text("text,verdict\na fine film,positive\na dull film,negative\n")
    run = ("--model", "zoo:sentiment", "--data", tmp_path / "texts.csv", "--protocols", "perturb-text")
    more = ("--methods", "saliency", "--set", "perturb-text.judged=gold", "--out", tmp_path / "run")
    code, out, _ = bench(*run, *more)
    assert code == 3 and "has no true class" in out
    code, _, _ = bench(*run, *more, "--option", "label_column=verdict")
    assert code == 0 and {row.figures["correct"] for row in ResultStore(tmp_path / "run").iter_table_rows()} == {1.0}
    code, _, err = bench(*run, *more, "--option", "label_column=stars")
    assert code == 2 and "unknown column 'stars'" in err
    code, _, err = bench(*run, *more, "--option", "label=stars")
    assert code == 2 and "did you mean 'label_column'" in err
    code, _, err = bench(*run, *more, "--option", "label_column")
    assert code == 2 and "write NAME=VALUE" in err


def test_two_fills_say_how_far_they_agree(bench: Callable[..., Said], tmp_path: Path) -> None:
    more = ("--methods", "saliency", "--protocols", "perturb-text", "--set", "perturb-text.fills=mask,pad")
    code, out, _ = bench(*command(tmp_path / "run", *more))
    assert (
        code == 0 and "agreement of the ranking by text/mask/positive and by text/pad/positive: Kendall's tau-b " in out
    )


def test_a_run_that_measures_nothing_is_a_failure(bench: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text\na and b\n")  # nobody says what the evidence is
    more = ("--data", tmp_path / "texts.csv")
    code, out, err = bench(*command(tmp_path / "run", *more))
    assert code == 3 and "not measured: truth" in out and "no measurements produced" in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--data", "lost.csv"), "there is no file or folder 'lost.csv'"),
        (("--methods", "salience"), "did you mean 'saliency'"),
        (("--protocols", "thruth"), "did you mean 'truth'"),
        (("--set", "truth.bye=score"), "did you mean 'by'"),
        (("--set", "truth.by=size"), "Accepted: score, magnitude"),
        (("--set", "truth.explained=best"), "unknown class to explain 'best'"),
        (("--protocols", "rationales", "--set", "rationales.spans=lines"), "Accepted: runs, words"),
        (("--protocols", "detections", "--set", "detections.cut=thin"), "Accepted: authors, after"),
        (("--protocols", "perturb-text", "--set", "perturb-text.fills=noise"), "unknown fill 'noise'"),
        (("--protocols", "perturb-text", "--set", "perturb-text.fills="), "no fill was given"),
        (("--protocols", "perturb-text", "--set", "perturb-text.fractions=0.5,0.2"), "fractions must be ascending"),
        (("--protocols", "perturb-text", "--set", "perturb-text.fractions=0.5,5"), "between 0 and 1"),
        (("--protocols", "perturb-text", "--set", "perturb-text.judged=best"), "unknown class to judge by 'best'"),
        (("--protocols", "perturb-text", "--set", "perturb-text.rounding=off"), "unknown rounding 'off'"),
        (("--engine", "cluster"), "Accepted: local, processes, ray"),
        (("--address", "auto"), "an address is for engine='ray'"),
        (("--data", "known:logik"), "did you mean 'logic'"),
        (("--indices", "no-such-file"), "is not a list of indices"),
    ],
)
def test_what_cannot_be_is_one_line(bench: Callable[..., Said], tmp_path: Path, more: Any, says: str) -> None:
    code, _, err = bench(*command(tmp_path / "run", *more))
    assert code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_told_before_the_model_is_opened(
    bench: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.load", lambda *args, **more: pytest.fail("opened"))
    (tmp_path / "run").write_text("a letter")
    code, out, err = bench(*command(tmp_path / "run"))
    assert code == 2 and "is no benchmark run" in err and not out


def test_another_dtype_is_another_model(bench: Callable[..., Said], tmp_path: Path) -> None:
    hashes = []
    for more, chunks in (((), 1), (("--dtype", "float64"), 1), (("--dtype", "float64"), 0)):
        code, out, _ = bench(*command(tmp_path / "run", "--methods", "saliency", "--json", *more))
        assert code == 0 and json.loads(out)["computed"] == chunks
        hashes.append({row.model for row in ResultStore(tmp_path / "run").iter_table_rows()})
    assert hashes[0] != hashes[1] == hashes[2] and all(len(own) == 1 for own in hashes)
