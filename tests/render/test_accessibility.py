"""Every view by the rules of axe-core, in light and in dark."""

from dataclasses import replace

import pytest

from clearhead import Comparison, Explanation, aggregate
from clearhead.render import html, view_model
from clearhead.render.view_model import make_view_model
from tests.render.browser import Open, every_fold, linked, ranked
from tests.render.conftest import made
from tests.render.example_charts import every_plot, probes
from tests.render.example_results import every
from tests.render.test_view_model import attended, streamed

pytestmark = pytest.mark.browser


def gallery(text: dict[str, Explanation], image: dict[str, Explanation]) -> dict[str, str]:
    """A page of every view."""
    results = every()
    adding = replace(made(["a", "b", "c"], [1.0, -0.5, 0.25]), base_value=0.75)
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
    curves = make_view_model("curves", heading="Curves", title="Deletion", across="share removed", lines=lines)
    return {
        "methods": html.render_explanations_page(Comparison(text), evidence=[2, 3]),
        "picture": html.render_explanations_page([image["generic"]]),
        "objects": html.render_explanations_page([results["objects"]]),
        "regions": html.render_explanations_page([results["text and regions"]]),
        "links": linked(results["text and regions"]),
        "report": html.render_standalone_page(ranked()),
        "answer": html.render_explanations_page([results["source and prefix"]]),
        "sound": html.render_explanations_page([results["sound"]]),
        "adding": html.render_explanations_page([adding]),
        "attention": html.render_result_page(attended(9)),
        "streams": html.render_result_page(streamed(4, 9)),
        "global": html.render_result_page(aggregate([text["generic"]])),
        "curves": html.render_standalone_page(view_model.build_page_view_model([curves], "Curves")),
        "probes": html.render_standalone_page(
            view_model.build_page_view_model([view_model.build_view_model(one) for one in probes().values()], "Probes")
        ),
        "plots": html.render_standalone_page(every_plot()),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_axe(
    scheme: str, opened: Open, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    from axe_core_python.sync_playwright import Axe

    for kind, given in gallery(text, image).items():
        page = opened(given, color_scheme=scheme)
        every_fold(page)
        # Only colours differ in the dark.
        found = Axe().run(page.page, options={"runOnly": ["color-contrast"]} if scheme == "dark" else None)[
            "violations"
        ]
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], kind
        assert page.said == [] and page.fetched == [], kind
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{kind} is wider than the window"
