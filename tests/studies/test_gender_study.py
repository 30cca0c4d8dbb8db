"""Gender study from running text to the HTML page, with a tiny masked language model."""

import json

import numpy as np
import pytest

from clearhead.concepts.word_pairs import collect_occurrences
from clearhead.errors import InputError
from clearhead.render.reports.concepts import write_axis_report
from clearhead.studies.gender.axis_maps import compute_axis_maps
from clearhead.studies.gender.study import NUM_HELD_OUT_SENTENCES, run_axis_study
from clearhead.studies.gender.templates import BiasTemplate, PeopleSentence
from tests.models import explainer
from tests.render.static_html import Page

TEXTS = [
    f"{word} {verb} the {thing}."
    for word in ("he", "she", "the", "it")
    for verb in ("is", "like", "ha")
    for thing in ("book", "mov", "look", "on")
]
PAIRS = [("he", "she"), ("it", "and")]


@pytest.fixture(scope="module")
def study():
    sets = {
        "templates": [
            BiasTemplate(f"[MASK] is a {w} ne.", w, "[MASK] is a [MASK] ne.") for w in ("book", "look", "mov")
        ],
        "own words": [BiasTemplate("[MASK] like the book.", compared_words=("it", "the"))] * 2,
    }
    return run_axis_study(
        explainer("bert/mask"),
        TEXTS,
        PAIRS,
        sets,
        names=("m", "f"),
        sentences=("she is here.", "so [MASK] like <script>alert(1)</script>"),
        people=[PeopleSentence("the book is the mov.", "book", "mov")],
        normalise=False,
        num_sentences=30,
    )


def test_result_has_every_section_and_serialises_to_json(study):
    document = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert [line["layer"] for line in document["layers"]] == [0, 1, 2] and document["names"] == ["m", "f"]
    templates, own_words = study.set_results
    assert (
        templates.count == 3
        and templates.share.count == 3
        and templates.similarity.count == 3
        and templates.ranks["chance"] < 1
    )
    assert set(templates.pronouns) == {"", "densray", "hard", "conceptor"} and templates.pronouns[""]["bias"].count == 3
    assert own_words.share is None and own_words.pronouns[""]["bias"].count == 0 and own_words.ranks is None
    assert study.costs["densray"]["loss difference"].count > 0 and study.rank_comparison["attdr"].count > 0
    line = study.people_scores[0]
    assert line["dr difference"] == pytest.approx(line["dr subject"] - line["dr object"])


def test_rank_comparison_equals_mean_over_both_sentence_versions(study):
    """Reference: rank each version of the held-out sentences separately, then take the mean of both."""
    ex, held_out = explainer("bert/mask"), collect_occurrences(TEXTS, PAIRS, 30 + NUM_HELD_OUT_SENTENCES)
    held_out = held_out[len(held_out) - min(NUM_HELD_OUT_SENTENCES, len(held_out) // 5) :]
    means = []
    for occurrence in held_out:
        ranks = []
        for text in occurrence.texts:
            maps = compute_axis_maps(ex, study.directions, text)
            sums = np.abs(maps.dr.sum(0))
            listed = [i for i, token in enumerate(maps.tokens) if token in {"he", "she", "it", "and"}]
            ranks.append(max(1 / (1 + sum(total > sums[i] for total in sums)) for i in listed))
        means.append(sum(ranks) / 2)
    assert study.rank_comparison["dr"].count == len(held_out) and study.rank_comparison["dr"].mean == pytest.approx(
        np.mean(means)
    )


def test_changes_equal_after_minus_before(study):
    templates = study.set_results[0]
    change, p = templates.changes["hard"]
    assert change.mean == pytest.approx(templates.pronouns["hard"]["apart"].mean - templates.pronouns[""]["apart"].mean)
    assert 0 < p <= 1 and np.isfinite(change.mean)


def test_report_page_is_self_contained(study, tmp_path):
    page = write_axis_report(study, tmp_path / "gender.html").read_text("utf-8")
    views_by_heading = [
        (
            section["heading"],
            [plot["view"] for panel in section["children"] if panel["view"] == "panel" for plot in panel["children"]],
        )
        for section in Page(page).document["children"]
    ]
    assert (
        views_by_heading[0] == ("By layer", ["line_chart", "line_chart"])
        and views_by_heading[1][1] == ["bar_chart"]
        and views_by_heading[3][1] == ["bar_chart"] * 2
    )
    maps = {heading: views for heading, views in views_by_heading if heading.startswith("Maps: ")}
    two_maps = ["heat_map"] * 2  # DR and AttDR; with a mask there are four more
    assert list(maps.values()) == [two_maps + two_maps * 3, (two_maps * 3) * 2, two_maps * 3], maps
    assert Page(study._repr_html_()).document["children"] == Page(page).document["children"]
    for words in (
        "By layer",
        "Are AttCAT and DR similar?",
        "rank the listed words",
        "At the mask",
        "Cost of the removal",
    ):
        assert words in page
    page = page.replace("http://www.w3.org/", "")  # the namespace of SVG, not an address that is fetched
    assert "http://" not in page and "https://" not in page and "<script>alert" not in page
    assert "data:image/png" not in page  # the renderer draws


def test_invalid_requests_raise():
    with pytest.raises(InputError, match="is not a masked language model"):
        run_axis_study(explainer("bert/classify"), TEXTS, PAIRS, {})
    with pytest.raises(InputError, match="no sentence contains a word of the list"):
        run_axis_study(explainer("bert/mask"), ["the hen ran."], PAIRS, {})
    with pytest.raises(InputError, match="too few for 32 dimensions"):
        run_axis_study(explainer("bert/mask"), TEXTS[:4], PAIRS, {})
    with pytest.raises(InputError, match="unknown removal method 'soft'"):
        run_axis_study(explainer("bert/mask"), TEXTS, PAIRS, {}, removal_methods=("soft",), normalise=False)
