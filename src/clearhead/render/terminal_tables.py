"""Tables in a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

TableRows = Sequence[Mapping[str, Any]]


def build_terminal_table(columns: Sequence[str], rows: TableRows) -> Table:
    """A table of lines by the names of their columns."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, style="bold" if number == 0 else None, no_wrap=number == 0)
    for line in rows:
        made.add_row(*(Text(format_table_cell(line[column])) for column in columns))
    return made


def format_table_cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)).replace("_", " ") or "nothing" if isinstance(value, list) else str(value)
