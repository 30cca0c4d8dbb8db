"""Pages in a real browser: nothing hostile runs, nothing is fetched, and what is ours works."""

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
from tests.render.browser import Open, every_fold, linked
from tests.render.conftest import NASTY
from tests.render.example_results import every
from tests.render.test_multi_stream import stepped
from tests.render.test_view_model import attended, spread, streamed

pytestmark = pytest.mark.browser

#: Whatever runs leaves this in the title.
OWNED = "<script>document.title='owned'</script><img src=http://owned.invalid/y.png onerror=document.title='owned'>"


def framed(result: Any) -> str:
    """As in a notebook: there is no content policy to save it, and escaping alone must hold."""
    return f"<!doctype html><html lang=en><title>safe</title><body>{html.render_notebook_html(result)}"


class TestSafety:
    def test_this_test_would_notice(self, opened: Open) -> None:
        page = opened(f"<!doctype html><title>safe</title>{OWNED}")
        assert page.title() == "owned" and page.fetched == ["http://owned.invalid/y.png"]

    def test_nothing_hostile_runs_and_nothing_is_fetched(self, opened: Open, nasty: Explanation) -> None:
        hostile = replace(stepped(nasty), method=OWNED, prediction={"label": OWNED, "value": 1.0})
        for text in (
            html.render_explanations_page([hostile], title="safe"),
            framed(hostile),
            framed([hostile, replace(hostile, method="b")]),
        ):
            page = opened(text)
            every_fold(page)
            page.locator(".ch-chip").first.click()
            page.locator(".ch-u").nth(1).hover()
            assert page.title() == "safe" and page.fetched == [] and page.said == []
            assert page.locator("script:not([type])").count() == 1
            assert page.locator(".ch-card").first.locator(".ch-u").count() == len(NASTY)
            assert page.locator("iframe, object, embed, link, base, form, a").count() == 0

    def test_the_content_policy_holds_even_against_markup(self, opened: Open, nasty: Explanation) -> None:
        page = opened(html.render_explanations_page([nasty], title="safe").replace("<main", f"{OWNED}<main", 1))
        assert page.title() == "safe" and page.locator(".ch-u").count() == len(NASTY)

    def test_modules_work_under_a_strict_policy(self, opened: Open, chromium: Any, tmp_path: Path) -> None:
        """As the page serves them: no inline style or script is allowed."""
        page = chromium.new_page()
        policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'"
        given = json.dumps(build_view_model(every()["objects"]))
        style, start = "<link rel=stylesheet href=clearhead.css>", "<script type=module src=go.js></script>"
        body = f"<!doctype html>{style}<div id=here></div>{start}"
        go = f'import {{ draw }} from "./clearhead.js"; draw(document.getElementById("here"), {given});'

        def answer(route: Any) -> None:
            file = route.request.url.rpartition("/")[2]
            if file in bundle.ASSET_NAMES:
                route.fulfill(body=bundle.read_asset(file).decode(), content_type=bundle.get_asset_media_type(file))
            elif file == "go.js":
                route.fulfill(body=go, content_type="text/javascript")
            else:
                route.fulfill(body=body, content_type="text/html", headers={"Content-Security-Policy": policy})

        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        page.route("**/*", answer)
        page.goto("http://page.invalid/index.html")
        assert page.locator(".ch-card").count() == 1 and page.locator(".ch-box").count() > 0
        assert [line for line in problems if "favicon" not in line] == []
        page.close()


