"""`clearhead explain DATA --out DIR`: resumable, complete files only, identical bytes after any interruption."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import clearhead as ch
from tests.cli.conftest import Clearhead, read_folder

SENTENCE = "I like the movie because she hates a boring book and it is far too long"
TEXTS = [" ".join(SENTENCE.split()[i % 5 : 6 + (7 * i) % 10]) for i in range(21)]


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A table of 21 texts: the tenth is empty, the last contains a line break and a comma."""
    rows = [*TEXTS]
    rows[9], rows[20] = " ", 'so boring,\n"really"'
    path = tmp_path / "reviews.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(rows)])
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_has_result_file_and_index_line(
    clearhead: Clearhead, bert: Path, reviews: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = clearhead("explain", reviews, "-m", bert, "--column", "text", "--out", out, "--batch-size", 4)
    assert result.code == 3
    assert result.err == f"clearhead: 1 row of 21 could not be explained: see {out / 'errors.csv'}\n"
    lines = read_table(out / "index.csv")
    assert [line["row"] for line in lines] == [f"{i:06d}" for i in range(1, 22) if i != 10]
    assert read_table(out / "errors.csv") == [
        {"row": "000010", "message": "the text is empty: there is nothing to explain"}
    ]
    ex = ch.load(bert)
    for line in (lines[0], lines[-1]):
        stored = ch.load_explanation(out / line["file"])
        expected = ex.explain(stored.units.texts[0])
        assert stored.scores == pytest.approx(expected.scores, abs=1e-5)
        assert line["predicted"] == line["target"] == expected.prediction["label"]
        assert float(line["probability"]) == pytest.approx(expected.prediction["probability"], abs=1e-5)
        assert line["top"].split() == [name for name, _ in stored.words().top(5)]
    assert stored.units.texts == ('so boring,\n"really"',)


def test_rows_with_wrong_cell_count_are_errors(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    """An unquoted text with a comma would otherwise be explained up to the comma."""
    data, out = tmp_path / "a.csv", tmp_path / "out"
    data.write_text("text,label\nI like the first half, then it got boring,0\nso good,1\nlong\n\n")
    assert clearhead("explain", data, "-m", bert, "--out", out).code == 3
    assert [line["row"] for line in read_table(out / "index.csv")] == ["000002"]
    first, last = read_table(out / "errors.csv")
    assert first["row"] == "000001" and first["message"].startswith("3 instead of 2 cells")
    assert last["row"] == "000003" and last["message"].startswith("1 instead of 2 cells")


def test_finished_run_is_not_repeated(clearhead: Clearhead, bert: Path, reviews: Path, tmp_path: Path) -> None:
    command = ("explain", reviews, "-m", bert, "--out", tmp_path / "out", "--json")
    first, before = clearhead(*command), read_folder(tmp_path / "out")
    second = clearhead(*command)
    assert first.json == {
        **{"schema": "clearhead/run", "version": 2, "out": str(tmp_path / "out")},
        **{"rows": 21, "written": 20, "already_stored": 0, "failed": 1},
    }
    assert second.json == {**first.json, "written": 0, "already_stored": 20}
    assert read_folder(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--scale", "probability"), "scale was 'logit', now 'probability'"),
        (("--methods", "grad-sam"), "methods was ['ensemble'], now ['grad-sam']"),
        (("--batch-size", "3"), "batch_size was 8, now 3"),
        (("--column", "id"), "columns was ['text'], now ['id']"),
    ],
)
def test_changed_settings_in_same_folder_are_rejected(
    clearhead: Clearhead,
    run_failing: Callable[..., str],
    bert: Path,
    reviews: Path,
    tmp_path: Path,
    change: tuple[str, str],
    message: str,
) -> None:
    command = ("explain", reviews, "-m", bert, "--out", tmp_path / "out")
    clearhead(*command)
    before = read_folder(tmp_path / "out")
    assert message in run_failing(*command, *change)
    assert read_folder(tmp_path / "out") == before


def test_changed_data_in_same_folder_are_rejected(
    clearhead: Clearhead, run_failing: Callable[..., str], bert: Path, reviews: Path, tmp_path: Path
) -> None:
    command = ("explain", reviews, "-m", bert, "--out", tmp_path / "out")
    clearhead(*command)
    reviews.write_text(reviews.read_text().replace("movie", "book"))
    assert "the data have changed" in run_failing(*command)


def interrupt_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt in the middle of a batch, after so many complete batches."""
    explain, calls = ch.Explainer.explain, 0

    def explain_some(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 + batches:  # the first call only checks the settings
            raise KeyboardInterrupt
        return explain(self, *args, **options)

    monkeypatch.setattr(ch.Explainer, "explain", explain_some)


def test_interrupted_run_resumes_to_identical_output(
    clearhead: Clearhead, bert: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("explain", reviews, "-m", bert, "--methods", "generic,saliency", "--batch-size", 4, "--out")
    clearhead(*options, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        result = clearhead(*options, tmp_path / "stopped")
    assert result.code == 130 and result.out == ""
    assert result.err == (
        f"clearhead: interrupted: 8 of 21 rows are stored in {tmp_path / 'stopped'}; run the same command to resume\n"
    )
    assert len(read_table(tmp_path / "stopped" / "index.csv")) == 16
    resumed = clearhead(*options, tmp_path / "stopped")
    assert "12 of 21 rows explained, 8 were already stored" in resumed.out
    assert read_folder(tmp_path / "stopped") == read_folder(tmp_path / "whole")


def test_deleted_result_is_written_again_with_identical_bytes(
    clearhead: Clearhead, bert: Path, reviews: Path, tmp_path: Path
) -> None:
    command = ("explain", reviews, "-m", bert, "--batch-size", 4, "--out", tmp_path / "out")
    clearhead(*command)
    before = read_folder(tmp_path / "out")
    (tmp_path / "out" / "results" / "000006.ensemble.safetensors").unlink()
    (tmp_path / "out" / "results" / ".000006.ensemble.safetensors.1234.partial").write_bytes(b"half of")
    (tmp_path / "out" / "index.csv").unlink()
    clearhead(*command)
    assert read_folder(tmp_path / "out") == before


def test_killed_run_resumes_to_identical_output(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    """A killed process cleans nothing up; the next run writes the same output as an uninterrupted one."""
    count = 80  # enough that the process still runs when its first result appears
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": TEXTS[i % 21]}) + "\n" for i in range(count)))
    options = ["explain", str(path), "--model", str(bert), "--batch-size", "2", "--out"]
    command = [sys.executable, "-m", "clearhead", *options, str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = tmp_path / "killed" / "results"
    deadline = time.monotonic() + 120
    while not (results.exists() and any(results.glob("0*"))) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    done = len(list(results.glob("0*")))
    assert 0 < done < count
    assert clearhead(*options, tmp_path / "killed", "--json").json["already_stored"] == done
    clearhead(*options, tmp_path / "whole")
    assert read_folder(tmp_path / "killed") == read_folder(tmp_path / "whole")


def test_image_folder_is_explained_recursively(clearhead: Clearhead, vit: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "pets", tmp_path / "out"
    (folder / "cats").mkdir(parents=True)
    for number, name in enumerate(("a.png", "cats/a.jpg", "cats/b.png")):
        Image.new("RGB", (20 + number, 16), (90 * number, 50, 50)).save(folder / name)
    (folder / "cats" / "torn.jpg").write_bytes((folder / "cats" / "a.jpg").read_bytes()[:200])
    (folder / ".hidden.png").write_bytes(b"")
    assert clearhead("explain", folder, "-m", vit, "--out", out).code == 3
    assert [line["row"] for line in read_table(out / "index.csv")] == ["a.png", "cats/a.jpg", "cats/b.png"]
    [error] = read_table(out / "errors.csv")
    assert error["row"] == "cats/torn.jpg" and "cannot be opened as an image" in error["message"]
    assert ch.load_explanation(out / "results" / "cats" / "a.jpg.ensemble.safetensors").stream == "image"


def test_text_folder_and_table_of_image_paths_are_explained(
    clearhead: Clearhead, bert: Path, vit: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_text(f"I like {name} movie", encoding="utf-8-sig")
    assert clearhead("explain", folder, "-m", bert, "--out", tmp_path / "out").code == 0
    assert [line["row"] for line in read_table(tmp_path / "out" / "index.csv")] == ["a.txt", "b.txt"]

    Image.new("RGB", (16, 16)).save(tmp_path / "black.png")
    (tmp_path / "paths.tsv").write_text("path\tn\nblack.png\t1\nlost.png\t2\n")
    command = ("explain", tmp_path / "paths.tsv", "-m", vit, "--column", "path", "--out", tmp_path / "seen")
    assert clearhead(*command).code == 3
    assert [line["row"] for line in read_table(tmp_path / "seen" / "index.csv")] == ["000001"]
    assert "there is no image" in read_table(tmp_path / "seen" / "errors.csv")[0]["message"]


def test_jsonl_pairs_with_invalid_rows_are_explained(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"a": "I like it", "b": "So boring"}, {"a": "no partner"}, {"a": 3, "b": "x"}, ["no object"]]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n{torn\n")
    command = ("explain", path, "-m", bert, "--column", "a", "--pair-column", "b", "--out", tmp_path / "out", "--json")
    assert clearhead(*command).json["written"] == 1
    stored = ch.load_explanation(tmp_path / "out" / "results" / "000001.ensemble.safetensors")
    assert stored.units.texts == ("I like it", "So boring")
    assert [error["row"] for error in read_table(tmp_path / "out" / "errors.csv")] == [
        "000002",
        "000003",
        "000004",
        "000005",
    ]


def test_concurrent_run_in_same_folder_is_rejected(
    clearhead: Clearhead, run_failing: Callable[..., str], bert: Path, reviews: Path, tmp_path: Path
) -> None:
    fcntl = pytest.importorskip("fcntl")
    command = ("explain", reviews, "-m", bert, "--out", tmp_path / "out")
    clearhead(*command)
    with (tmp_path / "out" / "settings.json").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert "another run is writing" in run_failing(*command)


def test_folder_with_results_in_another_format_is_rejected(
    clearhead: Clearhead, run_failing: Callable[..., str], bert: Path, reviews: Path, tmp_path: Path
) -> None:
    command = ("explain", reviews, "-m", bert, "--out", tmp_path / "out")
    clearhead(*command)
    path = tmp_path / "out" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"version": 1}))
    assert "contains results in file format 1; this version of clearhead writes format 2" in run_failing(*command)


def test_mask_option_applies_to_every_row(clearhead: Clearhead, masked_lm: Path, tmp_path: Path) -> None:
    """The settings are checked on an example with one masked position; the rows have more."""
    path = tmp_path / "masks.csv"
    path.write_text("text\nI [MASK] the [MASK]\n[MASK] is [MASK] [MASK]\nonly [MASK]\n")
    command = ("explain", path, "-m", masked_lm, "--mask", 1, "--out")
    assert clearhead(*command, tmp_path / "out").code == 3
    assert [line["row"] for line in read_table(tmp_path / "out" / "index.csv")] == ["000001", "000002"]
    assert (
        "mask_index=1, but the text has 1 masked positions" in read_table(tmp_path / "out" / "errors.csv")[0]["message"]
    )
    result = clearhead(*command, tmp_path / "against", "--target", "book", "--against", "it", "--json")
    assert result.json["written"] == 2
