"""The notebooks in examples/: committed files equal the output of the script, and they run."""

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
SCRIPT = runpy.run_path(str(FOLDER / "make.py"))
KINDS = ("text", "vit", "clip", "joint", "detector", "encoder-decoder", "decoder")


def list_cell_sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("kind", KINDS)
def test_committed_notebook_equals_script_and_has_outputs(kind: str) -> None:
    notebook = nbformat.read(FOLDER / f"{kind}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert list_cell_sources(notebook) == list_cell_sources(SCRIPT["notebook"](kind))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert (FOLDER / f"{kind}.ipynb").stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_notebook_executes(kind: str) -> None:
    pytest.importorskip("clearhead_zoo")
    notebook = SCRIPT["executed"](kind)
    assert any("text/html" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))
