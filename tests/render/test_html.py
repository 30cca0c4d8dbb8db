"""Static pages, before any script has run: harmless, complete, and readable without scripts."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, from_dict, write_report
from clearhead.render import html, text_labels
from clearhead.render.text_layout import escape_invisible
from tests.render.conftest import Change, make_explanation
from tests.render.static_html import Page, assert_harmless


def test_hostile_input_is_escaped(hostile: Explanation) -> None:
    assert_harmless(html.render_explanations_page([hostile]))
    assert_harmless(html.render_explanations_page([hostile, replace(hostile, method="other")], title=hostile.method))
    assert_harmless(html.render_notebook_html(hostile))
    assert_harmless(html.render_notebook_html(Comparison({hostile.method: hostile, "other": hostile})))


def test_static_page_lists_units_and_scores_in_order(
    hostile: Explanation, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    for explanation in (hostile, *text.values(), *image.values()):
        page = Page(html.render_explanations_page([explanation]))
        expected = [text_labels.format_number(float(score)) for score in explanation.scores]
        cells, names = page.inside("td"), page.inside("bdi")
        assert any(cells[start : start + len(expected)] == expected for start in range(len(cells)))
        assert names[-len(explanation) :] == [
            text_labels.format_unit_label(explanation, i) for i in range(len(explanation))
        ]


def test_page_fetches_nothing_and_has_a_strict_content_policy(
    text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    page = html.render_explanations_page([*text.values(), *image.values()])
    assert_harmless(page)
    policy = next(str(m["content"]) for m in Page(page).all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy and "unsafe-eval" not in policy


def test_page_embeds_the_explanation(text: dict[str, Explanation], hostile: Explanation) -> None:
    for explanation in (*text.values(), hostile):
        (input_view,) = Page(html.render_explanations_page([explanation])).inputs
        document = input_view["cards"][0]["explanation"]
        reloaded = from_dict(document)
        assert (reloaded.scores.astype(explanation.scores.dtype) == explanation.scores).all()
        assert reloaded.units == explanation.units and document["target"] == explanation.to_dict()["target"]


def test_short_dict_has_only_significant_digits_and_null_for_nan() -> None:
    explanation = make_explanation(["a"], [0.1])
    assert explanation.to_dict(short=True)["scores"] == [0.1] != explanation.to_dict()["scores"]
    missing = replace(explanation, scores=np.array([np.nan], dtype=np.float32))
    assert missing.to_dict(short=True)["scores"] == [None]


def test_page_warns_about_truncation(truncated: Explanation) -> None:
    assert any("tokens were truncated" in part for part in Page(html.render_explanations_page([truncated])).inside("p"))
    assert not Page(html.render_explanations_page([make_explanation(["a"], [1.0])])).all("p", "ch-warning")


def test_notebook_fragments_have_no_ids_or_global_styles(text: dict[str, Explanation]) -> None:
    page = Page("".join(html.render_notebook_html(explanation) for explanation in text.values()))
    assert not [attributes for _, attributes in page.tags if "id" in attributes]
    rules = re.sub(r"/\*.*?\*/", "", page.inside("style")[0], flags=re.S)
    selectors = [s for part in re.findall(r"([^{}]+)\{", rules) if "@" not in part for s in part.split(",")]
    assert all(".clearhead" in s or ".ch-" in s for s in selectors)


def test_page_has_predictions_code_snippet_and_certificate(text: dict[str, Explanation]) -> None:
    explanation = text["input-x-gradient"]
    parsed = Page(html.render_explanations_page([explanation]))
    visible_text = " ".join(content for tag, content in parsed.texts if tag not in ("style", "script"))
    for row in explanation.prediction["top"]:
        assert row["label"] in visible_text and text_labels.format_percent(row["probability"]) in visible_text
    assert "import clearhead" in visible_text and text_labels.format_target_line(explanation) in visible_text
    card = parsed.inputs[0]["cards"][0]
    assert card["citation"] == explanation.provenance["citation"]
    assert ["dtype", explanation.certificate["dtype"]] in card["certificate"]


def test_degenerate_scores_are_rendered(
    change: Change, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    for explanation in (text["attcat"], image["attcat"]):
        page = html.render_explanations_page([change(explanation)])
        assert_harmless(page)
        scores = Page(page).inputs[0]["cards"][0]["explanation"]["scores"]
        finite = np.isfinite(change(explanation).scores)
        assert [score is not None for score in scores] == finite.tolist()


def test_empty_page_raises() -> None:
    with pytest.raises(InputError, match="nothing to show"):
        html.render_explanations_page([])


def test_regression_explanation_is_rendered(regression: Explanation) -> None:
    for page in (html.render_explanations_page([regression]), regression._repr_html_()):
        visible_text = " ".join(text for tag, text in Page(page).texts if tag not in ("style", "script"))
        for row in regression.prediction["top"]:
            assert row["label"] in visible_text and text_labels.format_number(row["logit"]) in visible_text
        assert "%" not in visible_text
        assert "the predicted value" in visible_text


def test_report_groups_explanations_by_input(
    text: dict[str, Explanation], image: dict[str, Explanation], pair: Explanation, tmp_path: Path
) -> None:
    for explanations in (
        [*text.values(), pair],
        [text, pair],
        {"a": [*text.values()], "b": pair},
        [Comparison(text), pair],
    ):
        page = Page(write_report(explanations, tmp_path / "all.html", title="All of it").read_text(encoding="utf-8"))
        assert page.inside("h1") == ["All of it"] == [page.document["title"]]
        assert [len(input_view["cards"]) for input_view in page.inputs] == [len(text), 1]
    write_report(pair, tmp_path / "one.html")
    for wrong in ("text", [1], None):
        with pytest.raises(InputError, match="expected explanations, but got a"):
            write_report(wrong, tmp_path / "lost.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.html", "one.html"]


def test_page_of_100_tokens_is_small() -> None:
    rng = np.random.default_rng(0)
    names = [f"token{i}" for i in range(100)]
    explanation = make_explanation(names, rng.normal(size=100), per_layer=rng.normal(size=(12, 100)).astype(np.float32))
    empty = len(html.render_explanations_page([make_explanation(["a"], [1.0])]).encode())
    assert empty < 100_000 and len(html.render_explanations_page([explanation]).encode()) < empty + 30_000


def test_page_of_1000_tokens_and_all_heads_is_below_3_megabytes() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(1000, 1000)),
        "per_layer": rng.normal(size=(12, 1000)),
        "per_head": rng.normal(size=(12, 12, 1000)),
    }
    names = [f"ordinary{i}" for i in range(1000)]
    page = html.render_explanations_page(
        [make_explanation(names, rng.normal(size=1000), **{key: array.astype("f4") for key, array in arrays.items()})]
    )
    assert len(page.encode()) < 3_000_000
    embedded = Page(page).inputs[0]["cards"][0]["streams"]["text"]["arrays"]
    assert {key: array["shape"] for key, array in embedded.items()} == {
        "matrix": [1000, 1000],
        "per_layer": [12, 1000],
        "per_head": [12, 12, 1000],
    }


def test_unit_labels_escape_invisible_characters(hostile: Explanation) -> None:
    (input_view,) = Page(html.render_explanations_page([hostile])).inputs
    assert input_view["streams"][0]["labels"] == [escape_invisible(token) for token in hostile.tokens]
