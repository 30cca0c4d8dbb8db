"""The web page in a real browser: user actions, network isolation, and accessibility."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clearhead.render import bundle
from clearhead.render.view_model import VIEW_MODEL_VERSION
from clearhead.web import static_files
from tests.web.conftest import encode_base64, make_png

pytest.importorskip("playwright", reason="playwright is missing")  # in CI the pages of tests/render fail without it
from playwright.sync_api import Browser, Page, Route, expect

TEXT = "a gripping film , but the ending is dull"
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "\u202egnp.exe \u200b\u200d dull"
)


@pytest.fixture(scope="session")
def browser(launch: Callable[..., Any]) -> Browser:
    chromium: Browser = launch("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    return chromium


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Open pages that are ready for use; any console error, dialog or external request fails the test."""
    problems: list[str] = []
    contexts = []

    def open_ready_page(scheme: Any = "light", **options: Any) -> Page:
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1440, "height": 1000}, **options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: None if _is_local(request.url, address) else problems.append(request.url))
        page.goto(address)
        expect(page.locator("#method-list input[value=ensemble]")).to_be_checked(timeout=60_000)
        return page

    yield open_ready_page
    for context in contexts:
        context.close()
    assert [
        message for message in problems if "status of 422" not in message
    ] == []  # chromium logs expected rejections


