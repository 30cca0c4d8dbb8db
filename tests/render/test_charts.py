"""Charts as view models, as drawn by the renderer, and as static HTML."""

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
from tests.render.browser import OpenPage, open_all_details
from tests.render.example_charts import HOSTILE_NAME, every_plot, probes
from tests.render.static_html import Page, assert_harmless
from tests.render.test_view_model import decode_array
from tests.studies.test_error_detector import make_code_attention


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_box_statistics_equal_matplotlib(count: int) -> None:
    values = np.random.default_rng(count).lognormal(0, 1, count)
    (expected,) = boxplot_stats(values)
    box = charts.compute_box_statistics(np.append(values, np.nan))
    assert box is not None and box["count"] == count
    for key, other in (("low", "whislo"), ("q1", "q1"), ("median", "med"), ("q3", "q3"), ("high", "whishi")):
        assert box[key] == pytest.approx(expected[other])
    assert charts.compute_box_statistics(np.array([np.nan])) is None


def test_bar_from_number_interval_or_missing_value() -> None:
    assert charts.make_bar(0.5, mark="*") == {"value": 0.5, "mark": "*"}
    assert charts.make_bar(ConfidenceInterval(0.5, 0.4, 0.6, 3)) == {"value": 0.5, "low": 0.4, "high": 0.6, "count": 3}
    assert charts.make_bar(ConfidenceInterval(0.5, np.nan, np.nan, 1)) == {"value": 0.5}
    assert charts.make_bar(ConfidenceInterval(float("nan"), float("nan"), float("nan"), 0)) is None
    assert charts.make_bar(None) is None and charts.make_bar(float("nan")) is None


def test_histogram_counts_every_value_once() -> None:
    edges = np.linspace(-1, 1, 5)
    chart = charts.make_histogram("h", {"a": np.array([-1.0, -0.2, 0.6, 1.0])}, edges, "tau")
    assert [cell["value"] for cell in chart["series"][0]["cells"]] == [1, 1, 0, 2]
    assert chart["groups"] == ["−1.00", "−0.50", "0.00", "0.50"]


def test_nan_becomes_null_and_charts_serialise_to_json() -> None:
    chart = charts.make_line_chart(
        "c",
        [charts.make_curve("a", [0, 1], [np.nan, 1.0])],
        "x",
        "y",
        reference_line=charts.make_reference_line(0.5, "half"),
    )
    assert chart["lines"][0]["y"] == [None, 1.0]
    for view in (chart, every_plot(), *(build_view_model(probe) for probe in probes().values())):
        json.dumps(view, allow_nan=False)


def test_static_html_contains_the_numbers_of_the_charts() -> None:
    page = html.render_standalone_page(every_plot())
    assert_harmless(page)
    static_text = " ".join(text for tag, text in Page(page).texts if tag in ("td", "th", "bdi", "caption"))
    for words in ("0.75 [0.65, 0.85] *", "refused: not told from random", "0.90", "median"):
        assert words in static_text
    chart = code.make_correctness_box_chart(make_code_attention())
    assert f"{chart['series'][0]['cells'][0]['median']:.3g}" in render_static_html(chart)


def test_points_are_heads_and_line_is_their_mean() -> None:
    attention = make_code_attention()
    expected = np.nanmean(attention.received_attention, 0)
    first = code.make_class_attention_charts(attention)[0]
    assert first["series"][0]["y"] == pytest.approx(expected[..., 0].ravel().tolist())
    assert first["mean_curve"]["y"] == pytest.approx(expected[..., 0].mean(1).tolist())
    assert first["series"][0]["point_names"][2] == "layer 1, head 0"


