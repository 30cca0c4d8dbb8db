"""Tables of methods for a terminal and for notebooks, with what is to be known of some below them."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from clearhead.render.terminal_tables import Lines, cell, table
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, view


def render(columns: Sequence[str], lines: Lines) -> RenderableType:
    return Group(table(columns, lines), *map(Text, notes(lines)))


def text(columns: Sequence[str], lines: Lines) -> str:
    """The same without colours, as wide as the terminal."""
    console = Console(color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as shown:
        console.print(render(columns, lines))
    return shown.get().rstrip()


def document(columns: Sequence[str], lines: Lines) -> Document:
    """The same for the renderer."""
    rows = [[name(cell(line[column])) for column in columns] for line in lines]
    made = view("table", heads=list(columns), rows=rows)
    return view("section", heading="Methods", note=name("\n".join(notes(lines))), parts=[made], more=[])


def notes(lines: Lines) -> Iterator[str]:
    """What to know before using some of the methods, each note once, after the methods that it is about."""
    for note in dict.fromkeys(line["note"] for line in lines if line["note"]):
        yield f"{', '.join(line['method'] for line in lines if line['note'] == note)}: {note}"
