"""Results of `clearhead.verify` as a table for terminals, and as a view model for HTML pages and notebooks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, make_view_model

if TYPE_CHECKING:
    from clearhead.verification import CheckResult, Verification

VERIFICATION_COLUMNS = ("property", *(FIGURES := ("measured", "bound")), "status")
_STATUS_STYLES = {"passed": "green", "failed": "bold red", "not_applicable": "dim"}


def render_verification(verification: "Verification") -> RenderableType:
    """Render the results of all checks as one table grouped by method, with a summary below.

    Args:
        verification: The results.

    Returns:
        What rich prints.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in VERIFICATION_COLUMNS:
        table.add_column(head, justify="right" if head in FIGURES else "left", no_wrap=head in FIGURES)
    for method in verification.methods:
        table.add_row(Text(escape_invisible(method), style="bold"))
        for row in verification.results:
            if row.method == method:
                checked_property, *figures, status = _format_result_row(row)
                table.add_row(f"  {checked_property}", *figures, Text(status, style=_STATUS_STYLES[row.status]))
        table.add_section()
    return Group(table, Text(_format_summary(verification), style="bold" if verification.ok else "bold red"))


def build_verification_view_model(verification: "Verification") -> ViewModel:
    """Build the view model: one table per method, and a summary."""
    tables = [
        make_view_model(
            "table",
            title=escape_invisible(method),
            columns=list(VERIFICATION_COLUMNS),
            rows=[_format_result_row(r) for r in verification.results if r.method == method],
        )
        for method in verification.methods
    ]
    return make_view_model(
        "section",
        heading="Declared properties, measured",
        note=_format_summary(verification),
        children=tables,
        collapsed_children=[],
    )


def _format_result_row(row: "CheckResult") -> list[str]:
    """Format property, measured value, bound, and status with its reason."""
    status = row.status.replace("_", " ")
    if row.reason:
        status = f"{status}: {escape_invisible(row.reason)}"
    return [escape_invisible(row.property), *_iter_formatted_values(row), status]


def _iter_formatted_values(row: "CheckResult") -> Iterator[str]:
    for figure in (row.measured, row.bound):
        yield "–" if figure is None else f"{figure:.2g}"


def _format_summary(found: "Verification") -> str:
    inputs = "one input" if found.num_inputs == 1 else f"{found.num_inputs} inputs"
    return f"{escape_invisible(found.model_name)}, on {inputs}: {found.summary}."