def _is_local(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


def explain(page: Page, text: str | None = None, *methods: str) -> None:
    if text is not None:
        page.get_by_label("Text", exact=True).fill(text)
    for name in methods:
        page.get_by_label(re.compile(rf"^{name},")).check()
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Done in", timeout=60_000)


def get_card_titles(page: Page) -> list[str]:
    return page.locator("#result-view .ch-card h3").all_inner_texts()


def select_model(page: Page, model: str) -> None:
    about = page.locator("#model-summary")
    before = about.inner_text()
    page.get_by_label("Model").select_option(model)
    expect(about).not_to_have_text(before)


pytestmark = pytest.mark.browser


def test_typed_text_is_explained_and_methods_are_compared(page: Page) -> None:
    explain(page, TEXT, "attcat", "occlusion")
    expect(page.get_by_role("heading", name=re.compile("^Why "))).to_be_visible()
    assert sorted(get_card_titles(page)[:3]) == ["attcat", "ensemble", "occlusion"]
    expect(page.locator("#result-view")).to_contain_text("Kendall")
    assert page.locator("#result-view .ch-card").first.locator(".ch-unit", has_text="gripping").count() == 1
    expect(page.locator("#history li")).to_have_count(1)


@pytest.mark.slow  # measures time, so it needs a quiet machine
def test_first_result_appears_within_1_5_seconds(page: Page) -> None:
    explain(page, TEXT)
    durations = []
    for text in ("so boring", "I like the movie", "You look extremely confused"):
        page.get_by_label("Text", exact=True).fill(text)
        start = time.monotonic()
        page.get_by_role("button", name="Explain", exact=True).click()
        expect(page.locator("#result-view .ch-card .ch-text").first).to_contain_text(text, timeout=20_000)
        durations.append(time.monotonic() - start)
        expect(page.locator("#status")).to_contain_text("Done in")
    assert sorted(durations)[1] < 1.5, durations


def test_other_class_is_explained_by_one_click(page: Page) -> None:
    explain(page, TEXT)
    before = page.get_by_role("heading", name=re.compile("^Why ")).inner_text()
    other = "NEGATIVE" if "POSITIVE" in before else "POSITIVE"
    page.locator("#result-view").get_by_role("button", name=other).click()
    expect(page.get_by_role("heading", name=f"Why {other}?")).to_be_visible()
    expect(page.locator("#history li")).to_have_count(2)
    page.locator("#history li").last.get_by_role("button").click()
    expect(page.get_by_role("heading", name=before)).to_be_visible()
    for line in page.locator("#history li").all():
        line.get_by_role("checkbox").check()
    page.get_by_role("button", name="Show selected results side by side").click()
    expect(page.locator("#result-view")).to_contain_text("POSITIVE")
    expect(page.locator("#result-view")).to_contain_text("NEGATIVE")
    expect(page.locator("#history li")).to_have_count(3)


def test_pasted_and_dropped_images_are_explained(page: Page) -> None:
    select_model(page, "zoo:pets")
    insert_image(page, "paste", "pasted.png")
    expect(page.get_by_alt_text("The image to explain: pasted.png")).to_be_visible()
    insert_image(page, "drop", "cat.png")
    expect(page.get_by_alt_text("The image to explain: cat.png")).to_be_visible()
    explain(page)
    assert get_card_titles(page)[0] == "ensemble"
    page.get_by_label("Explain", exact=True).select_option("Bengal")
    explain(page)
    expect(page.get_by_role("heading", name="Why Bengal?")).to_be_visible()
    assert page.locator("#result-view canvas, #result-view img").count() > 0


def test_actions_before_model_info_arrives_apply_to_the_chosen_model(page: Page) -> None:
    pending: list[Route] = []
    page.route(re.compile("check_methods=false"), lambda route: pending.append(route))

    def choose_slowly(model: str) -> None:
        with page.expect_request(re.compile("check_methods=false")):
            page.get_by_label("Model").select_option(model)

    choose_slowly("zoo:pets")
    insert_image(page, "paste", "early.png")
    pending.pop().continue_()
    expect(page.get_by_alt_text("The image to explain: early.png")).to_be_visible()
    choose_slowly("zoo:spell")
    page.get_by_role("button", name="Explain", exact=True).click()
    choose_slowly("zoo:sentiment")
    for route in pending:
        route.continue_()
    expect(page.locator("#status")).to_contain_text("Done in", timeout=60_000)
    expect(page.locator("#history li")).to_contain_text("sentiment")


def test_explain_click_waits_until_models_are_loaded(page: Page) -> None:
    pending: list[Route] = []
    page.route(re.compile("api/models"), lambda route: pending.append(route))
    with page.expect_request(re.compile("api/models")):
        page.reload()
    page.get_by_role("button", name="Explain", exact=True).click()
    pending.pop().continue_()
    expect(page.locator("#status")).to_contain_text("Done in", timeout=60_000)


def test_saved_result_opens_before_model_info_arrives(page: Page, tmp_path: Path) -> None:
    explain(page, TEXT)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as a page").click()
    saved.value.save_as(tmp_path / "saved.html")
    pending: list[Route] = []
    page.route(re.compile("check_methods=false"), lambda route: pending.append(route))
    with page.expect_request(re.compile("check_methods=false")):
        page.reload()
    page.get_by_label("Open a saved result").set_input_files(tmp_path / "saved.html")
    expect(page.locator("#result-view .ch-card")).to_have_count(1)
    expect(page.locator("#status")).to_contain_text("Opened saved.html")
    expect(page.locator("#error")).to_be_hidden()
    pending.pop().continue_()


def test_failed_model_request_does_not_fall_back_to_previous_model(page: Page) -> None:
    select_model(page, "zoo:shapes-detr")
    failing_request = re.compile("zoo%3Apets&check_methods=false")
    page.route(failing_request, lambda route: route.fulfill(status=422, json={"error": "pets went for a walk"}))
    page.get_by_label("Model").select_option("zoo:pets")
    expect(page.locator("#error")).to_contain_text("pets went for a walk")
    page.get_by_label("use this example").click()  # the form still belongs to the previous model
    insert_image(page, "paste", "lost.png")
    expect(page.locator("#error")).to_contain_text("No model is ready")
    page.get_by_role("button", name="Explain", exact=True).click()
    page.unroute(failing_request)
    select_model(page, "zoo:sentiment")
    explain(page, TEXT)
    expect(page.locator("#history li")).to_have_count(1)
    expect(page.locator("#history li")).to_contain_text("sentiment")


def insert_image(page: Page, action: str, name: str) -> None:
    """Drop an image onto the page, or paste it."""
    page.evaluate(
        """([content, how, name]) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const held = new DataTransfer();
            held.items.add(new File([bytes], name, { type: "image/png" }));
            const both = { dataTransfer: held, clipboardData: held, bubbles: true, cancelable: true };
            const made = how === "drop" ? new DragEvent("drop", both) : new ClipboardEvent("paste", both);
            document.getElementById("drop-area").dispatchEvent(made);
        }""",
        [encode_base64(make_png()), action, name],
    )


def test_attention_streams_are_selected_by_name(page: Page) -> None:
    select_model(page, "zoo:spell")
    page.get_by_label("Text", exact=True).fill("phone")
    page.get_by_role("button", name="Attention heads").click()
    heads = page.locator("#attention-view")
    expect(heads).to_contain_text("3 layers of 4 heads")
    heads.get_by_role("button", name="prefix → source").click()
    expect(heads).to_contain_text("3 units attend to 6 units")
    heads.get_by_role("button", name="Links").click()
    ends = heads.locator(".ch-link-column").last.locator("li")
    assert ends.all_inner_texts() == [*"phone", "</s>"]
    heads.get_by_role("button", name="source", exact=True).click()
    expect(heads).not_to_contain_text("look at 6")


def test_hovered_word_highlights_attended_regions(page: Page) -> None:
    select_model(page, "zoo:shapes-vqa")
    explain(page)
    page.get_by_role("button", name="Attention heads").click()
    joined = page.locator("#attention-view .ch-panel", has_text="Text and regions")
    expect(joined).to_contain_text("the strongest link is", timeout=60_000)
    joined.locator(".ch-link-column").first.locator("li").nth(5).hover()
    expect(page.locator(".ch-tooltip")).to_contain_text("attends to")
    read_strengths = "(all) => all.map((box) => Number(box.style.getPropertyValue('--strength')))"
    strengths = joined.locator(".ch-region-highlight").evaluate_all(read_strengths)
    assert len(strengths) == 8 and max(strengths) > 2 * sorted(strengths)[4] > 0
    joined.get_by_role("button", name="Regions → text").click()
    assert joined.locator(".ch-link-column").first.locator("li").first.inner_text() == "region 0"


def test_every_detected_object_has_box_and_mask(page: Page) -> None:
    select_model(page, "zoo:shapes-detr")
    page.get_by_label("use this example").check()
    explain(page)
    page.locator("#result-view").get_by_role("button", name="Objects").click()
    labels = page.locator("#result-view .ch-overlay .ch-object-box:visible b").all_inner_texts()
    assert labels == ["triangle", "cross", "square", "circle"]
    assert all(
        "mask of" in caption for caption in page.locator("#result-view .ch-map-button figcaption").all_inner_texts()
    )


def test_selected_head_of_a_long_text_is_fetched_in_full(page: Page) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url) if "/api/heads/" in request.url else None)
    page.get_by_label("Text", exact=True).fill(f"{TEXT} " * 20)
    page.get_by_role("button", name="Attention heads").click()
    heads = page.locator("#attention-view")
    expect(heads).to_contain_text("6 layers of 12 heads", timeout=60_000)
    heads.get_by_role("combobox", name="Head").select_option("5")
    expect(heads).to_contain_text("Layer 5, head 5")
    expect(heads.locator(".ch-single-head canvas")).to_have_attribute(
        "aria-label", re.compile("^Attention, query × key, 1[0-9][0-9] ×")
    )
    assert "head=5" in fetched[-1] and "Summarised" not in heads.locator(".ch-single-head").inner_text()


