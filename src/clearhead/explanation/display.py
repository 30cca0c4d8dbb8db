"""Display of explanations: as an HTML page, in notebooks and in terminals."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from clearhead.data.atomic_file import atomic_write

if TYPE_CHECKING:
    from clearhead.explanation.multi_stream import AnyExplanation
    from clearhead.links import AttentionLinks


class DisplayMixin:
    """Methods for display shared by `Explanation` and `MultiStreamExplanation`."""

    @property
    def warnings(self) -> list[str]:
        """What is odd about the scores, and what to do about it."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the `repr` with one line for each warning about the scores."""
        return "\n".join([repr(self), *(f"warning: {warning}" for warning in self.warnings)])

    def _format_warning_count(self) -> str:
        """The number of warnings, for a `repr`; an empty string if there are none."""
        count = len(self.warnings)
        if not count:
            return ""
        return f"; {count} warning{'s' if count > 1 else ''}, see .warnings"

    @overload
    def html(
        self, path: None = None, evidence: Collection[int] | None = None, links: "Sequence[AttentionLinks]" = ()
    ) -> str: ...
    @overload
    def html(
        self, path: str | Path, evidence: Collection[int] | None = None, links: "Sequence[AttentionLinks]" = ()
    ) -> Path: ...
    def html(
        self,
        path: str | Path | None = None,
        evidence: Collection[int] | None = None,
        links: "Sequence[AttentionLinks]" = (),
    ) -> str | Path:
        """Render the explanation as one self-contained HTML page.

        Args:
            path: The file to write. Without it, the HTML is returned.
            evidence: Indices of the units that annotators marked; they are drawn under the text.
            links: Cross-attention between words and image regions to draw, as returned by
                `clearhead.probes.compute_attention_links`.

        Returns:
            The HTML text, or the path of the written file.

        Raises:
            OSError: If the file cannot be written.

        Example:
            >>> e.html("why.html")  # doctest: +SKIP
        """
        from clearhead.render.html import render_explanations_page

        page = render_explanations_page([cast("AnyExplanation", self)], evidence=evidence, links=links)
        if path is None:
            return page
        with atomic_write(path) as partial:
            partial.write_text(page, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        """Return an HTML fragment, which notebooks display."""
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(cast("AnyExplanation", self))

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_explanation

        return render_explanation(cast("AnyExplanation", self))
