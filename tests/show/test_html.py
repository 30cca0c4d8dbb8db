import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, from_dict, report
from clearhead.show import html, wording
from clearhead.show.layout import name
from tests.show.conftest import Change, made


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            found for kind, found in self.tags if kind == tag and class_ in ["", *(found.get("class") or "").split()]
        ]

    def inside(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]


def outside_addresses(page: str) -> list[str]:
    """Everything in a page that would make a browser fetch something."""
    parsed = Page(page)
    loaded = [
        str(attributes[key])
        for _, attributes in parsed.tags
        for key in ("src", "href", "srcset", "data", "poster", "action", "xlink:href", "background")
        if key in attributes
    ]
    styles = [str(found["style"]) for _, found in parsed.tags if found.get("style")] + parsed.inside("style")
    loaded += re.findall(r"(?:url\(|@import)\s*(\S+)", "\n".join(styles))
    return [address for address in loaded if not address.startswith("data:image/")]


def assert_harmless(page: str, scripts: int = 1) -> None:
    parsed = Page(page)
    assert not parsed.open
    running = [found for found in parsed.all("script") if found.get("type") != "application/json"]
    assert len(running) == scripts
    assert not [key for _, found in parsed.tags for key in found if key.startswith("on")]
    assert not {tag for tag, _ in parsed.tags} & {"svg", "iframe", "object", "link", "base", "form", "a"}
    assert outside_addresses(page) == []
    assert "\x00" not in page and "\x1b" not in page and "\u202e" not in page
    page.encode()


def test_a_hostile_input_comes_out_as_text(nasty: Explanation) -> None:
    assert_harmless(html.page([nasty]))
    assert_harmless(html.page([nasty, replace(nasty, method="other")], title=nasty.method))
    assert_harmless(html.fragment(nasty))
    assert_harmless(html.fragment_of_comparison(Comparison({nasty.method: nasty, "other": nasty})))


def test_every_unit_is_there_in_order_with_its_raw_score(nasty: Explanation, text: dict[str, Explanation]) -> None:
    for explanation in (nasty, *text.values()):
        found = [str(span["title"]) for span in Page(html.page([explanation])).all("span", "ch-u")]
        assert found == [wording.hover(explanation, place) for place in range(len(explanation))]
        assert [hover.rpartition(": ")[0] for hover in found] == [name(unit) for unit in explanation.tokens]


