"""Reading whole tables: one error lists all unreadable rows with the reasons."""

from pathlib import Path

import pytest

from clearhead.data.sources import collect_raw_inputs, open_dataset, read_column
from clearhead.errors import InputError


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "some.csv"
    path.write_text("text,label\nso good,1\n ,0\nso long, so boring,0\nI like it,\n", encoding="utf-8")
    return path


def test_unreadable_rows_are_listed(csv_file: Path) -> None:
    with pytest.raises(InputError) as raised:
        collect_raw_inputs(csv_file, open_dataset(csv_file).iter_rows("text"))
    assert str(raised.value) == (
        f"2 of 4 rows of '{csv_file}' cannot be read; fix or remove them: row 000002: the text is empty: there "
        "is nothing to explain; row 000003: 3 instead of 2 cells: put quotes around a text that contains the "
        "delimiter"
    )


def test_many_unreadable_rows_are_counted(csv_file: Path) -> None:
    csv_file.write_text("text,label\n" + "so good\n" * 5, encoding="utf-8")
    with pytest.raises(InputError, match=r"^5 of 5 rows .* row 000003: 1 instead of 2 cells: [^;]*; and 2 more$"):
        collect_raw_inputs(csv_file, open_dataset(csv_file).iter_rows("text"))


def test_read_column_stops_at_the_limit(csv_file: Path) -> None:
    assert read_column(csv_file, "label", 2) == ["1", "0"]
    with pytest.raises(InputError, match=r"2 of 4 rows .* row 000003: 3 instead .* row 000004: it has no label"):
        read_column(csv_file, "label")


def test_json_values_keep_their_type(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "so good", "label": 1}\n\n{"text": "so long", "label": 0}\n', encoding="utf-8")
    assert read_column(path, "label") == [1, 0] and collect_raw_inputs(path, open_dataset(path).iter_rows("text")) == [
        "so good",
        "so long",
    ]


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("some.csv", "text,labels", "unknown column 'label': did you mean 'labels'.*Accepted: text, labels$"),
        ("some.csv", "label,label", "2 columns are named 'label': give each column a unique name"),
        ("some.txt", "text,label", r"is not a table: use a file that ends in \.csv, \.tsv, \.jsonl, \.ndjson"),
    ],
)
def test_invalid_columns_raise(tmp_path: Path, name: str, head: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(f"{head}\nso good,1\n", encoding="utf-8")
    with pytest.raises(InputError, match=message) as raised:
        read_column(path, "label")
    assert name in str(raised.value)


def test_reading_folders_and_missing_files_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a table"):
        read_column(tmp_path, "label")
    with pytest.raises(InputError, match="there is no file"):
        read_column(tmp_path / "none.csv", "label")
