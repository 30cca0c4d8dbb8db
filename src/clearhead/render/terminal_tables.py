"""Tables in a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

TableRows = Sequence[Mapping[str, Any]]


def build_terminal_table(columns: Sequence[str], rows: TableRows) -> Table:
    """Build a table for the terminal; the first column is bold and never wrapped.

    Args:
        columns: Keys of the rows, which are also the headings.
        rows: One mapping per row.

    Returns:
        What rich prints.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, style="bold" if number == 0 else None, no_wrap=number == 0)
    for line in rows:
        made.add_row(*(Text(format_table_cell(line[column])) for column in columns))
    return made


def format_table_cell(value: Any) -> str:
    """Format a value for a table: "yes" or "no", lists with commas ("nothing" if empty), anything else as text.

    Args:
        value: The value of a cell.

    Returns:
        The text.

    Example:
        >>> format_table_cell(True), format_table_cell(["read_out", "layer"]), format_table_cell([])
        ('yes', 'read out, layer', 'nothing')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)).replace("_", " ") or "nothing" if isinstance(value, list) else str(value)
