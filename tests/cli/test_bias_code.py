"""`clearhead bias code`: a page, a table, JSON, and one line for what cannot be done."""

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Clearhead
from tests.models import text_model

SOURCE = """
class A:
    def the(he, it):
        if he > it:
            return it
        return he + 1

    def book(it):
        for he in it:
            it = he
        return it
"""


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    for part in text_model("roberta", "ForMaskedLM", torch.float32):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_a_page_and_its_numbers(clearhead: Clearhead, masked: Path, source: Path, tmp_path: Path) -> None:
    page = tmp_path / "code.html"
    told = ("--count", 6, "--method", "saliency", "--permutations", 99, "--html", page, "--json")
    said = clearhead("bias", "code", source, "-m", masked, "--against", masked, *told)
    assert said.code == 0 and f"wrote {page}" in said.err
    found = said.json
    assert found["schema"] == "clearhead/code-study" and found["questions"] == 6
    assert found["changed cells"] == 0 < found["compared cells"], "a model does not differ from itself"
    lines = {line["class"]: line for line in found["classes"]}
    assert {"identifier", "keyword", "separator", "mask", "special"} <= set(lines)
    assert sum(line["share of tokens"] for line in lines.values()) == pytest.approx(1)
    assert lines["mask"]["saliency"]["count"] == 6 and any("detector" in words for words in found["left out"])
    text = page.read_text("utf-8")
    assert "Syntax in a code model" in text and 'src="http' not in text and "declaration" in text


def test_a_table_for_people(clearhead: Clearhead, masked: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("public int the(int he) {return he;}\npublic A(int it) {book(it);}\n", encoding="utf-8")
    page = tmp_path / "code.html"
    said = clearhead("bias", "code", lines, "--language", "java", "-m", masked, "--count", 4, "--html", page)
    assert said.code == 0 and "modifier" in said.out and "right:" in said.out and "not done:" in said.out


def test_functions_of_two_languages_are_different_functions(clearhead: Clearhead, masked: Path, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "some.rb").write_text("def the(it)\n  it + 1\nend\ndef book(he)\n  he - 1\nend\n", encoding="utf-8")
    told = ("--count", 4, "--permutations", 99, "--html", tmp_path / "code.html", "--json")
    found = clearhead("bias", "code", tmp_path, "-m", masked, *told).json
    assert found["questions"] == 4 and found["functions"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--language", "cobol"), "unknown language 'cobol'"),
        (("--task", "guess"), "unknown task 'guess'"),
        (("--answers", "cs.txt"), "--answers FILE goes with --task translate"),
        (("--task", "pairs"), "is no classifier: --task pairs needs one"),
        (("--task", "translate", "--answers", "cs.txt"), "writes no text: --task translate needs"),
        (("--method", "salency"), "did you mean 'saliency'?"),
    ],
)
def test_what_cannot_be_done_is_one_line(refused, masked, source, arguments, said) -> None:
    assert said in refused("bias", "code", source, "-m", masked, *arguments)


def test_pairs_that_do_not_help(clearhead: Clearhead, refused, bert: Path, source: Path, tmp_path: Path) -> None:
    pairs, table = ("--task", "pairs", "--language", "python", "-m", bert), tmp_path / "pairs.tsv"
    assert "pairs need --language" in refused("bias", "code", source, "--task", "pairs", "-m", bert)
    assert "must have the columns first, second, label" in refused("bias", "code", source, *pairs)
    table.write_text("first\tsecond\tlabel\n", encoding="utf-8")
    assert "there are no pairs in" in refused("bias", "code", table, *pairs)
    rows = [f"x = {n}\tx = {n + 1}\tNEGATIVE" for n in range(4)]
    table.write_text("\n".join(["first\tsecond\tlabel", *rows]), encoding="utf-8")
    found = clearhead("bias", "code", table, *pairs, "--html", tmp_path / "code.html", "--json").json
    assert found["functions"] == 1 and found["accuracy"]["low"] is None
    assert any("joined by functions they share" in words for words in found["left out"])


def test_files_that_do_not_help(refused, masked: Path, tmp_path: Path) -> None:
    assert "there is no file" in refused("bias", "code", tmp_path / "none.py", "-m", masked)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "there are no functions in" in refused("bias", "code", tmp_path / "empty.py", "-m", masked)
    (tmp_path / "some.cob").write_text("x")
    assert "say it with --language" in refused("bias", "code", tmp_path / "some.cob", "-m", masked)


def test_help_has_examples(clearhead: Clearhead) -> None:
    said = clearhead("bias", "code", "--help")
    assert said.code == 0 and "clearhead bias code src/" in said.out
