"""The command `clearhead bench`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.bench.store import ResultStore
from clearhead.cli import main

pytest.importorskip("pyarrow")
pytest.importorskip("clearhead_zoo")
CommandResult = tuple[int, str, str]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    def call(*arguments: object) -> CommandResult:
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", *map(str, arguments)])
        output = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, output.out, output.err

    return call


def command(out: Path, *options: Any) -> tuple[Any, ...]:
    return (
        "--model",
        "zoo:logic",
        "--data",
        "known:logic",
        "--protocols",
        "truth",
        "--limit",
        4,
        "--out",
        out,
        *options,
    )


def test_run_prints_cost_and_table_and_resumes(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    code, out, _ = bench(*command(tmp_path / "run", "--methods", "saliency"))
    assert code == 0 and out.startswith("4 examples × 3 methods, 1 of 1 chunks to compute")
    assert (
        "truth: minimal average precision (larger is better)" in out and "| saliency |" in out and "| random |" in out
    )
    options = ("--methods", "saliency", "--set", "truth.by=magnitude", "--json")
    code, out, _ = bench(*command(tmp_path / "run", *options))
    report = json.loads(out)
    assert code == 0 and (report["computed"], report["already_stored"]) == (1, 0)
    code, out, _ = bench(*command(tmp_path / "run", *options))
    assert json.loads(out)["computed"] == 0
    code, out, _ = bench(*command(tmp_path / "run", *options[:-1]))
    assert out.startswith("4 examples × 3 methods, 0 of 1 chunks to compute: all results are stored\n")
    # both settings are stored by their hashes
    assert len(ResultStore(tmp_path / "run").read_manifest()["settings"]) == 2


def test_rows_of_other_versions_warn_once(
    bench: Callable[..., CommandResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(tmp_path / "run", "--methods", "saliency", "--json")
    assert "versions" not in bench(*arguments)[2]
    for module in ("runner", "worker"):
        monkeypatch.setattr(f"clearhead.bench.{module}.format_versions", lambda: "torch 99")
    code, out, err = bench(*arguments)
    warnings = [line for line in err.splitlines() if "other versions" in line]
    assert code == 0 and json.loads(out)["computed"] == 1
    assert len(warnings) == 1 and "12 rows" in warnings[0] and "current versions: torch 99" in warnings[0]
    assert "versions" not in bench(*arguments)[2]


def test_merge_option_reuses_measurements_of_other_runs(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    for name in ("saliency", "rollout"):
        assert bench(*command(tmp_path / name, "--methods", name))[0] == 0
    options = (
        "--methods",
        "saliency,rollout",
        "--merge",
        tmp_path / "saliency",
        "--merge",
        tmp_path / "rollout",
        "--json",
    )
    code, out, _ = bench(*command(tmp_path / "both", *options))
    assert code == 0 and (json.loads(out)["computed"], json.loads(out)["already_stored"]) == (0, 1)
    assert bench(*command(tmp_path / "whole", "--methods", "saliency,rollout"))[0] == 0
    assert (tmp_path / "both/table.parquet").read_bytes() == (tmp_path / "whole/table.parquet").read_bytes()
    code, _, err = bench(*command(tmp_path / "both", "--merge", tmp_path / "nothing"))
    assert code == 2 and "contains no benchmark run" in err


def test_failure_reason_is_printed_once_for_all_methods(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    options = ("--methods", "saliency", "--protocols", "input-invariance")
    code, out, _ = bench(*command(tmp_path / "run", *options))
    assert code == 3 and out.count("not measured") == 1
    assert "not measured: input-invariance: position, random, saliency: input-invariance needs an image model" in out


def test_missing_required_setting_fails_before_run(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    code, _, err = bench(*command(tmp_path / "run", "--methods", "saliency", "--protocols", "label-randomisation"))
    assert code == 2 and "needs the model trained on permuted labels: other=NAME" in err
    assert not (tmp_path / "run").exists()


def test_empty_indices_file_fails(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    code, _, err = bench(*command(tmp_path / "run", "--indices", tmp_path / "none.txt"))
    assert code == 2 and "is empty: list the indices of examples" in err


def test_settings_without_matching_examples_fail(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    options = ("--methods", "saliency", "--protocols", "perturb-text", "--set", "perturb-text.examples=wrong")
    code, out, _ = bench(*command(tmp_path / "run", *options))  # the model of this task predicts all four correctly
    assert code == 3 and "not measured: perturb-text: no example meets its requirements" in out


def test_label_column_option_reads_labels_of_csv_table(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,verdict\na fine film,positive\na dull film,negative\n")
    run = ("--model", "zoo:sentiment", "--data", tmp_path / "texts.csv", "--protocols", "perturb-text")
    options = ("--methods", "saliency", "--set", "perturb-text.judged=gold", "--out", tmp_path / "run")
    code, out, _ = bench(*run, *options)
    assert code == 3 and "has no true class" in out
    code, _, _ = bench(*run, *options, "--label-column", "verdict")
    assert code == 0 and {row.figures["correct"] for row in ResultStore(tmp_path / "run").iter_table_rows()} == {1.0}
    code, _, err = bench(*run, *options, "--label-column", "stars")
    assert code == 2 and "unknown column 'stars'" in err
    code, _, err = bench(*run, *options, "--option", "label=stars")
    assert code == 2 and "did you mean 'label_column'" in err
    code, _, err = bench(*run, *options, "--option", "label_column")
    assert code == 2 and "write NAME=VALUE" in err
    code, _, err = bench(*run, *options, "--option", "label_column=stars")
    assert code == 2 and "write --label-column stars" in err


def test_two_fills_print_rank_agreement(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    options = ("--methods", "saliency", "--protocols", "perturb-text", "--set", "perturb-text.fills=mask,pad")
    code, out, _ = bench(*command(tmp_path / "run", *options))
    assert (
        code == 0 and "agreement of the ranking by text/mask/positive and by text/pad/positive: Kendall's tau-b " in out
    )


def test_run_without_measurements_fails(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text\na and b\n")  # there is no evidence column
    options = ("--data", tmp_path / "texts.csv")
    code, out, err = bench(*command(tmp_path / "run", *options))
    assert code == 3 and "not measured: truth" in out and "no measurements were produced" in err


@pytest.mark.parametrize(
    ("options", "message"),
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
        (("--address", "auto"), "an address is only for engine='ray'"),
        (("--data", "known:logik"), "did you mean 'logic'"),
        (("--indices", "no-such-file"), "is not a list of indices"),
    ],
)
def test_invalid_option_prints_one_line_error(
    bench: Callable[..., CommandResult], tmp_path: Path, options: Any, message: str
) -> None:
    code, _, err = bench(*command(tmp_path / "run", *options))
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_foreign_output_folder_fails_before_model_is_loaded(
    bench: Callable[..., CommandResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.load", lambda *args, **options: pytest.fail("opened"))
    (tmp_path / "run").write_text("a letter")
    code, out, err = bench(*command(tmp_path / "run"))
    assert code == 2 and "is not a benchmark run" in err and not out


def test_dtype_changes_model_hash(bench: Callable[..., CommandResult], tmp_path: Path) -> None:
    hashes = []
    for options, chunks in (((), 1), (("--dtype", "float64"), 1), (("--dtype", "float64"), 0)):
        code, out, _ = bench(*command(tmp_path / "run", "--methods", "saliency", "--json", *options))
        assert code == 0 and json.loads(out)["computed"] == chunks
        hashes.append({row.model for row in ResultStore(tmp_path / "run").iter_table_rows()})
    assert hashes[0] != hashes[1] == hashes[2] and all(len(model_hashes) == 1 for model_hashes in hashes)
