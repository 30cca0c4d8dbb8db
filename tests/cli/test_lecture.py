"""`clearhead lecture`: one command, one figure."""

from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Clearhead


def test_a_table_and_a_figure(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    said = clearhead("lecture", "I like the movie", "So boring", "-m", bert, "--figure", tmp_path / "all.png")
    assert said.code == 0 and said.err == f"wrote {tmp_path / 'all.png'}\n"
    assert "“I like the movie” → " in said.out and "Mean rank correlation" in said.out and "[CLS]" in said.out
    assert "\x1b" not in said.out
    with Image.open(tmp_path / "all.png") as picture:
        assert min(picture.size) > 400


def test_the_json_form(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    said = clearhead("lecture", "-m", bert, "--json", "--figure", tmp_path / "all.svg")
    assert [one["text"] for one in said.json["sentences"]][:2] == ["I like the movie", "I cannot wait for next time"]
    one = said.json["sentences"][0]
    assert one["methods"]["SHAP"]["special_shares"] == {"[CLS]": 0, "[SEP]": 0}
    assert len(one["methods"]["Grad-SAM"]["ranking"]) == len(one["methods"]["Grad-SAM"]["tokens"]) - 2
    assert (tmp_path / "all.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--figure", "all.doc"), "must end in one of .png, .svg, .pdf"),
        (("--figure", "no/where.png"), "there is no folder"),
        (("--figure", "."), "is a folder: name a file"),
    ],
)
def test_bad_places(refused, bert: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("lecture", "-m", bert, *arguments)


def test_other_models_are_refused(refused, vit: Path) -> None:
    assert "the lecture needs a text classifier" in refused("lecture", "-m", vit)
