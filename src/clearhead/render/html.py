"""Self-contained HTML pages: the view model with the JavaScript renderer, and static tables where no script runs."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.data.atomic_file import atomic_write
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import bundle, view_model
from clearhead.render.markup import (
    Markup,
    join_markup,
    make_element,
    make_json_element,
    make_script_element,
    make_style_element,
)
from clearhead.render.noscript import render_static_html
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import ViewModel, build_view_model

if TYPE_CHECKING:
    from clearhead.links import AttentionLinks


def write_report(explanations: Any, path: str | Path, title: str | None = None) -> Path:
    """Write explanations to a self-contained HTML file.

    Args:
        explanations: What `explain` or `compare` returned, or a list of such results.
        path: The file to write.
        title: The title of the page. Default: the heading of the input, or the number of inputs.

    Returns:
        The path of the file.

    Example:
        clearhead.write_report(ex.explain("A great film.", ["lrp", "shap"]), "report.html")
    """
    html = render_explanations_page(explanations, title)
    with atomic_write(path) as partial:
        partial.write_text(html, encoding="utf-8")
    return Path(path)


def render_explanations_page(
    results: Any,
    title: str | None = None,
    evidence: Collection[int] | None = None,
    links: "Sequence[AttentionLinks]" = (),
) -> str:
    """Render a page of explanations; those of one input are side by side.

    Args:
        results: What `explain` or `compare` returned, or a list of such results.
        title: The title of the page. Default: the heading of the input, or the number of inputs.
        evidence: Indices of units that people marked, drawn under the text; for a single input only.
        links: How strongly units of two streams attend to each other; for a single input only.

    Returns:
        The HTML document.
    """
    explanations = view_model.flatten_explanations(results)
    inputs = view_model.build_input_view_models(explanations, evidence, links)
    default_title = inputs[0]["heading"] if len(inputs) == 1 else f"{len(inputs)} inputs explained"
    models = sorted({escape_invisible(str(e.provenance["model"])) for e in explanations if e.provenance.get("model")})
    footer = f"Scores are raw; only colours are scaled, {_describe_colour_scaling(explanations)}."
    return render_standalone_page(
        view_model.build_page_view_model(
            inputs, escape_invisible(title or default_title), " · ".join(["clearhead", *models]), footer
        )
    )


def render_result_page(result: Any, title: str | None = None, **options: Any) -> str:
    """Render a page of one result: attention, an aggregate, a probe.

    Args:
        result: The result.
        title: The title of the page. Default: the heading of the result.
        **options: Options of the result's view model.

    Returns:
        The HTML document.
    """
    view = build_view_model(result, **options)
    return render_standalone_page(view_model.build_page_view_model([view], escape_invisible(title or view["heading"])))


def render_standalone_page(view: ViewModel) -> str:
    """Render a view model as an HTML document that loads nothing: data, static tables, script and style sheet.

    Args:
        view: The view model of the page, with a "title".

    Returns:
        The text of the HTML file.
    """
    source = bundle.build_script(view_model.find_required_modules(view))
    head = make_element("head", *_iter_head_elements(str(view["title"]), source))
    main = make_element("main", _render_body(view), class_="clearhead ch-page")
    return f'<!doctype html>\n<html lang="en">{head}<body>{main}{make_script_element(source)}</body></html>\n'


def _render_body(view: ViewModel) -> Markup:
    """Embed the view model as JSON, and static tables that the script removes when it runs."""
    return join_markup(
        make_json_element(view, view_model.find_required_modules(view)),
        make_element("div", render_static_html(view), class_="ch-static"),
    )


def render_notebook_html(result: Any, **options: Any) -> str:
    """Render a result as an HTML fragment for notebooks, with scoped styles.

    Args:
        result: The result.
        **options: Options of the result's view model.

    Returns:
        HTML without `<html>` and `<body>`; it loads nothing.
    """
    return render_notebook_view_model(build_view_model(result, **options))


def render_notebook_view_model(view: ViewModel) -> str:
    """Render a view model as an HTML fragment for notebooks, with scoped styles.

    Args:
        view: Any view model.

    Returns:
        HTML without `<html>` and `<body>`; it loads nothing.
    """
    body = make_element("div", _render_body(view), class_="clearhead ch-fragment")
    return join_markup(
        make_style_element(bundle.get_style_sheet()),
        body,
        make_script_element(bundle.build_script(view_model.find_required_modules(view))),
    )


def _describe_colour_scaling(explanations: Sequence[AnyExplanation]) -> str:
    """Say by which score colours are scaled: in each stream separately, if there are several."""
    if any(len(explanation.by_stream) > 1 for explanation in explanations):
        return "for each method by its largest score in each stream"
    return "for each method by its largest score"


def _iter_head_elements(title: str, source: str) -> Iterable[Markup]:
    """Yield metadata, title, styles, and a security policy that allows only this script, by its hash."""
    # If escaping ever failed, the browser would still run no other script and load nothing.
    digest = b64encode(sha256(source.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    yield make_element("meta", charset="utf-8")
    yield make_element(
        "meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'"
    )
    yield make_element("meta", name="viewport", content="width=device-width, initial-scale=1")
    yield make_element("meta", name="color-scheme", content="light dark")
    yield make_element("title", title)
    yield make_style_element(bundle.get_style_sheet())
