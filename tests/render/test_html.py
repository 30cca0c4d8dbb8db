"""Pages as files, before any script has run: harmless, complete, and readable without a script."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, from_dict, write_report
from clearhead.render import html, text_labels
from clearhead.render.text_layout import escape_invisible
from tests.render.conftest import Change, made
from tests.render.static_html import Page, assert_harmless


def test_a_hostile_input_comes_out_as_text(nasty: Explanation) -> None:
    assert_harmless(html.render_explanations_page([nasty]))
    assert_harmless(html.render_explanations_page([nasty, replace(nasty, method="other")], title=nasty.method))
    assert_harmless(html.render_notebook_html(nasty))
    assert_harmless(html.render_notebook_html(Comparison({nasty.method: nasty, "other": nasty})))


def test_without_a_script_every_unit_is_there_in_order_with_its_score(
    nasty: Explanation, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    for explanation in (nasty, *text.values(), *image.values()):
        page = Page(html.render_explanations_page([explanation]))
        wanted = [text_labels.format_number(float(score)) for score in explanation.scores]
        cells, names = page.inside("td"), page.inside("bdi")
        assert any(cells[at : at + len(wanted)] == wanted for at in range(len(cells)))
        assert names[-len(explanation) :] == [
            text_labels.format_unit_label(explanation, i) for i in range(len(explanation))
        ]


def test_a_page_asks_for_nothing_and_allows_nothing(
    text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    page = html.render_explanations_page([*text.values(), *image.values()])
    assert_harmless(page)
    policy = next(str(m["content"]) for m in Page(page).all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy and "unsafe-eval" not in policy


def test_the_explanation_itself_is_in_the_page(text: dict[str, Explanation], nasty: Explanation) -> None:
    for explanation in (*text.values(), nasty):
        (given,) = Page(html.render_explanations_page([explanation])).inputs
        read = given["cards"][0]["explanation"]
        again = from_dict(read)
        assert (again.scores.astype(explanation.scores.dtype) == explanation.scores).all()
        assert again.units == explanation.units and read["target"] == explanation.to_dict()["target"]


def test_numbers_are_no_longer_than_their_precision() -> None:
    explanation = made(["a"], [0.1])
    assert explanation.to_dict(short=True)["scores"] == [0.1] != explanation.to_dict()["scores"]
    gap = replace(explanation, scores=np.array([np.nan], dtype=np.float32))
    assert gap.to_dict(short=True)["scores"] == [None]


def test_what_was_cut_off_is_said(cut: Explanation) -> None:
    assert any("tokens were truncated" in part for part in Page(html.render_explanations_page([cut])).inside("p"))
    assert not Page(html.render_explanations_page([made(["a"], [1.0])])).all("p", "ch-warn")


def test_two_fragments_do_not_clash(text: dict[str, Explanation]) -> None:
    both = Page("".join(html.render_notebook_html(explanation) for explanation in text.values()))
    assert not [found for _, found in both.tags if "id" in found]
    rules = re.sub(r"/\*.*?\*/", "", both.inside("style")[0], flags=re.S)
    selectors = [s for part in re.findall(r"([^{}]+)\{", rules) if "@" not in part for s in part.split(",")]
    assert all(".clearhead" in s or ".ch-" in s for s in selectors)


def test_what_else_a_page_says(text: dict[str, Explanation]) -> None:
    explanation = text["input-x-gradient"]
    parsed = Page(html.render_explanations_page([explanation]))
    plain = " ".join(part for where, part in parsed.texts if where not in ("style", "script"))
    for row in explanation.prediction["top"]:
        assert row["label"] in plain and text_labels.format_percent(row["probability"]) in plain
    assert "import clearhead" in plain and text_labels.format_target_line(explanation) in plain
    card = parsed.inputs[0]["cards"][0]
    assert card["citation"] == explanation.provenance["citation"]
    assert ["dtype", explanation.certificate["dtype"]] in card["certificate"]


def test_anything_can_be_shown(change: Change, text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (text["attcat"], image["attcat"]):
        page = html.render_explanations_page([change(explanation)])
        assert_harmless(page)
        scores = Page(page).inputs[0]["cards"][0]["explanation"]["scores"]
        finite = np.isfinite(change(explanation).scores)
        assert [score is not None for score in scores] == finite.tolist()


def test_an_empty_page_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to show"):
        html.render_explanations_page([])


def test_a_measuring_model_is_shown(regression: Explanation) -> None:
    for page in (html.render_explanations_page([regression]), regression._repr_html_()):
        said = " ".join(part for where, part in Page(page).texts if where not in ("style", "script"))
        for row in regression.prediction["top"]:
            assert row["label"] in said and text_labels.format_number(row["logit"]) in said
        assert "%" not in said
        assert "the predicted value" in said


def test_several_explanations_on_one_page(
    text: dict[str, Explanation], image: dict[str, Explanation], pair: Explanation, tmp_path: Path
) -> None:
    for given in ([*text.values(), pair], [text, pair], {"a": [*text.values()], "b": pair}, [Comparison(text), pair]):
        page = Page(write_report(given, tmp_path / "all.html", title="All of it").read_text(encoding="utf-8"))
        assert page.inside("h1") == ["All of it"] == [page.document["title"]]
        assert [len(one["cards"]) for one in page.inputs] == [len(text), 1]
    write_report(pair, tmp_path / "one.html")
    for wrong in ("text", [1], None):
        with pytest.raises(InputError, match="expected explanations, but got a"):
            write_report(wrong, tmp_path / "lost.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.html", "one.html"]


def test_a_hundred_tokens_stay_small() -> None:
    rng = np.random.default_rng(0)
    names = [f"token{i}" for i in range(100)]
    explanation = made(names, rng.normal(size=100), per_layer=rng.normal(size=(12, 100)).astype(np.float32))
    empty = len(html.render_explanations_page([made(["a"], [1.0])]).encode())
    assert empty < 100_000 and len(html.render_explanations_page([explanation]).encode()) < empty + 30_000


def test_a_thousand_tokens_and_every_head_stay_below_three_megabytes() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(1000, 1000)),
        "per_layer": rng.normal(size=(12, 1000)),
        "per_head": rng.normal(size=(12, 12, 1000)),
    }
    names = [f"ordinary{i}" for i in range(1000)]
    page = html.render_explanations_page(
        [made(names, rng.normal(size=1000), **{key: part.astype("f4") for key, part in arrays.items()})]
    )
    assert len(page.encode()) < 3_000_000
    kept = Page(page).inputs[0]["cards"][0]["streams"]["text"]["arrays"]
    assert {key: part["shape"] for key, part in kept.items()} == {
        "matrix": [1000, 1000],
        "layers": [12, 1000],
        "heads": [12, 12, 1000],
    }


def test_names_have_nothing_invisible_in_them(nasty: Explanation) -> None:
    (given,) = Page(html.render_explanations_page([nasty])).inputs
    assert given["streams"][0]["labels"] == [escape_invisible(token) for token in nasty.tokens]
