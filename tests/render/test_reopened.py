"""Law 7: a result file re-opens in a new process and shows the same picture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from tests.render import example_results
from tests.render.conftest import CHANGES
from tests.render.test_terminal import printed

OTHER = """
import sys
from pathlib import Path
import clearhead
from tests.render.test_terminal import printed
for file in map(Path, sys.argv[1:]):
    explanation = clearhead.load_explanation(file)
    assert explanation.html(file.with_suffix(".html")) == file.with_suffix(".html")
    explanation.plot().get_figure(root=True).savefig(file.with_suffix(".png"))
    file.with_suffix(".txt").write_text(printed(explanation), encoding="utf-8")
"""


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory,
    text: dict[str, Explanation],
    image: dict[str, Explanation],
    pair: Explanation,
    cut: Explanation,
) -> dict[Path, AnyExplanation]:
    folder = tmp_path_factory.mktemp("kept")
    holed = CHANGES["some without a score"](text["attcat"])
    every: list[AnyExplanation] = [*text.values(), *image.values(), pair, cut, holed, text["generic"].words()]
    every += [*example_results.every().values(), example_results.every()["text and picture"].words()]
    files = {explanation.save(folder / f"{i}.safetensors"): explanation for i, explanation in enumerate(every)}
    here = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": here, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", OTHER, *map(str, files)], check=True, env=environment, cwd=Path.cwd())
    return files


def test_the_same_page(kept: dict[Path, AnyExplanation]) -> None:
    for file, explanation in kept.items():
        assert file.with_suffix(".html").read_bytes() == explanation.html().encode()


def test_the_same_terminal(kept: dict[Path, AnyExplanation]) -> None:
    for file, explanation in kept.items():
        assert file.with_suffix(".txt").read_text(encoding="utf-8") == printed(explanation)


def test_the_same_figure(kept: dict[Path, AnyExplanation]) -> None:
    for file, explanation in kept.items():
        again = file.with_suffix(".again.png")
        explanation.plot().get_figure(root=True).savefig(again)
        assert file.with_suffix(".png").read_bytes() == again.read_bytes()