class TestText:
    def test_every_unit_lies_where_it_was_written(
        self, opened: Open, text: dict[str, Explanation], pair: Explanation
    ) -> None:
        explanation = text["generic"]
        page = opened(html.render_explanations_page([explanation]))
        line = page.locator(".ch-text").evaluate(
            "(line) => [...line.childNodes].filter((part) => !part.classList?.contains('ch-x'))"
            ".map((part) => part.textContent).join('')"
        )
        assert line == explanation.units.texts[0]
        assert page.locator(".ch-u").evaluate_all("(all) => all.map((u) => Number(u.dataset.unit))") == list(
            range(len(explanation))
        )
        assert opened(html.render_explanations_page([pair])).locator(".ch-text").count() == 2

    def test_all_scores_are_text(self, opened: Open, text: dict[str, Explanation]) -> None:
        explanation = text["attcat"]
        page = opened(html.render_explanations_page([explanation]))
        every_fold(page)
        table = page.locator("details .ch-scores").first
        full = max(abs(explanation.scores[explanation.units.content_indices()]))
        assert table.locator("td:last-child").all_inner_texts() == [
            text_labels.format_aligned_number(float(s), full) for s in explanation.scores
        ]
        page.get_by_role("button", name="Ranked").click()
        first = table.locator("bdi").first.inner_text()
        assert first == escape_invisible(explanation.top(1)[0][0])
        page.get_by_role("button", name="By size").click()
        kept = explanation.units.content_indices()
        largest = kept[np.argsort(-np.abs(explanation.scores[kept]), kind="stable")]
        wanted = [escape_invisible(explanation.units.names[place]) for place in largest]
        assert table.locator("th > bdi:first-child").all_inner_texts()[: len(wanted)] == wanted
        strongest = page.locator(".ch-scores", has_text="Strongest units").locator("th > bdi:first-child")
        assert strongest.all_inner_texts() == wanted[:6]

    def test_the_pointer_and_the_keyboard_say_what_each_method_gives(
        self, opened: Open, text: dict[str, Explanation]
    ) -> None:
        page = opened(html.render_explanations_page(Comparison(text)))
        page.locator(".ch-card").first.locator(".ch-u").nth(2).hover()
        told = page.locator(".ch-tip").inner_text()
        for explanation in text.values():
            assert text_labels.format_number(float(explanation.scores[2]), 3)[:5] in told
        assert page.locator(".ch-also").count() >= len(text)
        page.locator(".ch-reading").first.focus()
        page.keyboard.press("End")
        assert page.locator(".ch-said").inner_text().startswith(escape_invisible(text["generic"].tokens[-1]))
        page.keyboard.press("Escape")
        assert page.locator(".ch-tip").is_hidden()

    def test_words_are_sums_of_their_pieces(self, opened: Open, text: dict[str, Explanation]) -> None:
        explanation = text["input-x-gradient"]
        page = opened(html.render_explanations_page([explanation]))
        page.get_by_role("button", name="Words").click()
        words = explanation.words()
        assert page.locator(".ch-u").count() == len(words)
        place = page.locator(".ch-u").nth(3)
        place.hover()
        assert text_labels.format_number(float(words.scores[3]), 5) in page.locator(".ch-tip").inner_text()

    def test_what_people_marked_is_drawn_under_it(self, opened: Open, text: dict[str, Explanation]) -> None:
        page = opened(html.render_explanations_page([text["generic"]], evidence=[2, 5]))
        marked = page.locator(".ch-human").evaluate_all("(all) => all.map((unit) => Number(unit.dataset.unit))")
        assert marked == [2, 5] and "marked as evidence" in page.locator(".ch-stream").inner_text()

    def test_a_step_that_is_chosen_is_shown_alone(self, opened: Open) -> None:
        both = every()["source and prefix"]
        page = opened(html.render_explanations_page([both]))
        page.locator(".ch-chip").nth(1).click()
        for place, part in enumerate(both.by_stream.values()):
            page.locator(".ch-stream").nth(place).locator(".ch-u").nth(1).hover()
            assert part.matrix is not None
            assert (
                text_labels.format_number(float(np.float32(part.matrix[1, 1])), 5)
                in page.locator(".ch-tip").inner_text()
            )
        assert page.locator('.ch-chip[aria-pressed="true"]').count() == 1
        page.locator(".ch-chip").nth(1).click()
        assert page.locator('.ch-chip[aria-pressed="true"]').count() == 0


