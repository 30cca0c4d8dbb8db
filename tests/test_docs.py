"""What the documentation says is what the code does."""

import re
from pathlib import Path

import pytest

import clearhead
from clearhead.methods.catalogue import render_catalogue

ROOT = Path(__file__).parent.parent


def test_methods_page_is_generated_from_the_declarations() -> None:
    assert (ROOT / "docs" / "methods.md").read_text("utf-8") == render_catalogue(), "run make docs"


def test_memory_page_is_made_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_page

    rows = memory_page.read_rows(ROOT / "benchmarks" / "results" / "memory.jsonl")
    assert (ROOT / "docs" / "memory.md").read_text("utf-8") == memory_page.render_page(rows), (
        "run benchmarks/memory_page.py"
    )
    assert all(row["peak"] < 2048 for row in rows)
    assert {row["method"] for row in rows} == {memory_page.ALL_METHODS_ROW, *applying("zoo:sentiment")}
    compared = [row for row in rows if "gap" in row]
    assert len(compared) >= 29 and all(row["gap"] < 1e-5 for row in compared)


def applying(model: str) -> set[str]:
    return {line.name for line in clearhead.load(model).methods() if line.applies}


def test_known_answers_page_is_made_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packages" / "zoo" / "train"))
    import known_answers

    known = known_answers.read_stored_results(ROOT / "docs" / "known-answers.json")
    made = known_answers.render_page(known, known_answers.build_tables(known))
    assert (ROOT / "docs" / "known-answers.md").read_text("utf-8") == made, "run packages/zoo/train/known_answers.py"


def test_python_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "why.html").stat().st_size > 1000


def test_links_in_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
