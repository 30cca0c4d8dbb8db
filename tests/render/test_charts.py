"""Plots as the renderer gets them, as it draws them, and without it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.cbook import boxplot_stats

from clearhead import Explanation
from clearhead.render import charts, html, view_model
from clearhead.render.noscript import render_static_html
from clearhead.render.report_blocks import build_panel
from clearhead.render.view_model import build_view_model
from clearhead.render.views import code, concepts
from clearhead.stats import ConfidenceInterval
from tests.render.browser import Open, every_fold
from tests.render.example_charts import NASTY, every_plot, probes
from tests.render.static_html import Page, assert_harmless
from tests.render.test_view_model import numbers
from tests.studies.test_error_detector import measured


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_boxes_are_those_of_matplotlib(count: int) -> None:
    values = np.random.default_rng(count).lognormal(0, 1, count)
    (theirs,) = boxplot_stats(values)
    ours = charts.compute_box_statistics(np.append(values, np.nan))
    assert ours is not None and ours["count"] == count
    for key, other in (("low", "whislo"), ("first", "q1"), ("median", "med"), ("third", "q3"), ("high", "whishi")):
        assert ours[key] == pytest.approx(theirs[other])
    assert charts.compute_box_statistics(np.array([np.nan])) is None


def test_a_bar_is_a_number_a_mean_with_its_interval_or_nothing() -> None:
    assert charts.make_bar(0.5, mark="*") == {"value": 0.5, "mark": "*"}
    assert charts.make_bar(ConfidenceInterval(0.5, 0.4, 0.6, 3)) == {"value": 0.5, "low": 0.4, "high": 0.6}
    assert charts.make_bar(ConfidenceInterval(0.5, np.nan, np.nan, 1)) == {"value": 0.5}
    assert charts.make_bar(ConfidenceInterval(float("nan"), float("nan"), float("nan"), 0)) is None
    assert charts.make_bar(None) is None and charts.make_bar(float("nan")) is None


def test_a_histogram_counts_every_value_once() -> None:
    edges = np.linspace(-1, 1, 5)
    drawn = charts.make_histogram("h", {"a": np.array([-1.0, -0.2, 0.6, 1.0])}, edges, "tau")
    assert [cell["value"] for cell in drawn["series"][0]["cells"]] == [1, 1, 0, 2]
    assert drawn["groups"] == ["−1.00", "−0.50", "0.00", "0.50"]


def test_what_is_not_a_number_is_null_and_goes_into_json() -> None:
    made = charts.make_line_chart(
        "c", [charts.make_curve("a", [0, 1], [np.nan, 1.0])], "x", "y", level=charts.make_reference_line(0.5, "half")
    )
    assert made["lines"][0]["y"] == [None, 1.0]
    for one in (made, every_plot(), *(build_view_model(found) for found in probes().values())):
        json.dumps(one, allow_nan=False)


def test_the_same_figures_stand_in_the_page_without_the_renderer() -> None:
    page = html.render_standalone_page(every_plot())
    assert_harmless(page)
    told = " ".join(text for where, text in Page(page).texts if where in ("td", "th", "bdi", "caption"))
    for words in ("0.75 [0.65, 0.85] *", "refused: not told from random", "0.90", "median"):
        assert words in told
    series = code.make_correctness_box_chart(measured())["series"]
    assert f"{series[0]['cells'][0]['median']:.3g}" in render_static_html(code.make_correctness_box_chart(measured()))


def test_every_head_is_a_point_and_the_line_is_their_mean() -> None:
    own = measured()
    expected = np.nanmean(own.received_attention, 0)
    first = code.make_class_attention_charts(own)[0]
    assert first["series"][0]["y"] == pytest.approx(expected[..., 0].ravel().tolist())
    assert first["means"]["y"] == pytest.approx(expected[..., 0].mean(1).tolist())
    assert first["series"][0]["names"][2] == "layer 1, head 0"


@pytest.mark.browser
class TestDrawn:
    def test_every_plot_has_its_marks_words_and_table(self, opened: Open) -> None:
        page = opened(html.render_standalone_page(every_plot()))
        lines, bars, boxes = (
            page.locator("figure.ch-curves", has_text=title) for title in ("Lines with", "TCAV scores", "Right answers")
        )
        assert lines.locator("path.ch-line").count() == 2 and lines.locator("path.ch-band").count() == 2
        assert "chance" in lines.locator(".ch-names-of").inner_text()
        assert (
            bars.locator("g > rect").count() == 6 and bars.locator("text.ch-strong").all_text_contents().count("*") == 3
        )
        assert bars.locator("text.ch-strong").all_text_contents().count("×") == 1
        assert boxes.locator("g > rect").count() == 6 and boxes.locator(".ch-median").count() == 6
        named = bars.locator("svg[role=img]").first.get_attribute("aria-label")
        assert "striped: layer 3 0.85" in named and NASTY in named
        every_fold(page)
        assert bars.locator("table tbody tr").count() == 3 and "0.75 [0.65, 0.85] *" in bars.inner_text()
        assert "refused: not told from random" in bars.inner_text()
        dots = page.locator("figure.ch-smaller", has_text="identifier")
        assert dots.locator("g.ch-dots circle").count() == 4 and dots.locator("path.ch-means").count() == 1
        assert page.said == [] and page.fetched == []

    @pytest.mark.parametrize(
        ("count", "points", "said"),
        [
            (8, 30, ""),
            (9, 6, "not drawn: they are under the pointer and in the table."),
            (9, 30, "they are in the table."),
        ],
    )
    def test_intervals_that_are_not_drawn_are_said_to_be(
        self, opened: Open, count: int, points: int, said: str
    ) -> None:
        x = np.arange(points)
        lines = [
            charts.make_curve(f"m{one}", x, x + one, low=x + one - 0.5, high=x + one + 0.5) for one in range(count)
        ]
        page = opened(
            html.render_standalone_page(
                view_model.build_page_view_model([build_panel(charts.make_line_chart("c", lines, "x", "y"))], "Curves")
            )
        )
        figure = page.locator("figure.ch-curves")
        assert figure.locator("path.ch-band").count() == (0 if said else count)
        assert figure.locator(".ch-note").count() == bool(said)
        if said:
            assert figure.locator(".ch-note").inner_text().endswith(said)

    def test_a_map_says_p_and_marks_what_stands(self, opened: Open) -> None:
        page = opened(html.render_standalone_page(every_plot()))
        planted = page.locator("figure.ch-wide-map", has_text="operator").first
        assert "strongest: layer 1, head 0: p " in planted.locator("canvas").get_attribute("aria-label")
        planted.locator(".ch-scroll").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator(".ch-said").inner_text().startswith("layer 1, head 0: p ")
        every_fold(page)
        assert [("●" in cell) for cell in planted.locator("td").all_inner_texts()] == [False, False, True, False]

    def test_cells_of_a_notebook_leave_plots_to_those_that_can_draw_them(
        self, opened: Open, nasty: Explanation
    ) -> None:
        text, probe = html.render_notebook_html(nasty), html.render_notebook_html(probes()["skips"])
        assert ("PLOTS: {}" in text, "PLOTS: {}" in probe) == (True, False)  # what draws plots is not in every cell
        first = text.index("<script>")  # both cells stand there before a script runs
        page = opened(f"<!doctype html><html lang=en><title>t</title><body>{text[:first]}{probe}{text[first:]}")
        assert page.locator("path.ch-line").count() == 3 and page.locator(".ch-card .ch-u").count() > 0
        page = opened(f"<!doctype html><html lang=en><title>t</title><body>{probe[: probe.index('<script>')]}{text}")
        assert page.locator("path.ch-line").count() == 0 and "a figure" in page.locator(".ch-plain").inner_text()
        assert page.said == []

    def test_every_probe_is_drawn(self, opened: Open) -> None:
        found = {kind: build_view_model(one) for kind, one in probes().items()}
        page = opened(html.render_standalone_page(view_model.build_page_view_model(list(found.values()), "Probes")))
        drawn = page.locator("section.ch-input")
        for place, given in enumerate(found.values()):
            assert drawn.nth(place).locator("figure").count() == len(given["plots"]) > 0
        every_fold(page)
        assert page.title() == "Probes" and page.said == [] and page.fetched == []

    def test_colours_are_those_of_the_theme_and_light_on_paper(self, opened: Open) -> None:
        def colour() -> str:
            return str(page.evaluate("getComputedStyle(document.querySelector('path.ch-line')).stroke"))

        page = opened(html.render_standalone_page(every_plot()), color_scheme="dark")
        dark = colour()
        page.emulate_media(media="print", color_scheme="dark")
        printed = colour()
        page.emulate_media(media="screen", color_scheme="light")
        assert dark != colour() == printed


def test_concept_maps_of_the_last_layer_show_the_class_token() -> None:
    """Only it has a gradient there: scaled by the other units, which have none, it would be white."""
    units = SimpleNamespace(special=(True, False, False), names=("[CLS]", "so", "good"), grid=None)
    inquiry = SimpleNamespace(
        samples=[SimpleNamespace(units=units)],
        sensitivity_maps={"praise": {4: [np.array([9.0, 0.5, -2.0])], 6: [np.array([0.02, 0.0, 0.0])]}},
    )
    middle, last = (concepts.make_sensitivity_charts(inquiry, layer)[0] for layer in (4, 6))  # type: ignore[arg-type]
    np.testing.assert_allclose(numbers(middle["values"])[0, 1:], [0.25, -1.0], atol=0.01)
    np.testing.assert_allclose(numbers(last["values"]), [[1.0, 0.0, 0.0]], atol=0.01)
