"""Stored explanations of benchmark runs: round trip, merging, and their use in the report."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead.bench.data import BenchmarkDataset, CharSpan, Example
from clearhead.bench.explanation_store import EXPLANATION_FOLDER
from clearhead.bench.job import BenchmarkJob
from clearhead.bench.report_page import render_run_report
from clearhead.bench.run_results import RunResults
from clearhead.bench.runner import BenchmarkRun
from clearhead.errors import InputError
from tests.models import explainer, inputs

pytest.importorskip("pyarrow")
METHODS = ("saliency", "input-x-gradient")
JOB = BenchmarkJob(
    "a model", "mine", METHODS, ("perturb-text",), {"perturb-text": {"fractions": (0.5,)}}, chunk=2, keep=True
)


def make_dataset(kind: str) -> BenchmarkDataset:
    rows = [Example(f"e{i}", raw) for i, raw in enumerate(inputs(kind))]
    return BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row)


def stored_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / EXPLANATION_FOLDER).iterdir()}


def test_stored_explanations_round_trip_and_are_deterministic(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    run = BenchmarkRun(JOB, tmp_path / "run", ex, make_dataset("bert/classify"))
    run()
    assert len(stored_files(tmp_path / "run")) == len(run.chunk_plan) == 2 and not run.find_missing_tasks()
    stored = RunResults(tmp_path / "run").load_explanations({("e1", "saliency"), ("e2", "random"), ("e9", "saliency")})
    assert set(stored) == {("e1", "saliency"), ("e2", "random")}
    expected = ex.explain(inputs("bert/classify")[1], method="saliency")
    actual = stored["e1", "saliency"]
    assert actual.units == expected.units and actual.scores == pytest.approx(expected.scores, rel=1e-4)
    second_run = BenchmarkRun(JOB, tmp_path / "again", ex, make_dataset("bert/classify"))
    second_run()
    assert stored_files(tmp_path / "again") == stored_files(tmp_path / "run")  # same explanations, same bytes


def test_report_contains_human_annotations(tmp_path: Path) -> None:
    ex, texts = explainer("bert/classify"), inputs("bert/classify")
    rows = [Example(f"e{i}", text, evidence=((CharSpan(0, len(text.split()[0])),),)) for i, text in enumerate(texts)]
    BenchmarkRun(JOB, tmp_path / "run", ex, BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row))()
    results = RunResults(tmp_path / "run")
    annotations = results.load_annotations({"e1"})
    (explanation,) = results.load_explanations({("e1", "saliency")}).values()
    starts = [start for start, stop in explanation.units.offsets if stop > start]
    assert [explanation.units.offsets[index][0] for index in annotations["e1"]] == [
        start for start in starts if start < len(texts[1].split()[0])
    ]
    assert '"evidence":[1' in render_run_report(results).replace(" ", "")


def test_keep_adds_explanations_to_finished_run(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    without = BenchmarkRun(replace(JOB, keep=False), tmp_path / "run", ex, make_dataset("bert/classify"))
    without()
    assert not (tmp_path / "run" / EXPLANATION_FOLDER).exists()
    table = (tmp_path / "run" / "table.parquet").read_bytes()
    later = BenchmarkRun(JOB, tmp_path / "run", ex, make_dataset("bert/classify"))
    assert len(later.find_missing_tasks()) == 2
    later()
    assert stored_files(tmp_path / "run") and (tmp_path / "run" / "table.parquet").read_bytes() == table


def test_keep_adds_explanations_of_measured_methods(tmp_path: Path) -> None:
    ex, one_method = explainer("bert/classify"), replace(JOB, methods=METHODS[:1])
    for job in (one_method, replace(JOB, keep=False), JOB):
        BenchmarkRun(job, tmp_path / "run", ex, make_dataset("bert/classify"))()
    assert len(RunResults(tmp_path / "run").load_explanations({("e0", method) for method in METHODS})) == 2
    assert not BenchmarkRun(JOB, tmp_path / "run", ex, make_dataset("bert/classify")).find_missing_tasks()


def test_merge_copies_stored_explanations(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    BenchmarkRun(JOB, tmp_path / "other", ex, make_dataset("bert/classify"))()
    merging = BenchmarkRun(JOB, tmp_path / "run", ex, make_dataset("bert/classify"))
    merging.merge_from(tmp_path / "other")
    assert not merging.find_missing_tasks() and stored_files(tmp_path / "run") == stored_files(tmp_path / "other")


def test_damaged_explanation_file_raises_with_path_and_remedy(tmp_path: Path) -> None:
    BenchmarkRun(JOB, tmp_path / "run", explainer("bert/classify"), make_dataset("bert/classify"))()
    path = next((tmp_path / "run" / EXPLANATION_FOLDER).iterdir())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=f"{path.name}' cannot be read .*: remove it"):
        RunResults(tmp_path / "run").load_explanations({("e0", "saliency"), ("e1", "saliency"), ("e2", "saliency")})


def test_report_shows_images_of_disagreement(tmp_path: Path) -> None:
    settings = {"perturb-images": {"fractions": (0.5,), "fills": ("black",)}}
    job = replace(JOB, protocols=("perturb-images",), settings=settings)
    BenchmarkRun(job, tmp_path / "run", explainer("vit/image", torch.float32), make_dataset("vit/image"))()
    results = RunResults(tmp_path / "run")
    (explanation,) = results.load_explanations({("e0", "saliency")}).values()
    assert (
        explanation.image is not None and explanation.image.shape == (16, 16, 3) and explanation.image.dtype == np.uint8
    )
    assert "explained by" in render_run_report(results) and "data:image/png" in render_run_report(results)
    for path in (tmp_path / "run" / EXPLANATION_FOLDER).iterdir():
        path.unlink()
    assert "explain it" not in render_run_report(RunResults(tmp_path / "run"))
