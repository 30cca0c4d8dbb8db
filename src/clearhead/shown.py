"""How an explanation shows itself, of one stream or of several: as a page, in a notebook, in a terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from clearhead.files import whole

if TYPE_CHECKING:
    from clearhead.joint import AnyExplanation


class Shown:
    """What notebooks, terminals and people ask any explanation for."""

    @overload
    def html(self, path: None = None) -> str: ...
    @overload
    def html(self, path: str | Path) -> Path: ...
    def html(self, path: str | Path | None = None) -> str | Path:
        """One self-contained HTML page: its text or, written to `path`, where it is."""
        from clearhead.show.html import page

        text = page([cast("AnyExplanation", self)])
        if path is None:
            return text
        with whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        from clearhead.show.html import fragment

        return fragment(cast("AnyExplanation", self))

    def __rich__(self) -> Any:
        from clearhead.show.terminal import render

        return render(cast("AnyExplanation", self))
