"""The documentation agrees with the code."""

import json
import re
from pathlib import Path

import pytest

import clearhead
from clearhead.methods.catalogue import render_catalogue

ROOT = Path(__file__).parent.parent


def test_methods_page_is_generated_from_the_declarations() -> None:
    assert (ROOT / "docs" / "methods.md").read_text("utf-8") == render_catalogue(), "run make docs"


def test_memory_page_is_rendered_from_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_page

    rows = memory_page.read_rows(ROOT / "benchmarks" / "results" / "memory.jsonl")
    assert (ROOT / "docs" / "memory.md").read_text("utf-8") == memory_page.render_page(rows), (
        "run benchmarks/memory_page.py"
    )
    assert all(row["peak"] < 2048 for row in rows)
    assert {row["method"] for row in rows} == {memory_page.ALL_METHODS_ROW, *list_applicable_methods("zoo:sentiment")}
    compared = [row for row in rows if "gap" in row]
    assert len(compared) >= 29 and all(row["gap"] < 1e-5 for row in compared)


def list_applicable_methods(model: str) -> set[str]:
    return {line.name for line in clearhead.load(model).methods() if line.applies}


def test_known_answers_page_is_rendered_from_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packages" / "zoo" / "train"))
    import known_answers

    results = known_answers.read_stored_results(ROOT / "docs" / "known-answers.json")
    page = known_answers.render_page(results, known_answers.build_tables(results))
    assert (ROOT / "docs" / "known-answers.md").read_text("utf-8") == page, "run packages/zoo/train/known_answers.py"


def test_language_tasks_page_is_rendered_from_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import language_tasks
    import language_tasks_page

    results = json.loads((ROOT / "benchmarks" / "results" / "language-tasks.json").read_text("utf-8"))
    page = (ROOT / "docs" / "language-tasks.md").read_text("utf-8")
    assert page == language_tasks_page.render_page(results), "run benchmarks/language_tasks_page.py"
    for task, summary in results["summary"].items():
        for method, figures in summary["all"]["methods"].items():
            rows = [row for row in results["rows"] if (row["task"], row["method"]) == (task, method)]
            prompts = {row["prompt"] for row in rows}
            assert len(prompts) == len(rows) == figures["average_precision"]["n"], (task, method)
            assert prompts == set(range(len(rows))), "the first prompts of a file in random order"
            mean = sum(row["average_precision"] for row in rows) / len(rows)
            assert figures["average_precision"]["mean"] == pytest.approx(mean, abs=1e-4)
    assert set(results["summary"]) == set(language_tasks.TASK_FILES)


def test_readme_python_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "why.html").stat().st_size > 1000


def test_relative_links_point_to_existing_files() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