def test_scores_are_text(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (*text.values(), *image.values()):
        cells = Page(html.page([explanation])).inside("td")
        full = html.cards.largest(explanation)
        wanted = [wording.aligned(float(score), full) for score in explanation.scores]
        at = next(i for i in range(len(cells)) if cells[i : i + len(wanted)] == wanted)
        assert at >= 0


def test_the_text_keeps_its_spaces_and_lines(text: dict[str, Explanation], pair: Explanation) -> None:
    explanation = text["generic"]
    shown = re.search(r'<p class="ch-text".*?</p>', html.page([explanation]), re.S)
    assert shown is not None
    special = [name for name, flag in zip(explanation.tokens, explanation.units.special, strict=True) if flag]
    plain = "".join(part for _, part in Page(shown.group()).texts if part not in special)
    assert plain == explanation.units.texts[0]
    assert len(Page(html.page([pair])).all("p", "ch-text")) == 2


def test_a_page_asks_for_nothing_and_allows_nothing(
    text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    page = html.page([*text.values(), *image.values()])
    assert_harmless(page)
    policy = next(str(m["content"]) for m in Page(page).all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy and "unsafe-eval" not in policy


def test_the_explanation_itself_is_in_the_page(text: dict[str, Explanation], nasty: Explanation) -> None:
    for explanation in (*text.values(), nasty):
        (data,) = [part for where, part in Page(html.page([explanation])).texts if where == "script" and part[0] == "{"]
        read: dict[str, Any] = json.loads(data)
        again = from_dict(read)
        assert (again.scores.astype(explanation.scores.dtype) == explanation.scores).all()
        assert again.units == explanation.units and read["target"] == explanation.to_dict()["target"]


def test_numbers_are_no_longer_than_their_precision() -> None:
    explanation = made(["a"], [0.1])
    assert explanation.to_dict(short=True)["scores"] == [0.1] != explanation.to_dict()["scores"]
    gap = replace(explanation, scores=np.array([np.nan], dtype=np.float32))
    assert gap.to_dict(short=True)["scores"] == [None]


def test_what_was_cut_off_is_said(cut: Explanation) -> None:
    page = Page(html.page([cut]))
    assert any("tokens were cut off" in part for part in page.inside("p"))
    assert len(page.all("span", "ch-cut")) == 1
    assert not Page(html.page([made(["a"], [1.0])])).all("p", "ch-warn")


def test_methods_on_one_input_stand_together(text: dict[str, Explanation], pair: Explanation) -> None:
    page = Page(html.page([*text.values(), pair]))
    assert len(page.all("section", "ch-input")) == 2
    assert len(page.all("table", "ch-agree")) == 1
    assert len(page.all("article")) == 4
    assert "How far the methods agree" in page.inside("h3")


def test_the_same_method_for_two_targets_is_told_apart() -> None:
    one = made(["a", "b"], [1.0, 2.0])
    other = replace(one, target={**one.target, "name": "no"})
    assert list(html.labelled([one, other])) == ["made-up of yes", "made-up of no"]
    assert list(html.labelled([one, one])) == ["made-up", "made-up (2)"]
    assert Page(html.page([one, other])).inside("h1") == ["Why?"]


def test_two_fragments_do_not_clash(text: dict[str, Explanation]) -> None:
    fragments = [html.fragment(explanation) for explanation in text.values()]
    both = Page("".join(fragments))
    assert not [found for _, found in both.tags if "id" in found]
    rules = re.sub(r"/\*.*?\*/", "", both.inside("style")[0], flags=re.S)
    selectors = [s for part in re.findall(r"([^{}]+)\{", rules) if "@" not in part for s in part.split(",")]
    assert all(".clearhead" in s or ".ch-" in s for s in selectors)


def test_what_else_a_page_says(text: dict[str, Explanation]) -> None:
    explanation = text["input-x-gradient"]
    page = html.page([explanation])
    parsed = Page(page)
    said = " ".join(part for _, part in parsed.texts)
    for row in explanation.prediction["top"]:
        assert row["label"] in said and wording.percent(row["probability"]) in said
    assert explanation.provenance["citation"] in said and explanation.certificate["dtype"] in said
    assert "import clearhead" in said and wording.target_line(explanation) in said


def test_layers_are_drawn_where_there_are_any(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    generic = text["generic"]
    assert len(Page(html.page([generic])).all("table", "ch-map")) == 1
    assert not Page(html.page([text["input-x-gradient"]])).all("table", "ch-map")
    maps = Page(html.page([image["generic"]]))
    assert [part for part in maps.inside("figcaption") if part.startswith("layer ")] == [
        "layer 0",
        "layer 1",
        "layer 2",
    ]


def test_a_picture_has_a_slider_and_every_patch(image: dict[str, Explanation]) -> None:
    explanation = image["generic"]
    page = Page(html.page([explanation]))
    assert len(page.all("input", "ch-opacity")) == 1
    cells = [str(found["title"]) for found in page.all("i") if "title" in found]
    assert cells == [wording.hover(explanation, int(place)) for place in explanation.units.drop_special()]


def test_anything_can_be_shown(change: Change, text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (text["attcat"], image["attcat"]):
        changed = change(explanation)
        page = html.page([changed])
        assert_harmless(page)
        missing = np.isnan(changed.scores[changed.units.drop_special()])
        assert ("chn" in re.sub(r"<style>.*?</style>", "", page, flags=re.S)) == bool(missing.any())


def test_a_hundred_tokens_stay_small() -> None:
    rng = np.random.default_rng(0)
    names = [f"token{i}" for i in range(100)]
    explanation = made(names, rng.normal(size=100), per_layer=rng.normal(size=(12, 100)).astype(np.float32))
    assert len(html.page([explanation]).encode()) < 150_000


def test_an_empty_page_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to show"):
        html.page([])


def test_the_slider_begins_at_nothing(image: dict[str, Explanation]) -> None:
    (slider,) = Page(html.page([image["generic"]])).all("input", "ch-opacity")
    assert (slider["min"], slider["max"]) == ("0", "100")


def test_a_measuring_model_is_shown(regression: Explanation) -> None:
    for page in (html.page([regression]), regression._repr_html_()):
        said = " ".join(part for where, part in Page(page).texts if where not in ("style", "script"))
        for row in regression.prediction["top"]:
            assert row["label"] in said and wording.number(row["logit"]) in said
        assert "%" not in said
        assert "what the model measures" in said


def test_several_explanations_on_one_page(
    text: dict[str, Explanation], image: dict[str, Explanation], pair: Explanation, tmp_path: Path
) -> None:
    for given in ([*text.values(), pair], [text, pair], {"a": [*text.values()], "b": pair}, [Comparison(text), pair]):
        path = report(given, tmp_path / "all.html", title="All of it")
        page = Page(path.read_text(encoding="utf-8"))
        assert page.inside("h1") == ["All of it"] and len(page.all("section", "ch-input")) == 2
        assert len(page.all("article", "ch-card")) == len(text) + 1
    report(pair, tmp_path / "one.html")
    for wrong in ("text", [1], None):
        with pytest.raises(InputError, match="expected explanations, but got a"):
            report(wrong, tmp_path / "lost.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.html", "one.html"]


def test_layers_have_the_numbers_that_the_model_gives_them(text: dict[str, Explanation]) -> None:
    e = text["generic"]
    later = replace(e, provenance={**e.provenance, "layers": [3, 6]})
    assert "layer" in Page(html.page([later])).inside("th")
    rows = re.search(r'<table class="ch-map">.*?</table>', html.page([later]), re.S)
    assert rows is not None and re.findall(r'<th scope="row">(\d)</th>', rows.group()) == ["3", "4", "5"]