class TestPictures:
    def test_opacity_patches_and_mask(self, opened: Open, image: dict[str, Explanation]) -> None:
        explanation = image["generic"]
        page = opened(html.render_explanations_page([explanation]))
        page.locator(".ch-opacity").fill("25")
        assert page.locator(".ch-heat").first.evaluate("(heat) => getComputedStyle(heat).opacity") == "0.25"
        page.get_by_role("button", name="Mask").click()
        page.locator(".ch-opacity").fill("0")
        # Above zero all patches of an unsigned method lie inside: nothing is veiled.
        veiled = (
            "(heat) => heat.getContext('2d').getImageData(0, 0, heat.width, heat.height).data"
            ".filter((value, place) => place % 4 === 3 && value).length"
        )
        if not explanation.signed:
            assert page.locator(".ch-heat").first.evaluate(veiled) == 0
        page.locator(".ch-opacity").fill("100")
        assert page.locator(".ch-heat").first.evaluate(veiled) > 0
        page.locator(".ch-stack[tabindex]").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".ch-said").inner_text().startswith("row 0, column 1")

    def test_a_chosen_object_has_its_own_map_and_box(self, opened: Open) -> None:
        page = opened(html.render_explanations_page([every()["objects"]]))
        boxes, count = page.locator(".ch-overlay .ch-box:visible"), len(every()["objects"].steps or ())
        pixels = "(heat) => heat.getContext('2d').getImageData(0, 0, heat.width, heat.height).data.join()"
        whole = page.locator(".ch-overlay .ch-heat").evaluate(pixels)
        assert boxes.count() == count
        page.locator("button.ch-map").nth(2).click()
        assert boxes.count() == 1 and page.locator(".ch-overlay .ch-heat").evaluate(pixels) != whole

    def test_regions_lie_over_their_picture(self, opened: Open) -> None:
        page = opened(html.render_explanations_page([every()["text and regions"]]))
        regions = every()["text and regions"]["regions"]
        assert page.locator(".ch-region").count() == len(regions)
        left = page.locator(".ch-region").first.evaluate("(box) => parseFloat(box.style.left)")
        assert regions.units.boxes is not None and regions.units.boxes[0] is not None
        assert left == pytest.approx(100 * regions.units.boxes[0][0], abs=0.01)


def test_a_word_lights_up_the_regions_that_it_looks_at(opened: Open) -> None:
    joint = every()["text and regions"]
    page = opened(linked(joint))
    page.locator(".ch-ends").first.locator("li").nth(2).hover()
    weights = np.random.default_rng(0).uniform(size=(len(joint["text"]), len(joint["regions"])))
    lit = page.locator(".ch-lit").evaluate_all("(all) => all.map((box) => Number(box.style.getPropertyValue('--s')))")
    assert lit == pytest.approx((weights[2] / weights.max()).tolist(), rel=1e-5)
    page.get_by_role("button", name="Regions → text").click()
    page.locator(".ch-lit").nth(1).dispatch_event("pointerenter")  # another one lies over it
    assert page.locator(".ch-on").inner_text() == "region 1"
    best = joint["text"].units.names[int(weights[:, 1].argmax())]
    assert best in page.locator(".ch-tip p").nth(1).inner_text()


def test_every_object_has_its_box_and_its_mask(opened: Open) -> None:
    """The renderer cuts scores where `Explanation.mask` cuts them: pixels of its canvas against the mask's."""
    objects = every()["objects"]
    page = opened(html.render_explanations_page([objects]))
    assert page.locator(".ch-map .ch-own").count() == len(objects.steps)
    for step, said in enumerate(page.locator(".ch-map figcaption").all_inner_texts()):
        named, share = re.fullmatch(r"(.*), mask of (\d+) %", said).groups()
        inside = compute_otsu_mask(objects["image"].step(step).heat_map(), *objects["image"].image.shape[:2])
        assert named == objects.steps[step]
        assert float(share) == pytest.approx(100 * inside.mean(), abs=0.7)  # rounded, and cut at the picture's size
    page.get_by_role("button", name="Objects").click()
    boxes = page.locator(".ch-overlay .ch-own:visible b").all_inner_texts()
    assert boxes == [label for label, _ in text_labels.find_detected_boxes(objects).values()]
    page.locator(".ch-chip").nth(1).click()
    assert page.locator(".ch-overlay .ch-own:visible").count() == 1
    alpha = page.locator(".ch-overlay canvas").evaluate(
        "(drawn) => { const data = drawn.getContext('2d').getImageData(0, 0, drawn.width, drawn.height).data;"
        " return [drawn.height, drawn.width, Array.from(data.filter((_, at) => at % 4 === 3))]; }"
    )
    height, width, opacity = alpha
    inside = np.array(opacity).reshape(height, width) > 0
    wanted = compute_otsu_mask(objects["image"].step(1).heat_map(), height, width)
    assert wanted.any() and (inside != wanted).mean() < 0.02  # an edge of a pixel: it is cut at the picture's size