def test_contrast_target_of_a_generated_word(page: Page) -> None:
    select_model(page, "zoo:spell")
    page.get_by_label("Text", exact=True).fill("phone")
    page.get_by_label("rather than").locator("visible=true").fill("V")
    explain(page)
    expect(page.locator("#result-view")).to_contain_text("F − V")
    expect(page.locator("#history")).to_contain_text("the prediction, not V")


def test_attention_head_is_selected_by_layer_and_number(page: Page) -> None:
    explain(page, TEXT)
    page.get_by_role("button", name="Attention heads").click()
    heads = page.locator("#attention-view")
    expect(heads).to_contain_text("6 layers of 12 heads", timeout=60_000)
    heads.get_by_role("combobox", name="Layer").select_option("2")
    heads.get_by_role("combobox", name="Head").select_option("5")
    expect(heads).to_contain_text("Layer 2, head 5")
    expect(page.locator("#history li")).to_have_count(1)


def test_running_request_can_be_cancelled(page: Page, client: httpx.Client) -> None:
    page.get_by_label("Text", exact=True).fill("one two three four five six seven " * 4)
    for name in ("kernel-shap", "lime"):
        page.get_by_label(re.compile(rf"^{name},")).check()
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.locator("#result-view .ch-card")).to_have_count(1)  # the cheap method has finished
    expect(page.locator("#status")).to_contain_text("of up to", timeout=30_000)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#status")).to_have_text("Cancelled.")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    deadline = time.monotonic() + 10
    while client.get("/api/about").json()["num_pending_requests"]:
        assert time.monotonic() < deadline, "the server still computes the cancelled request"
        time.sleep(0.1)
    explain(page, TEXT)


def test_saved_result_can_be_reopened(page: Page, tmp_path: Path) -> None:
    explain(page, TEXT)
    why = page.get_by_role("heading", name=re.compile("^Why ")).inner_text()
    scores = page.locator("#result-view .ch-scores").first.inner_text()
    for button, ending in (("Save the data", ".safetensors"), ("Save as a page", ".html")):
        with page.expect_download() as saved:
            page.get_by_role("button", name=button).click()
        file = tmp_path / saved.value.suggested_filename
        saved.value.save_as(file)
        assert file.suffix == ending and file.stat().st_size > 1000
        page.reload()
        page.get_by_label("Open a saved result").set_input_files(file)
        expect(page.get_by_role("heading", name=why)).to_be_visible()
        assert page.locator("#result-view .ch-scores").first.inner_text() == scores
        explain(page, TEXT)
    page.get_by_label(re.compile("^attcat,")).check()
    explain(page, TEXT)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the data").click()
    several = tmp_path / saved.value.suggested_filename
    saved.value.save_as(several)
    assert several.suffix == ".json"
    page.get_by_label("Open a saved result").set_input_files(several)
    expect(page.locator("#status")).to_contain_text("Opened")
    assert sorted(get_card_titles(page)[:2]) == ["attcat", "ensemble"]


