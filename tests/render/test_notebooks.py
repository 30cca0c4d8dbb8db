"""The notebooks in examples/: what is in the repository is what the script writes, and it runs."""

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
SCRIPT = runpy.run_path(str(FOLDER / "make.py"))
KINDS = ("text", "vit", "clip", "joint", "detector", "encoder-decoder", "decoder")


def sources(made: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in made.cells]


@pytest.mark.parametrize("kind", KINDS)
def test_the_notebook_is_what_the_script_writes_and_has_run(kind: str) -> None:
    made = nbformat.read(FOLDER / f"{kind}.ipynb", as_version=4)
    nbformat.validate(made)
    assert sources(made) == sources(SCRIPT["notebook"](kind))
    outputs = [output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert (FOLDER / f"{kind}.ipynb").stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_notebook_runs(kind: str) -> None:
    pytest.importorskip("clearhead_zoo")
    made = SCRIPT["executed"](kind)
    assert any("text/html" in output.get("data", {}) for cell in made.cells for output in cell.get("outputs", ()))
