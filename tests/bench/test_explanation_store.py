"""Explanations kept beside the figures come back as they were, and the report shows those in dispute."""

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


def data(kind: str) -> BenchmarkDataset:
    rows = [Example(f"e{i}", given) for i, given in enumerate(inputs(kind))]
    return BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row)


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / EXPLANATION_FOLDER).iterdir()}


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    run = BenchmarkRun(JOB, tmp_path / "run", ex, data("bert/classify"))
    run()
    assert len(files(tmp_path / "run")) == len(run.chunk_plan) == 2 and not run.find_missing_tasks()
    found = RunResults(tmp_path / "run").load_explanations({("e1", "saliency"), ("e2", "random"), ("e9", "saliency")})
    assert set(found) == {("e1", "saliency"), ("e2", "random")}
    fresh = ex.explain(inputs("bert/classify")[1], method="saliency")
    back = found["e1", "saliency"]
    assert back.units == fresh.units and back.scores == pytest.approx(fresh.scores, rel=1e-4)
    again = BenchmarkRun(JOB, tmp_path / "again", ex, data("bert/classify"))
    again()
    assert files(tmp_path / "again") == files(tmp_path / "run")  # same explanations, same bytes


def test_what_people_marked_is_drawn_under_the_text(tmp_path: Path) -> None:
    ex, texts = explainer("bert/classify"), inputs("bert/classify")
    rows = [Example(f"e{i}", text, evidence=((CharSpan(0, len(text.split()[0])),),)) for i, text in enumerate(texts)]
    BenchmarkRun(JOB, tmp_path / "run", ex, BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row))()
    finished = RunResults(tmp_path / "run")
    marked = finished.load_annotations({"e1"})
    (kept,) = finished.load_explanations({("e1", "saliency")}).values()
    starts = [start for start, stop in kept.units.offsets if stop > start]
    assert [kept.units.offsets[place][0] for place in marked["e1"]] == [
        start for start in starts if start < len(texts[1].split()[0])
    ]
    assert '"evidence":[1' in render_run_report(finished).replace(" ", "")


def test_explanations_can_be_asked_for_later(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    without = BenchmarkRun(replace(JOB, keep=False), tmp_path / "run", ex, data("bert/classify"))
    without()
    assert not (tmp_path / "run" / EXPLANATION_FOLDER).exists()
    table = (tmp_path / "run" / "table.parquet").read_bytes()
    later = BenchmarkRun(JOB, tmp_path / "run", ex, data("bert/classify"))
    assert len(later.find_missing_tasks()) == 2
    later()
    assert files(tmp_path / "run") and (tmp_path / "run" / "table.parquet").read_bytes() == table


def test_methods_that_were_measured_without_keeping_are_explained_for_it(tmp_path: Path) -> None:
    ex, few = explainer("bert/classify"), replace(JOB, methods=METHODS[:1])
    for job in (few, replace(JOB, keep=False), JOB):
        BenchmarkRun(job, tmp_path / "run", ex, data("bert/classify"))()
    assert len(RunResults(tmp_path / "run").load_explanations({("e0", method) for method in METHODS})) == 2
    assert not BenchmarkRun(JOB, tmp_path / "run", ex, data("bert/classify")).find_missing_tasks()


def test_what_another_run_kept_is_taken_over(tmp_path: Path) -> None:
    ex = explainer("bert/classify")
    BenchmarkRun(JOB, tmp_path / "other", ex, data("bert/classify"))()
    taking = BenchmarkRun(JOB, tmp_path / "run", ex, data("bert/classify"))
    taking.merge_from(tmp_path / "other")
    assert not taking.find_missing_tasks() and files(tmp_path / "run") == files(tmp_path / "other")


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    BenchmarkRun(JOB, tmp_path / "run", explainer("bert/classify"), data("bert/classify"))()
    path = next((tmp_path / "run" / EXPLANATION_FOLDER).iterdir())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=f"{path.name}' cannot be read .*: remove it"):
        RunResults(tmp_path / "run").load_explanations({("e0", "saliency"), ("e1", "saliency"), ("e2", "saliency")})


def test_the_report_shows_pictures_in_dispute(tmp_path: Path) -> None:
    settings = {"perturb-images": {"fractions": (0.5,), "fills": ("black",)}}
    job = replace(JOB, protocols=("perturb-images",), settings=settings)
    BenchmarkRun(job, tmp_path / "run", explainer("vit/image", torch.float32), data("vit/image"))()
    finished = RunResults(tmp_path / "run")
    (kept,) = finished.load_explanations({("e0", "saliency")}).values()
    assert kept.image is not None and kept.image.shape == (16, 16, 3) and kept.image.dtype == np.uint8
    assert "explained by" in render_run_report(finished) and "data:image/png" in render_run_report(finished)
    for path in (tmp_path / "run" / EXPLANATION_FOLDER).iterdir():
        path.unlink()
    assert "explain it" not in render_run_report(RunResults(tmp_path / "run"))
