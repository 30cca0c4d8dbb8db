"""Tables that are read whole: which rows cannot be read, and why, in one message."""

from pathlib import Path

import pytest

from clearhead.data.sources import cells_of, open_dataset, whole
from clearhead.errors import InputError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "some.csv"
    path.write_text("text,label\nso good,1\n ,0\nso long, so boring,0\nI like it,\n", encoding="utf-8")
    return path


def test_all_rows_that_cannot_be_read_are_told(table: Path) -> None:
    with pytest.raises(InputError) as refused:
        whole(table, open_dataset(table).rows("text"))
    assert str(refused.value) == (
        f"2 of 4 rows of '{table}' cannot be read, so mend them or take them out: row 000002: the text is empty: there "
        "is nothing to explain; row 000003: 3 in place of 2 cells: put quotes around a text that holds what stands "
        "between cells"
    )


def test_of_many_rows_some_are_told_and_the_others_counted(table: Path) -> None:
    table.write_text("text,label\n" + "so good\n" * 5, encoding="utf-8")
    with pytest.raises(InputError, match=r"^5 of 5 rows .* row 000003: 1 in place of 2 cells: [^;]*; and 2 more$"):
        whole(table, open_dataset(table).rows("text"))


def test_a_column_is_read_as_far_as_it_is_asked_for(table: Path) -> None:
    assert cells_of(table, "label", 2) == ["1", "0"]
    with pytest.raises(InputError, match=r"2 of 4 rows .* row 000003: 3 in .* row 000004: it has no label"):
        cells_of(table, "label")


def test_cells_of_lines_are_as_they_stand_there(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "so good", "label": 1}\n\n{"text": "so long", "label": 0}\n', encoding="utf-8")
    assert cells_of(path, "label") == [1, 0] and whole(path, open_dataset(path).rows("text")) == ["so good", "so long"]


@pytest.mark.parametrize(
    ("name", "head", "says"),
    [
        ("some.csv", "text,labels", "unknown column 'label': did you mean 'labels'.*Accepted: text, labels$"),
        ("some.csv", "label,label", "2 columns are called 'label': give each its own name"),
        ("some.txt", "text,label", r"is no table: give a file that ends in \.csv, \.tsv, \.jsonl, \.ndjson"),
    ],
)
def test_columns_that_do_not_help(tmp_path: Path, name: str, head: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(f"{head}\nso good,1\n", encoding="utf-8")
    with pytest.raises(InputError, match=says) as refused:
        cells_of(path, "label")
    assert name in str(refused.value)


def test_what_is_no_file_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no table"):
        cells_of(tmp_path, "label")
    with pytest.raises(InputError, match="there is no file"):
        cells_of(tmp_path / "none.csv", "label")
