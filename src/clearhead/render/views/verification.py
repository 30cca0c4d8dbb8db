"""What was verified, as a table in a terminal and as a document for pages and notebooks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, view

if TYPE_CHECKING:
    from clearhead.verification import Line, Verification

HEADS = ("promise", *(FIGURES := ("measured", "allowed")), "")
_STYLES = {"holds": "green", "does not hold": "bold red", "cannot be asked": "dim"}


def render(found: "Verification") -> RenderableType:
    """One table, method after method, what cannot be asked with its reason, and the sum of it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="right" if head in FIGURES else "left", no_wrap=head in FIGURES)
    for method in found.methods:
        table.add_row(Text(name(method), style="bold"))
        for row in found.rows:
            if row.method == method:
                what, *figures, says = _cells(row)
                table.add_row(f"  {what}", *figures, Text(says, style=_STYLES[row.says]))
        table.add_section()
    return Group(table, Text(_sentence(found), style="bold" if found.ok else "bold red"))


def document(found: "Verification") -> Document:
    """The same for the renderer."""
    tables = [
        view("table", title=name(method), heads=list(HEADS), rows=[_cells(r) for r in found.rows if r.method == method])
        for method in found.methods
    ]
    return view("section", heading="Promises, measured", note=_sentence(found), parts=tables, more=[])


def _cells(row: "Line") -> list[str]:
    says = f"{row.says}: {name(row.why)}" if row.why else row.says
    return [name(row.what), *_figures(row), says]


def _figures(row: "Line") -> Iterator[str]:
    for figure in (row.measured, row.bound):
        yield "–" if figure is None else f"{figure:.2g}"


def _sentence(found: "Verification") -> str:
    inputs = "one input" if found.inputs == 1 else f"{found.inputs} inputs"
    return f"{name(found.model)}, on {inputs}: {found.summary}."
