"""Pages in a real browser: hostile content does not run, nothing is fetched, and controls work."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation
from clearhead.explanation.otsu_mask import compute_otsu_mask
from clearhead.render import bundle, html, text_labels
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import build_view_model
from tests.render.browser import OpenPage, open_all_details, render_links_page
from tests.render.conftest import HOSTILE_STRINGS, make_explanation, with_intervals
from tests.render.example_results import every
from tests.render.test_multi_stream import with_hostile_steps
from tests.render.test_view_model import make_attention_view, make_multi_stream_attention_view, repeat_over_heads

pytestmark = pytest.mark.browser

#: If this runs, it changes the title of the page.
ATTACK = "<script>document.title='owned'</script><img src=http://owned.invalid/y.png onerror=document.title='owned'>"


def render_without_content_policy(result: Any) -> str:
    """Render as in a notebook: without a content security policy, escaping alone must prevent attacks."""
    return f"<!doctype html><html lang=en><title>safe</title><body>{html.render_notebook_html(result)}"


class TestSafety:
    def test_unescaped_script_is_detected(self, open_page: OpenPage) -> None:
        page = open_page(f"<!doctype html><title>safe</title>{ATTACK}")
        assert page.title() == "owned" and page.fetched == ["http://owned.invalid/y.png"]

    def test_hostile_content_is_not_executed_or_fetched(self, open_page: OpenPage, hostile: Explanation) -> None:
        explanation = replace(with_hostile_steps(hostile), method=ATTACK, prediction={"label": ATTACK, "value": 1.0})
        for text in (
            html.render_explanations_page([explanation], title="safe"),
            render_without_content_policy(explanation),
            render_without_content_policy([explanation, replace(explanation, method="b")]),
        ):
            page = open_page(text)
            open_all_details(page)
            page.locator(".ch-chip").first.click()
            page.locator(".ch-unit").nth(1).hover()
            assert page.title() == "safe" and page.fetched == [] and page.messages == []
            assert page.locator("script:not([type])").count() == 1
            assert page.locator(".ch-card").first.locator(".ch-unit").count() == len(HOSTILE_STRINGS)
            assert page.locator("iframe, object, embed, link, base, form, a").count() == 0

    def test_content_policy_blocks_injected_markup(self, open_page: OpenPage, hostile: Explanation) -> None:
        page = open_page(html.render_explanations_page([hostile], title="safe").replace("<main", f"{ATTACK}<main", 1))
        assert page.title() == "safe" and page.locator(".ch-unit").count() == len(HOSTILE_STRINGS)

    def test_js_modules_work_under_a_strict_content_policy(
        self, open_page: OpenPage, chromium: Any, tmp_path: Path
    ) -> None:
        """As `clearhead serve` does: no inline style or script is allowed."""
        page = chromium.new_page()
        policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'"
        view_model = json.dumps(build_view_model(every()["objects"]))
        style, script_tag = "<link rel=stylesheet href=clearhead.css>", "<script type=module src=go.js></script>"
        body = f"<!doctype html>{style}<div id=here></div>{script_tag}"
        script = f'import {{ draw }} from "./clearhead.js"; draw(document.getElementById("here"), {view_model});'

        def serve(route: Any) -> None:
            file = route.request.url.rpartition("/")[2]
            if file in bundle.ASSET_NAMES:
                route.fulfill(body=bundle.read_asset(file).decode(), content_type=bundle.get_asset_media_type(file))
            elif file == "go.js":
                route.fulfill(body=script, content_type="text/javascript")
            else:
                route.fulfill(body=body, content_type="text/html", headers={"Content-Security-Policy": policy})

        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.route("**/*", serve)
        page.goto("http://page.invalid/index.html")
        assert page.locator(".ch-card").count() == 1 and page.locator(".ch-detection-box").count() > 0
        assert [line for line in problems if "favicon" not in line] == []
        page.close()


class TestText:
    def test_units_preserve_text_and_order(
        self, open_page: OpenPage, text: dict[str, Explanation], pair: Explanation
    ) -> None:
        explanation = text["generic"]
        page = open_page(html.render_explanations_page([explanation]))
        line = page.locator(".ch-text").evaluate(
            "(line) => [...line.childNodes].filter((part) => !part.classList?.contains('ch-special'))"
            ".map((part) => part.textContent).join('')"
        )
        assert line == explanation.units.texts[0]
        assert page.locator(".ch-unit").evaluate_all("(all) => all.map((u) => Number(u.dataset.unit))") == list(
            range(len(explanation))
        )
        assert open_page(html.render_explanations_page([pair])).locator(".ch-text").count() == 2

    def test_score_table_lists_and_sorts_every_score(self, open_page: OpenPage, text: dict[str, Explanation]) -> None:
        explanation = text["attcat"]
        page = open_page(html.render_explanations_page([explanation]))
        open_all_details(page)
        table = page.locator("details .ch-scores").first
        vmax = max(abs(explanation.scores[explanation.units.content_indices()]))
        assert table.locator("td:last-child").all_inner_texts() == [
            text_labels.format_aligned_number(float(s), vmax) for s in explanation.scores
        ]
        page.get_by_role("button", name="Ranked").click()
        first = table.locator("bdi").first.inner_text()
        assert first == escape_invisible(explanation.top(1)[0][0])
        page.get_by_role("button", name="By absolute value").click()
        content = explanation.units.content_indices()
        largest = content[np.argsort(-np.abs(explanation.scores[content]), kind="stable")]
        expected = [escape_invisible(explanation.units.names[index]) for index in largest]
        assert table.locator("th > bdi:first-child").all_inner_texts()[: len(expected)] == expected
        strongest = page.locator(".ch-scores", has_text="Strongest units").locator("th > bdi:first-child")
        assert strongest.all_inner_texts() == expected[:6]

    def test_half_widths_of_intervals_are_shown(self, open_page: OpenPage) -> None:
        explanation = with_intervals(make_explanation(["good", "bad", "film"], [0.5, -1.0, 0.1]), [0.25, 0.5, 0.0])
        page = open_page(html.render_explanations_page(explanation))
        table = page.locator(".ch-scores", has_text="Strongest units ± 90 % interval")
        expected = [text_labels.format_score(explanation, index, 1.0) for index in (1, 0, 2)]
        assert table.locator("td:last-child").all_inner_texts() == expected

    def test_tooltip_and_keyboard_show_scores_of_every_method(
        self, open_page: OpenPage, text: dict[str, Explanation]
    ) -> None:
        page = open_page(html.render_explanations_page(Comparison(text)))
        page.locator(".ch-card").first.locator(".ch-unit").nth(2).hover()
        tooltip = page.locator(".ch-tooltip").inner_text()
        for explanation in text.values():
            assert text_labels.format_number(float(explanation.scores[2]), 3)[:5] in tooltip
        assert page.locator(".ch-highlighted").count() >= len(text)
        page.locator(".ch-text-box").first.focus()
        page.keyboard.press("End")
        assert page.locator(".ch-live-region").inner_text().startswith(escape_invisible(text["generic"].tokens[-1]))
        page.keyboard.press("Escape")
        assert page.locator(".ch-tooltip").is_hidden()

    def test_word_view_shows_summed_scores(self, open_page: OpenPage, text: dict[str, Explanation]) -> None:
        explanation = text["input-x-gradient"]
        page = open_page(html.render_explanations_page([explanation]))
        page.get_by_role("button", name="Words").click()
        words = explanation.words()
        assert page.locator(".ch-unit").count() == len(words)
        word = page.locator(".ch-unit").nth(3)
        word.hover()
        assert text_labels.format_number(float(words.scores[3]), 5) in page.locator(".ch-tooltip").inner_text()

    def test_evidence_units_are_marked(self, open_page: OpenPage, text: dict[str, Explanation]) -> None:
        page = open_page(html.render_explanations_page([text["generic"]], evidence=[2, 5]))
        marked = page.locator(".ch-evidence").evaluate_all("(all) => all.map((unit) => Number(unit.dataset.unit))")
        assert marked == [2, 5] and "marked as evidence" in page.locator(".ch-stream").inner_text()

    def test_selected_step_shows_only_its_scores(self, open_page: OpenPage) -> None:
        explanation = every()["source and prefix"]
        page = open_page(html.render_explanations_page([explanation]))
        page.locator(".ch-chip").nth(1).click()
        for index, stream in enumerate(explanation.by_stream.values()):
            page.locator(".ch-stream").nth(index).locator(".ch-unit").nth(1).hover()
            assert stream.matrix is not None
            assert (
                text_labels.format_number(float(np.float32(stream.matrix[1, 1])), 5)
                in page.locator(".ch-tooltip").inner_text()
            )
        assert page.locator('.ch-chip[aria-pressed="true"]').count() == 1
        page.locator(".ch-chip").nth(1).click()
        assert page.locator('.ch-chip[aria-pressed="true"]').count() == 0


class TestImages:
    def test_opacity_slider_mask_and_patch_navigation(self, open_page: OpenPage, image: dict[str, Explanation]) -> None:
        explanation = image["generic"]
        page = open_page(html.render_explanations_page([explanation]))
        page.locator(".ch-slider").fill("25")
        assert page.locator(".ch-heat-map").first.evaluate("(heat) => getComputedStyle(heat).opacity") == "0.25"
        page.get_by_role("button", name="Mask").click()
        page.locator(".ch-slider").fill("0")
        # All patches of an unsigned method are above zero and inside the mask: nothing is covered.
        count_opaque_pixels = (
            "(heat) => heat.getContext('2d').getImageData(0, 0, heat.width, heat.height).data"
            ".filter((value, place) => place % 4 === 3 && value).length"
        )
        if not explanation.signed:
            assert page.locator(".ch-heat-map").first.evaluate(count_opaque_pixels) == 0
        page.locator(".ch-slider").fill("100")
        assert page.locator(".ch-heat-map").first.evaluate(count_opaque_pixels) > 0
        page.locator(".ch-image-stack[tabindex]").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".ch-live-region").inner_text().startswith("row 0, column 1")

    def test_selected_object_shows_only_its_map_and_box(self, open_page: OpenPage) -> None:
        page = open_page(html.render_explanations_page([every()["objects"]]))
        boxes, count = page.locator(".ch-overlay .ch-detection-box:visible"), len(every()["objects"].steps or ())
        pixels = "(heat) => heat.getContext('2d').getImageData(0, 0, heat.width, heat.height).data.join()"
        all_pixels = page.locator(".ch-overlay .ch-heat-map").evaluate(pixels)
        assert boxes.count() == count
        page.locator("button.ch-map-button").nth(2).click()
        assert boxes.count() == 1 and page.locator(".ch-overlay .ch-heat-map").evaluate(pixels) != all_pixels

    def test_region_boxes_overlay_the_image(self, open_page: OpenPage) -> None:
        page = open_page(html.render_explanations_page([every()["text and regions"]]))
        regions = every()["text and regions"]["regions"]
        assert page.locator(".ch-region").count() == len(regions)
        left = page.locator(".ch-region").first.evaluate("(box) => parseFloat(box.style.left)")
        assert regions.units.boxes is not None and regions.units.boxes[0] is not None
        assert left == pytest.approx(100 * regions.units.boxes[0][0], abs=0.01)


def test_hovered_word_highlights_attended_regions(open_page: OpenPage) -> None:
    joint = every()["text and regions"]
    page = open_page(render_links_page(joint))
    page.locator(".ch-link-column").first.locator("li").nth(2).hover()
    weights = np.random.default_rng(0).uniform(size=(len(joint["text"]), len(joint["regions"])))
    strengths = page.locator(".ch-region-highlight").evaluate_all(
        "(all) => all.map((box) => Number(box.style.getPropertyValue('--strength')))"
    )
    assert strengths == pytest.approx((weights[2] / weights.max()).tolist(), rel=1e-5)
    page.get_by_role("button", name="Regions → text").click()
    page.locator(".ch-region-highlight").nth(1).dispatch_event("pointerenter")  # another region lies over it
    assert page.locator(".ch-active").inner_text() == "region 1"
    best = joint["text"].units.names[int(weights[:, 1].argmax())]
    assert best in page.locator(".ch-tooltip p").nth(1).inner_text()


def test_object_boxes_and_masks_equal_python(open_page: OpenPage) -> None:
    """The renderer thresholds scores as `Explanation.mask` does: canvas pixels equal the mask."""
    objects = every()["objects"]
    page = open_page(html.render_explanations_page([objects]))
    assert page.locator(".ch-map-button .ch-object-box").count() == len(objects.steps)
    for step, caption in enumerate(page.locator(".ch-map-button figcaption").all_inner_texts()):
        name, share = re.fullmatch(r"(.*), mask of (\d+) %", caption).groups()
        inside = compute_otsu_mask(objects["image"].step(step).heat_map(), *objects["image"].image.shape[:2])
        assert name == objects.steps[step]
        # the share is rounded, and the mask is thresholded at the size of the image
        assert float(share) == pytest.approx(100 * inside.mean(), abs=0.7)
    page.get_by_role("button", name="Objects").click()
    boxes = page.locator(".ch-overlay .ch-object-box:visible b").all_inner_texts()
    assert boxes == [label for label, _ in text_labels.find_detected_boxes(objects).values()]
    page.locator(".ch-chip").nth(1).click()
    assert page.locator(".ch-overlay .ch-object-box:visible").count() == 1
    alpha = page.locator(".ch-overlay canvas").evaluate(
        "(drawn) => { const data = drawn.getContext('2d').getImageData(0, 0, drawn.width, drawn.height).data;"
        " return [drawn.height, drawn.width, Array.from(data.filter((_, at) => at % 4 === 3))]; }"
    )
    height, width, opacity = alpha
    inside = np.array(opacity).reshape(height, width) > 0
    expected = compute_otsu_mask(objects["image"].step(1).heat_map(), height, width)
    # edges differ: the mask is thresholded at the size of the image
    assert expected.any() and (inside != expected).mean() < 0.02


class TestAttention:
    def test_head_matrix_links_and_graph_views(self, open_page: OpenPage) -> None:
        view = make_attention_view(9)
        page = open_page(html.render_result_page(view))
        page.get_by_label("Heads: arrow keys").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        assert "Layer 1, head 2" in page.locator(".ch-single-head").inner_text()
        page.locator(".ch-single-head .ch-scroll").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator(".ch-live-region").inner_text().startswith("t1 → t0")
        page.get_by_role("button", name="Links").click()
        page.locator(".ch-link-column li").nth(4).hover()
        best = int(view.attention[1, 2, 4].argmax())
        assert f"t{best}" in page.locator(".ch-tooltip p").nth(1).inner_text()
        page.get_by_role("button", name="Graph").click()
        assert page.get_by_role("img", name="Layered graph").count() == 1 and page.messages == []

    def test_cross_attention_is_selectable_and_rectangular(self, open_page: OpenPage) -> None:
        view = make_multi_stream_attention_view(4, 9)
        page = open_page(html.render_result_page(view))
        assert "6 units" in page.locator("section.ch-attention").inner_text()
        page.get_by_role("button", name="text → image").click()
        assert "4 units attend to 9 units" in page.locator("section.ch-attention").inner_text()
        page.locator(".ch-single-head .ch-scroll").focus()
        page.keyboard.press("End")
        weight = view["text → image"].attention[1, 0, 0, 8]
        assert page.locator(".ch-live-region").inner_text().startswith(f"q0 → k8: {weight:.1g}"[:9])
        page.get_by_role("button", name="Links").click()
        assert [side.locator("li").count() for side in page.locator(".ch-link-column").all()] == [4, 9]
        assert page.get_by_role("button", name="Graph").count() == 0 and page.messages == []

    def test_attention_of_512_tokens_is_summarised(self, open_page: OpenPage) -> None:
        page = open_page(html.render_result_page(repeat_over_heads(make_attention_view(512, 1, 1))))
        assert "512 × 512 units in 91 × 91 blocks" in page.locator(".ch-single-head").inner_text()

    @pytest.mark.slow  # measures time, so it needs a quiet machine
    def test_head_navigation_of_512_tokens_is_fast(self, open_page: OpenPage) -> None:
        page = open_page(html.render_result_page(repeat_over_heads(make_attention_view(512, 1, 1))))
        measure_moves = """async () => {
          const frame = document.querySelector('[aria-label^="Heads"]'), times = [];
          for (const key of [...Array(10).fill("ArrowRight"), ...Array(10).fill("ArrowDown")]) {
            const start = performance.now();
            frame.dispatchEvent(new KeyboardEvent("keydown", { key }));
            times.push(performance.now() - start);
          }
          return times.sort((a, b) => a - b)[10];
        }"""
        assert page.evaluate(measure_moves) < 100  # milliseconds


def test_js_number_format_equals_python(open_page: OpenPage) -> None:
    values = [0.0, 1.0, -1.0, 0.1, 12.0, 1e-7, -3.25e-5, 123456.0, 99.996, 0.00012345, 5e-324, -0.0123456]
    source = bundle.read_asset("format.js").decode().replace("export ", "")
    cell = "[formatNumber(v), formatNumber(v, 2), formatAligned(v, 0.5)]"
    formatted = open_page("<!doctype html><title>x</title>").evaluate(
        f"(values) => {{ {source}; return values.map((v) => {cell}); }}", values
    )
    expected = [
        [text_labels.format_number(v), text_labels.format_number(v, 2), text_labels.format_aligned_number(v, 0.5)]
        for v in values
    ]
    assert formatted == expected


def test_print_opens_details_and_uses_light_colours(open_page: OpenPage, text: dict[str, Explanation]) -> None:
    page = open_page(html.render_explanations_page([text["generic"]]), color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".ch-details > details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.locator(".ch-page").evaluate("(main) => getComputedStyle(main).colorScheme") == "light"
    assert page.locator("details canvas").first.evaluate("(map) => map.width") > 100
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_scores_are_visible_without_javascript(open_page: OpenPage, text: dict[str, Explanation]) -> None:
    page = open_page(html.render_explanations_page([text["generic"]]), java_script_enabled=False)
    assert text_labels.format_number(float(text["generic"].scores[3])) in page.locator("main").inner_text()


def test_warnings_are_drawn_in_the_card_and_with_the_agreement(
    open_page: OpenPage, text: dict[str, Explanation]
) -> None:
    e = next(iter(text.values()))
    units = e.units.content_indices()
    scores = np.zeros(len(e))
    scores[units] = np.arange(len(units))
    warned = replace(e, scores=scores, method="a", certificate={**e.certificate, "warnings": [f"odd {ATTACK}: do it."]})
    comparison = Comparison({"a": warned, "b": replace(e, scores=-scores, method="b", certificate={})})
    assert comparison.warnings
    page = open_page(html.render_explanations_page(comparison))
    assert [part.inner_text() for part in page.locator(".ch-card .ch-caution").all()] == [
        f"Warning: odd {ATTACK}: do it."
    ]
    assert page.locator(".ch-agreement .ch-caution").inner_text() == f"Warning: {comparison.warnings[0]}"
    assert page.title() != "owned" and not page.fetched