def test_invalid_file_and_empty_text_show_an_error(page: Page, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    page.get_by_label("Open a saved result").set_input_files(damaged)
    expect(page.get_by_role("alert")).to_contain_text("not an explanation")
    data = '<script type="application/json" class="ch-data">{}</script>'
    for content in ("{", f'{{"view":"input","version":{VIEW_MODEL_VERSION}}}', "<b>"):
        invalid_page = tmp_path / "spoilt.html"
        invalid_page.write_text(data.replace("{}", content), encoding="utf-8")
        page.get_by_label("Open a saved result").set_input_files(invalid_page)
        expect(page.get_by_role("alert")).to_contain_text(
            "spoilt.html is not a page saved by clearhead, or it is damaged"
        )
    expect(page.locator("#history li")).to_have_count(0)
    page.get_by_label("Text", exact=True).fill("   ")
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("the text is empty")
    expect(page.get_by_role("status")).to_have_text("")  # nothing was done


@pytest.mark.parametrize(
    ("version", "age"), [(VIEW_MODEL_VERSION - 1, "an older"), (VIEW_MODEL_VERSION + 1, "a newer")]
)
def test_saved_page_of_another_version_is_rejected(page: Page, tmp_path: Path, version: int, age: str) -> None:
    saved_page = tmp_path / "saved.html"
    view_model = f'{{"view":"input","version":{version}}}'
    saved_page.write_text(f'<script type="application/json" class="ch-data">{view_model}</script>', encoding="utf-8")
    page.get_by_label("Open a saved result").set_input_files(saved_page)
    expect(page.locator("#result-view")).to_contain_text(f"made by {age} version of clearhead")


def test_error_message_is_scrolled_into_view(page: Page) -> None:
    """Also after scrolling down to the attention heads."""
    page.get_by_label("Text", exact=True).fill("I like the movie")
    page.get_by_role("button", name="Attention heads").click()
    expect(page.get_by_role("status")).to_contain_text("below")
    page.set_viewport_size({"width": 1200, "height": 500})
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(page.get_by_role("alert")).not_to_be_in_viewport()
    page.get_by_label("Text", exact=True).fill("   ")
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.get_by_role("alert")).to_be_in_viewport()


def test_too_long_pasted_text_is_rejected(page: Page) -> None:
    field = page.get_by_label("Text", exact=True)
    field.fill("so boring")
    field.focus()
    page.evaluate(
        """() => {
            const held = new DataTransfer();
            held.setData("text/plain", "word ".repeat(2_000_000));
            const made = new ClipboardEvent("paste", { clipboardData: held, bubbles: true, cancelable: true });
            return document.getElementById("text").dispatchEvent(made);
        }"""
    )
    expect(page.get_by_role("alert")).to_contain_text("10,000,009 characters, but at most 20,000 are accepted")
    assert field.input_value() == "so boring"
    explain(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_hostile_text_is_displayed_but_not_executed(page: Page) -> None:
    explain(page, HOSTILE)
    assert page.title() == "clearhead" and page.locator("#result-view script, #result-view img[src=x]").count() == 0
    expect(page.locator("#result-view .ch-text").first).to_contain_text("script")
    expect(page.locator("#history b").first).to_contain_text("<script>")


def test_page_is_usable_by_keyboard(page: Page) -> None:
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("so boring")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Done in", timeout=30_000)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "toggle-text-pair"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(open_page: Callable[..., Page], scheme: str) -> None:
    from axe_core_python.sync_playwright import Axe

    page = open_page(scheme)
    violations = _list_serious_violations(Axe().run(page))
    explain(page, TEXT, "attcat")
    page.get_by_role("button", name="Attention heads").click()
    expect(page.locator("#attention-view")).to_contain_text("layers of", timeout=60_000)
    violations += _list_serious_violations(Axe().run(page))
    assert violations == []


def _list_serious_violations(report: dict[str, Any]) -> list[str]:
    return [
        f"{violation['id']}: {node['html'][:200]}"
        for violation in report["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_page_is_small_and_references_no_other_host() -> None:
    assets = {name: static_files.read_page_file(name) for name in static_files.PAGE_MEDIA_TYPES} | {
        name: bundle.read_asset(name) for name in bundle.ASSET_NAMES
    }
    assert sum(map(len, assets.values())) < 300_000
    for name, content in assets.items():
        hosts = re.findall(rb"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.]+", content)
        assert [host for host in hosts if b"www.w3.org" not in host] == [], name
