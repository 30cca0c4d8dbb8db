"""How an explanation shows itself, of one stream or of several: as a page, in a notebook, in a terminal."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from clearhead.data.atomic_file import whole

if TYPE_CHECKING:
    from clearhead.explanation.multi_stream import AnyExplanation
    from clearhead.links import Links


class Shown:
    """What notebooks, terminals and people ask any explanation for."""

    @overload
    def html(
        self, path: None = None, evidence: Collection[int] | None = None, links: "Sequence[Links]" = ()
    ) -> str: ...
    @overload
    def html(
        self, path: str | Path, evidence: Collection[int] | None = None, links: "Sequence[Links]" = ()
    ) -> Path: ...
    def html(
        self,
        path: str | Path | None = None,
        evidence: Collection[int] | None = None,
        links: "Sequence[Links]" = (),
    ) -> str | Path:
        """One self-contained HTML page: its text or, written to `path`, where it is.

        evidence: the places of units that people marked, drawn under the text
        links: which words look at which parts of a picture, as `clearhead.probes.links(ex, …)` finds them
        """
        from clearhead.render.html import page

        text = page([cast("AnyExplanation", self)], evidence=evidence, links=links)
        if path is None:
            return text
        with whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(cast("AnyExplanation", self))

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render

        return render(cast("AnyExplanation", self))