@pytest.mark.browser
class TestDrawn:
    def test_every_plot_has_marks_labels_and_table(self, open_page: OpenPage) -> None:
        page = open_page(html.render_standalone_page(every_plot()))
        titles = ("Lines with", "TCAV scores", "Right and wrong answers")
        lines, bars, boxes = (page.locator("figure.ch-chart", has_text=title) for title in titles)
        assert lines.locator("path.ch-line").count() == 2 and lines.locator("path.ch-band").count() == 2
        assert "chance" in lines.locator(".ch-chart-legend").inner_text()
        assert (
            bars.locator("g > rect").count() == 6
            and bars.locator("text.ch-emphasis").all_text_contents().count("*") == 3
        )
        assert bars.locator("text.ch-emphasis").all_text_contents().count("×") == 1
        assert boxes.locator("g > rect").count() == 6 and boxes.locator(".ch-median").count() == 6
        label = bars.locator("svg[role=img]").first.get_attribute("aria-label")
        assert "striped: layer 3 0.85" in label and HOSTILE_NAME in label
        open_all_details(page)
        assert bars.locator("table tbody tr").count() == 3 and "0.75 [0.65, 0.85] *" in bars.inner_text()
        assert "refused: not told from random" in bars.inner_text()
        dots = page.locator("figure.ch-small-chart", has_text="identifier")
        assert dots.locator("g.ch-points circle").count() == 4 and dots.locator("path.ch-mean-curve").count() == 1
        assert page.messages == [] and page.fetched == []

    @pytest.mark.parametrize(
        ("count", "points", "note"),
        [
            (8, 30, ""),
            (9, 6, "lines: they are in the tooltips and in the table."),
            (9, 30, "they are in the table."),
        ],
    )
    def test_omitted_intervals_are_noted(self, open_page: OpenPage, count: int, points: int, note: str) -> None:
        x = np.arange(points)
        lines = [
            charts.make_curve(f"m{index}", x, x + index, low=x + index - 0.5, high=x + index + 0.5)
            for index in range(count)
        ]
        page = open_page(
            html.render_standalone_page(
                view_model.build_page_view_model([build_panel(charts.make_line_chart("c", lines, "x", "y"))], "Curves")
            )
        )
        figure = page.locator("figure.ch-chart")
        assert figure.locator("path.ch-band").count() == (0 if note else count)
        assert figure.locator(".ch-note").count() == bool(note)
        if note:
            assert figure.locator(".ch-note").inner_text().endswith(note)

    def test_p_value_map_names_and_marks_significant_cells(self, open_page: OpenPage) -> None:
        page = open_page(html.render_standalone_page(every_plot()))
        planted = page.locator("figure.ch-heat-map-chart", has_text="operator").first
        assert "strongest: layer 1, head 0: p " in planted.locator("canvas").get_attribute("aria-label")
        planted.locator(".ch-scroll").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator(".ch-live-region").inner_text().startswith("layer 1, head 0: p ")
        open_all_details(page)
        assert [("●" in cell) for cell in planted.locator("td").all_inner_texts()] == [False, False, True, False]

    def test_notebook_cell_without_plot_script_keeps_static_charts(
        self, open_page: OpenPage, hostile: Explanation
    ) -> None:
        text, probe = html.render_notebook_html(hostile), html.render_notebook_html(probes()["skips"])
        # only cells with charts contain the chart script
        assert ("CHARTS: {}" in text, "CHARTS: {}" in probe) == (True, False)
        script_start = text.index("<script>")  # both cells are in the page before a script runs
        page = open_page(
            f"<!doctype html><html lang=en><title>t</title><body>{text[:script_start]}{probe}{text[script_start:]}"
        )
        assert page.locator("path.ch-line").count() == 3 and page.locator(".ch-card .ch-unit").count() > 0
        page = open_page(f"<!doctype html><html lang=en><title>t</title><body>{probe[: probe.index('<script>')]}{text}")
        assert page.locator("path.ch-line").count() == 0 and "a figure" in page.locator(".ch-static").inner_text()
        assert page.messages == []

    def test_every_probe_is_drawn(self, open_page: OpenPage) -> None:
        views = {kind: build_view_model(probe) for kind, probe in probes().items()}
        page = open_page(html.render_standalone_page(view_model.build_page_view_model(list(views.values()), "Probes")))
        sections = page.locator("section.ch-input")
        for index, view in enumerate(views.values()):
            assert sections.nth(index).locator("figure").count() == len(view["charts"]) > 0
        open_all_details(page)
        assert page.title() == "Probes" and page.messages == [] and page.fetched == []

    def test_line_colours_follow_the_theme_and_are_light_in_print(self, open_page: OpenPage) -> None:
        def read_colour() -> str:
            return str(page.evaluate("getComputedStyle(document.querySelector('path.ch-line')).stroke"))

        page = open_page(html.render_standalone_page(every_plot()), color_scheme="dark")
        dark_colour = read_colour()
        page.emulate_media(media="print", color_scheme="dark")
        print_colour = read_colour()
        page.emulate_media(media="screen", color_scheme="light")
        assert dark_colour != read_colour() == print_colour


def test_concept_maps_of_the_last_layer_show_the_class_token() -> None:
    """Only the class token has a gradient there; scaled by the other units, which have none, it would be white."""
    units = SimpleNamespace(special=(True, False, False), names=("[CLS]", "so", "good"), grid=None)
    tcav_result = SimpleNamespace(
        samples=[SimpleNamespace(units=units)],
        sensitivity_maps={"praise": {4: [np.array([9.0, 0.5, -2.0])], 6: [np.array([0.02, 0.0, 0.0])]}},
    )
    middle, last = (concepts.make_sensitivity_charts(tcav_result, layer)[0] for layer in (4, 6))  # type: ignore[arg-type]
    np.testing.assert_allclose(decode_array(middle["values"])[0, 1:], [0.25, -1.0], atol=0.01)
    np.testing.assert_allclose(decode_array(last["values"]), [[1.0, 0.0, 0.0]], atol=0.01)
