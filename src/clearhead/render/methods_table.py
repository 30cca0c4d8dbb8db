"""Tables of methods for terminals and notebooks, with notes about single methods below."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from clearhead.render.terminal_tables import TableRows, build_terminal_table, format_table_cell
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, make_view_model


def render_methods_table(columns: Sequence[str], rows: TableRows) -> RenderableType:
    """Render a table of methods and its notes for rich.

    Args:
        columns: Keys of the rows that are shown, in this order.
        rows: One mapping per method, with the cells of all columns, `method`, `guidance` and `note`.

    Returns:
        The table with the notes below it.
    """
    return Group(build_terminal_table(columns, rows), *map(Text, iter_method_notes(rows)))


def format_methods_table(columns: Sequence[str], rows: TableRows) -> str:
    """Render a table of methods as plain text, as wide as the terminal.

    Args:
        columns: Keys of the rows that are shown, in this order.
        rows: One mapping per method, as for `render_methods_table`.

    Returns:
        Lines without colours and without trailing space.
    """
    console = Console(color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(render_methods_table(columns, rows))
    return captured.get().rstrip()


def build_methods_view_model(columns: Sequence[str], rows: TableRows) -> ViewModel:
    """Build the view model of a table of methods, for notebooks.

    Args:
        columns: Keys of the rows that are shown, in this order.
        rows: One mapping per method, as for `render_methods_table`.

    Returns:
        A section that contains the table.
    """
    cells = [[escape_invisible(format_table_cell(row[column])) for column in columns] for row in rows]
    table = make_view_model("table", columns=list(columns), rows=cells)
    return make_view_model(
        "section",
        heading="Methods",
        note=escape_invisible("\n".join(iter_method_notes(rows))),
        children=[table],
        collapsed_children=[],
    )


def iter_method_notes(rows: TableRows) -> Iterator[str]:
    """Yield what each method measures and when it misleads; then each note once, after the names of its methods."""
    for row in rows:
        if row["guidance"]:
            yield f"{row['method']}: {row['guidance']}"
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        names = ", ".join(row["method"] for row in rows if row["note"] == note)
        yield f"{names}: {note}"
