"""`clearhead lecture`: table, JSON and figure from one command."""

from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Clearhead


def test_lecture_prints_table_and_writes_figure(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    result = clearhead("lecture", "I like the movie", "So boring", "-m", bert, "--figure", tmp_path / "all.png")
    assert result.code == 0 and result.err == f"wrote {tmp_path / 'all.png'}\n"
    assert "“I like the movie” → " in result.out and "Mean rank correlation" in result.out and "[CLS]" in result.out
    assert "\x1b" not in result.out
    with Image.open(tmp_path / "all.png") as figure:
        assert min(figure.size) > 400


def test_json_lists_sentences_with_rankings_by_method(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    result = clearhead("lecture", "-m", bert, "--json", "--figure", tmp_path / "all.svg")
    assert [sentence["text"] for sentence in result.json["sentences"]][:2] == [
        "I like the movie",
        "I cannot wait for next time",
    ]
    sentence = result.json["sentences"][0]
    assert sentence["methods"]["SHAP"]["special_shares"] == {"[CLS]": 0, "[SEP]": 0}
    assert len(sentence["methods"]["Grad-SAM"]["ranking"]) == len(sentence["methods"]["Grad-SAM"]["tokens"]) - 2
    assert (tmp_path / "all.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--figure", "all.doc"), "must end in one of .png, .svg, .pdf"),
        (("--figure", "no/where.png"), "there is no folder"),
        (("--figure", "."), "is a folder: specify a file"),
    ],
)
def test_invalid_figure_paths_are_rejected(run_failing, bert: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in run_failing("lecture", "-m", bert, *arguments)


def test_image_model_is_rejected(run_failing, vit: Path) -> None:
    assert "the lecture needs a text classifier" in run_failing("lecture", "-m", vit)
