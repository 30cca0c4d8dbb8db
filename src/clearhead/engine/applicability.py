"""Which methods apply to a model: what `Explainer.methods` returns."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Applies:
    """One line of `Explainer.methods()`: a method, what it costs, and why not, if not."""

    name: str
    family: str
    cost: str
    applies: bool
    why_not: str = ""
    #: What to know before using it.
    note: str = ""


class Applying(list[Applies]):
    """A list of lines that shows itself as a table, notes below."""

    COLUMNS = ("method", "family", "cost", "applies")

    @property
    def table(self) -> list[dict[str, Any]]:
        """The lines as the table has them: what does not apply says why."""
        return [{**asdict(line), "method": line.name, "applies": line.why_not or "yes"} for line in self]

    def __repr__(self) -> str:
        from clearhead.render.methods_table import text

        return text(self.COLUMNS, self.table)

    def __rich__(self) -> Any:
        from clearhead.render.methods_table import render

        return render(self.COLUMNS, self.table)

    def _repr_html_(self) -> str:
        from clearhead.render.html import notebook_cell
        from clearhead.render.methods_table import document

        return notebook_cell(document(self.COLUMNS, self.table))