class TestAttention:
    def test_heads_matrix_and_links(self, opened: Open) -> None:
        found = attended(9)
        page = opened(html.render_result_page(found))
        page.get_by_label("Heads: arrow keys").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        assert "Layer 1, head 2" in page.locator(".ch-head-of").inner_text()
        page.locator(".ch-head-of .ch-scroll").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator(".ch-said").inner_text().startswith("t1 → t0")
        page.get_by_role("button", name="Links").click()
        page.locator(".ch-ends li").nth(4).hover()
        best = int(found.attention[1, 2, 4].argmax())
        assert f"t{best}" in page.locator(".ch-tip p").nth(1).inner_text()
        page.get_by_role("button", name="Graph").click()
        assert page.get_by_role("img", name="Layered graph").count() == 1 and page.said == []

    def test_streams_are_chosen_by_name_and_maps_need_not_be_square(self, opened: Open) -> None:
        found = streamed(4, 9)
        page = opened(html.render_result_page(found))
        assert "6 units" in page.locator("section.ch-attention").inner_text()
        page.get_by_role("button", name="text → image").click()
        assert "4 units look at 9 units" in page.locator("section.ch-attention").inner_text()
        page.locator(".ch-head-of .ch-scroll").focus()
        page.keyboard.press("End")
        weight = found["text → image"].attention[1, 0, 0, 8]
        assert page.locator(".ch-said").inner_text().startswith(f"q0 → k8: {weight:.1g}"[:9])
        page.get_by_role("button", name="Links").click()
        assert [side.locator("li").count() for side in page.locator(".ch-ends").all()] == [4, 9]
        assert page.get_by_role("button", name="Graph").count() == 0 and page.said == []

    def test_five_hundred_tokens_and_every_head_are_summarised(self, opened: Open) -> None:
        page = opened(html.render_result_page(spread(attended(512, 1, 1))))
        assert "512 × 512 units in 91 × 91 blocks" in page.locator(".ch-head-of").inner_text()

    @pytest.mark.slow  # about time, so on a quiet machine
    def test_five_hundred_tokens_and_every_head_are_smooth(self, opened: Open) -> None:
        page = opened(html.render_result_page(spread(attended(512, 1, 1))))
        moved = """async () => {
          const frame = document.querySelector('[aria-label^="Heads"]'), times = [];
          for (const key of [...Array(10).fill("ArrowRight"), ...Array(10).fill("ArrowDown")]) {
            const start = performance.now();
            frame.dispatchEvent(new KeyboardEvent("keydown", { key }));
            times.push(performance.now() - start);
          }
          return times.sort((a, b) => a - b)[10];
        }"""
        assert page.evaluate(moved) < 100  # milliseconds


def test_figures_read_the_same_as_in_python(opened: Open) -> None:
    values = [0.0, 1.0, -1.0, 0.1, 12.0, 1e-7, -3.25e-5, 123456.0, 99.996, 0.00012345, 5e-324, -0.0123456]
    source = bundle.read_asset("format.js").decode().replace("export ", "")
    found = opened("<!doctype html><title>x</title>").evaluate(
        f"(values) => {{ {source}; return values.map((v) => [number(v), number(v, 2), aligned(v, 0.5)]); }}", values
    )
    wanted = [
        [text_labels.format_number(v), text_labels.format_number(v, 2), text_labels.format_aligned_number(v, 0.5)]
        for v in values
    ]
    assert found == wanted


def test_paper_shows_what_is_folded_away_in_light_colours(opened: Open, text: dict[str, Explanation]) -> None:
    page = opened(html.render_explanations_page([text["generic"]]), color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".ch-more > details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.locator(".ch-page").evaluate("(main) => getComputedStyle(main).colorScheme") == "light"
    assert page.locator("details canvas").first.evaluate("(map) => map.width") > 100
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_without_scripts_the_scores_are_there(opened: Open, text: dict[str, Explanation]) -> None:
    page = opened(html.render_explanations_page([text["generic"]]), java_script_enabled=False)
    assert text_labels.format_number(float(text["generic"].scores[3])) in page.locator("main").inner_text()
