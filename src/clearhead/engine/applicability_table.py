"""Table that `Explainer.methods` fills: whether each method applies to the model, and if not, why."""

from dataclasses import dataclass
from typing import Any

from clearhead.methods.cost import Cost


@dataclass(frozen=True)
class MethodApplicability:
    """Applicability of one method to a model: one row of `Explainer.methods()`.

    Attributes:
        name: Name of the method.
        family: Family of related methods.
        cost: Number of passes with the default options; a sentence as a string.
        applies: Whether the method can explain this model.
        why_not: The reason if it does not apply.
        guidance: What the scores measure, and when they mislead.
        note: Caveat about the method for this model.
        is_recommended: Whether `explain` uses the method by default for this model.
    """

    name: str
    family: str
    cost: Cost
    applies: bool
    why_not: str = ""
    guidance: str = ""
    note: str = ""
    is_recommended: bool = False

    def format_applies(self) -> str:
        """Return "yes", with a remark for the recommended method.

        Returns:
            The text of the column; only for methods that apply.
        """
        return "yes, recommended" if self.is_recommended else "yes"


class ApplicabilityTable(list[MethodApplicability]):
    """A list of `MethodApplicability` that displays as a table in a terminal and in a notebook, notes below it."""

    COLUMNS = ("method", "family", "cost", "applies")

    @property
    def table_rows(self) -> list[dict[str, Any]]:
        """The cells of the table by row; the cell "applies" holds the reason of methods that do not apply."""
        return [
            {**vars(row), "method": row.name, "cost": str(row.cost), "applies": row.why_not or row.format_applies()}
            for row in self
        ]

    def __repr__(self) -> str:
        from clearhead.render.methods_table import format_methods_table

        return format_methods_table(self.COLUMNS, self.table_rows)

    def __rich__(self) -> Any:
        from clearhead.render.methods_table import render_methods_table

        return render_methods_table(self.COLUMNS, self.table_rows)

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_view_model
        from clearhead.render.methods_table import build_methods_view_model

        return render_notebook_view_model(build_methods_view_model(self.COLUMNS, self.table_rows))
