"""Pages in a real browser: nothing hostile runs, nothing is fetched, and what is ours works."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clearhead import Explanation
from clearhead.show import html, wording
from clearhead.show.layout import name
from tests.show.conftest import NASTY
from tests.show.streams import every
from tests.show.test_html import Page
from tests.show.test_streams import stepped

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Whatever runs leaves this in the title.
OWNED = "<script>document.title='owned'</script><img src=http://owned.invalid/y.png onerror=document.title='owned'>"


class Browser:
    """A headless chromium that can reach nothing, with a new profile for each page."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder, self.count = program, folder, 0

    def open(self, page: str) -> tuple[str, str]:
        """The document after its scripts have run, and the log of all that was fetched or tried to be."""
        self.count += 1
        file, log = self.folder / f"{self.count}.html", self.folder / f"{self.count}.json"
        file.write_text(page, encoding="utf-8")
        command = [self.program, *FLAGS, f"--user-data-dir={self.folder / f'profile{self.count}'}"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}", "--dump-dom", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        reason = f"no browser: none of {', '.join(names)} is installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return Browser(program, tmp_path_factory.mktemp("browser"))


def test_this_test_would_notice(browser: Browser) -> None:
    document, log = browser.open(f"<!doctype html><title>safe</title>{OWNED}")
    assert "<title>owned</title>" in document and "owned.invalid" in log


def test_nothing_hostile_runs_and_nothing_is_fetched(browser: Browser, nasty: Explanation) -> None:
    from dataclasses import replace

    hostile = replace(stepped(nasty), method=OWNED, prediction={"label": OWNED, "value": 1.0})
    # The fragment has no content policy to save it: there escaping alone must hold.
    framed = f"<!doctype html><title>safe</title><body>{html.fragment(hostile)}"
    for page, title in ((html.page([hostile], title="safe"), "safe"), (framed, "safe")):
        document, log = browser.open(page)
        parsed = Page(document)
        assert parsed.inside("title") == [title]
        assert len([found for found in parsed.all("script") if found.get("type") is None]) == 1
        assert not [key for _, found in parsed.tags for key in found if key.startswith("on")]
        assert not [found for found in parsed.all("img") if not str(found.get("src")).startswith("data:")]
        assert "owned.invalid" not in log
        assert len(parsed.all("span", "ch-u")) == len(NASTY)


def test_the_content_policy_holds_even_against_markup(browser: Browser, nasty: Explanation) -> None:
    page = html.page([nasty], title="safe").replace("<main", f"{OWNED}<main", 1)
    document, log = browser.open(page)
    assert "<title>safe</title>" in document and "http://owned.invalid/y.png" not in log


def test_the_slider_moves_the_heat_map(browser: Browser, image: dict[str, Explanation]) -> None:
    move = """<script>
      const slider = document.querySelector(".ch-opacity");
      slider.value = 25;
      slider.dispatchEvent(new Event("input", {bubbles: true}));
      document.title = getComputedStyle(document.querySelector(".ch-heat")).opacity;
    </script>"""
    document, _ = browser.open(f"<!doctype html><title></title><body>{html.fragment(image['generic'])}{move}")
    assert "<title>0.25</title>" in document


def test_a_step_that_is_chosen_is_shown_alone(browser: Browser) -> None:
    both = every()["source and prefix"]
    choose = """<script>
      const card = document.querySelector(".ch-card"), chips = card.querySelectorAll(".ch-chip");
      const look = () => [...card.querySelectorAll(".ch-stream .ch-u")].map((unit) => unit.title);
      const before = look();
      chips[1].click();
      const chosen = look(), shown = getComputedStyle(card.querySelector(".ch-of-step")).display;
      chips[1].click();
      const after = look(), hidden = getComputedStyle(card.querySelector(".ch-of-step")).display;
      document.title = JSON.stringify({chosen, shown, hidden, back: String(before) === String(after)});
    </script>"""
    document, _ = browser.open(f"<!doctype html><title></title><body>{html.fragment(both)}{choose}")
    found = json.loads(Page(document).inside("title")[0])
    wanted = [
        f"{wording.row_names(part)[1]} ← {unit}: {wording.number(float(part.matrix[1, i]), 3)}"
        for part in both.parts.values()
        if part.matrix is not None
        for i, unit in enumerate(map(name, part.tokens))
    ]
    assert found == {"chosen": wanted, "shown": "inline", "hidden": "none", "back": True}


def test_a_step_over_a_picture_takes_the_place_of_the_heat_map(browser: Browser) -> None:
    point = """<script>
      const heat = document.querySelector(".ch-views .ch-heat"), maps = document.querySelectorAll("figure[data-step]");
      const whole = heat.src, own = maps[2].querySelector("img").src;
      maps[2].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      const boxes = [...document.querySelectorAll(".ch-views .ch-box")].map((box) => getComputedStyle(box).display);
      const pointed = heat.src === own;
      maps[2].dispatchEvent(new PointerEvent("pointerout", {bubbles: true}));
      document.title = JSON.stringify([pointed, heat.src === whole, boxes.filter((shown) => shown !== "none").length]);
    </script>"""
    document, _ = browser.open(f"<!doctype html><title></title><body>{html.fragment(every()['objects'])}{point}")
    assert json.loads(Page(document).inside("title")[0]) == [True, True, 1]
