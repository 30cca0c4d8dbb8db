"""A saved explanation renders identically in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from tests.render import example_results
from tests.render.conftest import CHANGES
from tests.render.test_terminal import render_to_string

RENDER_PROGRAM = """
import sys
from pathlib import Path
import clearhead
from tests.render.test_terminal import render_to_string
for file in map(Path, sys.argv[1:]):
    explanation = clearhead.load_explanation(file)
    assert explanation.html(file.with_suffix(".html")) == file.with_suffix(".html")
    explanation.plot().get_figure(root=True).savefig(file.with_suffix(".png"))
    file.with_suffix(".txt").write_text(render_to_string(explanation), encoding="utf-8")
"""


@pytest.fixture(scope="module")
def saved_files(
    tmp_path_factory: pytest.TempPathFactory,
    text: dict[str, Explanation],
    image: dict[str, Explanation],
    pair: Explanation,
    truncated: Explanation,
) -> dict[Path, AnyExplanation]:
    folder = tmp_path_factory.mktemp("kept")
    with_missing_scores = CHANGES["some without a score"](text["attcat"])
    explanations: list[AnyExplanation] = [
        *text.values(),
        *image.values(),
        pair,
        truncated,
        with_missing_scores,
        text["generic"].words(),
    ]
    explanations += [*example_results.every().values(), example_results.every()["text and picture"].words()]
    files = {explanation.save(folder / f"{i}.safetensors"): explanation for i, explanation in enumerate(explanations)}
    python_path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": python_path, "PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", RENDER_PROGRAM, *map(str, files)], check=True, env=environment, cwd=Path.cwd()
    )
    return files


def test_html_is_identical_in_a_new_process(saved_files: dict[Path, AnyExplanation]) -> None:
    for file, explanation in saved_files.items():
        assert file.with_suffix(".html").read_bytes() == explanation.html().encode()


def test_terminal_output_is_identical_in_a_new_process(saved_files: dict[Path, AnyExplanation]) -> None:
    for file, explanation in saved_files.items():
        assert file.with_suffix(".txt").read_text(encoding="utf-8") == render_to_string(explanation)


def test_figure_is_identical_in_a_new_process(saved_files: dict[Path, AnyExplanation]) -> None:
    for file, explanation in saved_files.items():
        rendered = file.with_suffix(".again.png")
        explanation.plot().get_figure(root=True).savefig(rendered)
        assert file.with_suffix(".png").read_bytes() == rendered.read_bytes()
