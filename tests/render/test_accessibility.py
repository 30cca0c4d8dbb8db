"""Accessibility of every view by axe-core, in light and dark mode."""

from dataclasses import replace

import pytest

from clearhead import Comparison, Explanation, aggregate
from clearhead.render import html, view_model
from clearhead.render.view_model import make_view_model
from tests.render.browser import OpenPage, build_ranking_page, open_all_details, render_links_page
from tests.render.conftest import make_explanation
from tests.render.example_charts import every_plot, probes
from tests.render.example_results import every
from tests.render.test_view_model import make_attention_view, make_multi_stream_attention_view

pytestmark = pytest.mark.browser


def render_all_views(text: dict[str, Explanation], image: dict[str, Explanation]) -> dict[str, str]:
    """Render a page of every view, by name."""
    results = every()
    additive = replace(make_explanation(["a", "b", "c"], [1.0, -0.5, 0.25]), base_value=0.75)
    lines = [
        {
            "name": method,
            "x": [0, 0.5, 1],
            "y": [1, 0.5, 0.1],
            "low": [0.9, 0.4, 0],
            "high": [1, 0.6, 0.2],
            "grey": grey,
        }
        for method, grey in (("generic", False), ("random", True))
    ]
    curves = make_view_model("line_chart", heading="Curves", title="Deletion", x_label="share removed", lines=lines)
    return {
        "methods": html.render_explanations_page(Comparison(text), evidence=[2, 3]),
        "picture": html.render_explanations_page([image["generic"]]),
        "objects": html.render_explanations_page([results["objects"]]),
        "regions": html.render_explanations_page([results["text and regions"]]),
        "links": render_links_page(results["text and regions"]),
        "report": html.render_standalone_page(build_ranking_page()),
        "answer": html.render_explanations_page([results["source and prefix"]]),
        "sound": html.render_explanations_page([results["sound"]]),
        "adding": html.render_explanations_page([additive]),
        "attention": html.render_result_page(make_attention_view(9)),
        "streams": html.render_result_page(make_multi_stream_attention_view(4, 9)),
        "global": html.render_result_page(aggregate([text["generic"]])),
        "curves": html.render_standalone_page(view_model.build_page_view_model([curves], "Curves")),
        "probes": html.render_standalone_page(
            view_model.build_page_view_model(
                [view_model.build_view_model(probe) for probe in probes().values()], "Probes"
            )
        ),
        "plots": html.render_standalone_page(every_plot()),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(
    scheme: str, open_page: OpenPage, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    from axe_core_python.sync_playwright import Axe

    for kind, html_page in render_all_views(text, image).items():
        page = open_page(html_page, color_scheme=scheme)
        open_all_details(page)
        # Only colours differ in dark mode.
        violations = Axe().run(page.page, options={"runOnly": ["color-contrast"]} if scheme == "dark" else None)[
            "violations"
        ]
        serious = [
            (violation["id"], [node["html"][:200] for node in violation["nodes"][:3]])
            for violation in violations
            if violation["impact"] in ("serious", "critical")
        ]
        assert serious == [], kind
        assert page.messages == [] and page.fetched == [], kind
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{kind} is wider than the window"
