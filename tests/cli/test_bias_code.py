"""`clearhead bias code`: page, table, JSON, and one-line errors."""

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
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    for component in text_model("roberta", "ForMaskedLM", torch.float32):
        component.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_page_and_json_report_statistics_by_class(
    clearhead: Clearhead, masked_lm: Path, source: Path, tmp_path: Path
) -> None:
    page = tmp_path / "code.html"
    options = ("--count", 6, "--methods", "saliency", "--permutations", 99, "--html", page, "--json")
    result = clearhead("bias", "code", source, "-m", masked_lm, "--compare-model", masked_lm, *options)
    assert result.code == 0 and f"wrote {page}" in result.err
    document = result.json
    assert document["schema"] == "clearhead/code-study" and document["questions"] == 6
    assert document["changed_cells"] == 0 < document["compared_cells"], "a model does not differ from itself"
    lines = {line["class"]: line for line in document["by_class"]}
    assert {"identifier", "keyword", "separator", "mask", "special"} <= set(lines)
    assert sum(line["token_fraction"] for line in lines.values()) == pytest.approx(1)
    assert lines["mask"]["saliency"]["count"] == 6 and any(
        "detector" in reason for reason in document["skipped_reasons"]
    )
    text = page.read_text("utf-8")
    assert "Syntax in a code model" in text and 'src="http' not in text and "declaration" in text


def test_terminal_table_of_java_functions(clearhead: Clearhead, masked_lm: Path, tmp_path: Path) -> None:
    source_file = tmp_path / "lines.txt"
    source_file.write_text("public int the(int he) {return he;}\npublic A(int it) {book(it);}\n", encoding="utf-8")
    page = tmp_path / "code.html"
    result = clearhead("bias", "code", source_file, "--language", "java", "-m", masked_lm, "--count", 4, "--html", page)
    assert result.code == 0 and "modifier" in result.out and "right:" in result.out and "skipped:" in result.out


def test_functions_of_two_languages_are_counted_separately(
    clearhead: Clearhead, masked_lm: Path, tmp_path: Path
) -> None:
    (tmp_path / "some.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "some.rb").write_text("def the(it)\n  it + 1\nend\ndef book(he)\n  he - 1\nend\n", encoding="utf-8")
    options = ("--count", 4, "--permutations", 99, "--html", tmp_path / "code.html", "--json")
    document = clearhead("bias", "code", tmp_path, "-m", masked_lm, *options).json
    assert document["questions"] == 4 and document["functions"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--language", "cobol"), "unknown language 'cobol'"),
        (("--task", "guess"), "unknown task 'guess'"),
        (("--answers", "cs.txt"), "--answers FILE and --task translate must be used together"),
        (("--task", "pairs"), "is not a classifier: --task pairs needs one"),
        (("--task", "translate", "--answers", "cs.txt"), "does not generate text: --task translate needs"),
        (("--methods", "salency"), "did you mean 'saliency'?"),
    ],
)
def test_invalid_options_are_rejected(run_failing, masked_lm, source, arguments, message) -> None:
    assert message in run_failing("bias", "code", source, "-m", masked_lm, *arguments)


def test_unusable_pair_tables_are_rejected(
    clearhead: Clearhead, run_failing, bert: Path, source: Path, tmp_path: Path
) -> None:
    pairs, table = ("--task", "pairs", "--language", "python", "-m", bert), tmp_path / "pairs.tsv"
    assert "--task pairs needs --language" in run_failing("bias", "code", source, "--task", "pairs", "-m", bert)
    assert "is not a table: use a file that ends in .csv, .tsv" in run_failing("bias", "code", source, *pairs)
    assert f"there is no file '{table}'" in run_failing("bias", "code", table, *pairs)
    table.write_text("first\tsecond\tlabel\n", encoding="utf-8")
    assert "is empty: write one input per row" in run_failing("bias", "code", table, *pairs)
    rows = [f"x = {n}\tx = {n + 1}\tNEGATIVE" for n in range(4)]
    table.write_text("\n".join(["first\tsecond\tlabel", *rows]), encoding="utf-8")
    document = clearhead("bias", "code", table, *pairs, "--html", tmp_path / "code.html", "--json").json
    assert document["functions"] == 1 and document["accuracy"]["low"] is None
    assert any("joined by functions they share" in reason for reason in document["skipped_reasons"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "first,second,label\nx,y,1\nf(x, y),y,0\n", "1 of 2 rows of 'a.csv' cannot be read"),
        ("a.csv", "first,second,label\nx,y,1\nf(x, y),y,0\n", "row 000002: 4 instead of 3 cells: put quotes"),
        # an unclosed quote turns the rest of the file into one label, with the right number of cells
        ("a.csv", 'first,second,label\nx,y,1\nx,y,"0\nx,z,1\n', "the row that begins on line 3 does not end properly"),
        ("a.csv", "first,second,first,label\nx,y,z,1\n", "2 columns are named 'first': give each column a unique name"),
        ("a.csv", "first,second,label,label\nx,y,0,1\n", "2 columns are named 'label': give each column a unique name"),
        ("a.tsv", "first\tother\tlabel\nx\ty\t1\n", "the columns first, second, label, but has first, other, label"),
        ("a.csv", "first,second,label\nx,'é',1\n".encode("latin-1"), "is not UTF-8 text (byte 22): save it as UTF-8"),
        ("a.csv", "first,second,label\nx,,1\n", "row 000001: the text is empty"),
        ("a.csv", "first,second,label\nx,y,\n", "row 000001: it has no label: give every row a value"),
        ("a.jsonl", '{"first": "x", "second": 3, "label": 1}', "column 'second' contains 3 instead of a text"),
    ],
)
def test_pair_table_with_invalid_row_is_rejected(
    run_failing,
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | bytes,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    error = run_failing("bias", "code", name, "--task", "pairs", "--language", "python", "-m", bert)
    assert message in error and name in error and not Path("code.html").exists()


def test_unusable_source_files_are_rejected(run_failing, masked_lm: Path, tmp_path: Path) -> None:
    assert "there is no file" in run_failing("bias", "code", tmp_path / "none.py", "-m", masked_lm)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "there are no functions in" in run_failing("bias", "code", tmp_path / "empty.py", "-m", masked_lm)
    (tmp_path / "some.cob").write_text("x")
    assert "specify it with --language" in run_failing("bias", "code", tmp_path / "some.cob", "-m", masked_lm)


def test_help_has_examples(clearhead: Clearhead) -> None:
    result = clearhead("bias", "code", "--help")
    assert result.code == 0 and "clearhead bias code src/" in result.out
