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
    told = ("--count", 6, "--methods", "saliency", "--permutations", 99, "--html", page, "--json")
    said = clearhead("bias", "code", source, "-m", masked, "--compare-model", masked, *told)
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
        (("--answers", "cs.txt"), "--answers FILE and --task translate need each other"),
        (("--task", "pairs"), "is not a classifier: --task pairs needs one"),
        (("--task", "translate", "--answers", "cs.txt"), "does not generate text: --task translate needs"),
        (("--methods", "salency"), "did you mean 'saliency'?"),
    ],
)
def test_what_cannot_be_done_is_one_line(refused, masked, source, arguments, said) -> None:
    assert said in refused("bias", "code", source, "-m", masked, *arguments)


def test_pairs_that_do_not_help(clearhead: Clearhead, refused, bert: Path, source: Path, tmp_path: Path) -> None:
    pairs, table = ("--task", "pairs", "--language", "python", "-m", bert), tmp_path / "pairs.tsv"
    assert "--task pairs needs --language" in refused("bias", "code", source, "--task", "pairs", "-m", bert)
    assert "is not a table: give a file that ends in .csv, .tsv" in refused("bias", "code", source, *pairs)
    assert f"there is no file '{table}'" in refused("bias", "code", table, *pairs)
    table.write_text("first\tsecond\tlabel\n", encoding="utf-8")
    assert "is empty: give one input per row" in refused("bias", "code", table, *pairs)
    rows = [f"x = {n}\tx = {n + 1}\tNEGATIVE" for n in range(4)]
    table.write_text("\n".join(["first\tsecond\tlabel", *rows]), encoding="utf-8")
    found = clearhead("bias", "code", table, *pairs, "--html", tmp_path / "code.html", "--json").json
    assert found["functions"] == 1 and found["accuracy"]["low"] is None
    assert any("joined by functions they share" in words for words in found["left out"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "first,second,label\nx,y,1\nf(x, y),y,0\n", "1 of 2 rows of 'a.csv' cannot be read"),
        ("a.csv", "first,second,label\nx,y,1\nf(x, y),y,0\n", "row 000002: 4 instead of 3 cells: put quotes"),
        # without an end the quote takes the rest of the file for one label, and the number of cells is right
        ("a.csv", 'first,second,label\nx,y,1\nx,y,"0\nx,z,1\n', "the row that begins in line 3 does not end properly"),
        ("a.csv", "first,second,first,label\nx,y,z,1\n", "2 columns are called 'first': give each its own name"),
        ("a.csv", "first,second,label,label\nx,y,0,1\n", "2 columns are called 'label': give each its own name"),
        ("a.tsv", "first\tother\tlabel\nx\ty\t1\n", "the columns first, second, label, but has first, other, label"),
        ("a.csv", "first,second,label\nx,'é',1\n".encode("latin-1"), "is not UTF-8 text (byte 22): save it as UTF-8"),
        ("a.csv", "first,second,label\nx,,1\n", "row 000001: the text is empty"),
        ("a.csv", "first,second,label\nx,y,\n", "row 000001: it has no label: give every row a value"),
        ("a.jsonl", '{"first": "x", "second": 3, "label": 1}', "column 'second' holds 3 instead of a text"),
    ],
)
def test_tables_of_pairs_are_read_whole_or_not_at_all(
    refused, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused("bias", "code", name, "--task", "pairs", "--language", "python", "-m", bert)
    assert says in said and name in said and not Path("code.html").exists()


def test_files_that_do_not_help(refused, masked: Path, tmp_path: Path) -> None:
    assert "there is no file" in refused("bias", "code", tmp_path / "none.py", "-m", masked)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "there are no functions in" in refused("bias", "code", tmp_path / "empty.py", "-m", masked)
    (tmp_path / "some.cob").write_text("x")
    assert "name it with --language" in refused("bias", "code", tmp_path / "some.cob", "-m", masked)


def test_help_has_examples(clearhead: Clearhead) -> None:
    said = clearhead("bias", "code", "--help")
    assert said.code == 0 and "clearhead bias code src/" in said.out
