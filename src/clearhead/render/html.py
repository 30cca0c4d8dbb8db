"""One self-contained HTML file: a document for the renderer, and its figures as plain tables where no script runs."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.data.atomic_file import whole
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import bundle, view_model
from clearhead.render.markup import Markup, data, joined, script, style_sheet, tag
from clearhead.render.noscript import plain_form
from clearhead.render.text_layout import name
from clearhead.render.view_model import Document, document

if TYPE_CHECKING:
    from clearhead.links import Links


def report(explanations: Any, path: str | Path, title: str | None = None) -> Path:
    """Write several explanations onto one self-contained page.

    explanations: a list of them, or whatever `explain` and `compare` returned, or a list of these
    """
    text = page(explanations, title)
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return Path(path)


def page(
    given: Any, title: str | None = None, evidence: Collection[int] | None = None, links: "Sequence[Links]" = ()
) -> str:
    """A whole page. Explanations of one input stand side by side; inputs follow one another.

    evidence: the places of units that people marked, to be drawn under the text
    links: how strongly units of two streams look at one another, as `probes.links` finds them
    Either goes with one input alone.
    """
    explanations = view_model.every(given)
    parts = view_model.each_input(explanations, evidence, links)
    heading = title or (parts[0]["heading"] if len(parts) == 1 else f"{len(parts)} inputs explained")
    models = sorted({name(str(e.provenance["model"])) for e in explanations if e.provenance.get("model")})
    foot = f"Scores are raw; only colours are scaled, {_scaled(explanations)}."
    return alone(view_model.whole_page(parts, name(heading), " · ".join(["clearhead", *models]), foot))


def page_of(result: Any, title: str | None = None, **options: Any) -> str:
    """A whole page of one result of any kind: attention, an aggregate, a probe."""
    made = document(result, **options)
    return alone(view_model.whole_page([made], name(title or made["heading"])))


def alone(given: Document) -> str:
    """A page that needs nothing but itself: the document, its plain form, the renderer and its style."""
    source = bundle.script(view_model.extras(given))
    head = tag("head", *_head(str(given["title"]), source))
    main = tag("main", _inside(given), class_="clearhead ch-page")
    return f'<!doctype html>\n<html lang="en">{head}<body>{main}{script(source)}</body></html>\n'


def _inside(given: Document) -> Markup:
    return joined(data(given, view_model.extras(given)), tag("div", plain_form(given), class_="ch-plain"))


def fragment(result: Any, **options: Any) -> str:
    """A piece of a page, for notebooks; its styles stay inside it."""
    return notebook_cell(document(result, **options))


def notebook_cell(given: Document) -> str:
    """The same of a document."""
    made = tag("div", _inside(given), class_="clearhead ch-fragment")
    return joined(style_sheet(bundle.style()), made, script(bundle.script(view_model.extras(given))))


def _scaled(explanations: Sequence[AnyExplanation]) -> str:
    several = any(len(explanation.parts) > 1 for explanation in explanations)
    return "each method’s by its largest score" + (" in each stream" if several else "")


def _head(title: str, source: str) -> Iterable[Markup]:
    # Even if something escaped our escaping, the browser would run no script but ours and fetch nothing.
    digest = b64encode(sha256(source.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    yield tag("meta", charset="utf-8")
    yield tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'")
    yield tag("meta", name="viewport", content="width=device-width, initial-scale=1")
    yield tag("meta", name="color-scheme", content="light dark")
    yield tag("title", title)
    yield style_sheet(bundle.style())
