"""From running text to a page: a tiny masked language model, an axis of one's own."""

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
def found():
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


def test_everything_is_there_and_goes_into_json(found):
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [line["layer"] for line in plain["layers"]] == [0, 1, 2] and plain["names"] == ["m", "f"]
    one, other = found.set_results
    assert one.count == 3 and one.share.count == 3 and one.similarity.count == 3 and one.ranks["chance"] < 1
    assert set(one.pronouns) == {"", "densray", "hard", "conceptor"} and one.pronouns[""]["bias"].count == 3
    assert other.share is None and other.pronouns[""]["bias"].count == 0 and other.ranks is None
    assert found.costs["densray"]["loss difference"].count > 0 and found.rank_comparison["attdr"].count > 0
    line = found.people_scores[0]
    assert line["dr difference"] == pytest.approx(line["dr subject"] - line["dr object"])


def test_listed_words_are_ranked_in_both_versions_of_a_sentence(found):
    """A slow replica: the sentences that were kept apart, each version by itself, then the mean of both."""
    ex, apart = explainer("bert/mask"), collect_occurrences(TEXTS, PAIRS, 30 + NUM_HELD_OUT_SENTENCES)
    apart = apart[len(apart) - min(NUM_HELD_OUT_SENTENCES, len(apart) // 5) :]
    means = []
    for one in apart:
        ranks = []
        for text in one.texts:
            own = compute_axis_maps(ex, found.directions, text)
            sums = np.abs(own.dr.sum(0))
            listed = [i for i, token in enumerate(own.tokens) if token in {"he", "she", "it", "and"}]
            ranks.append(max(1 / (1 + sum(other > sums[i] for other in sums)) for i in listed))
        means.append(sum(ranks) / 2)
    assert found.rank_comparison["dr"].count == len(apart) and found.rank_comparison["dr"].mean == pytest.approx(
        np.mean(means)
    )


def test_what_changes_is_after_minus_before(found):
    one = found.set_results[0]
    change, p = one.changes["hard"]
    assert change.mean == pytest.approx(one.pronouns["hard"]["apart"].mean - one.pronouns[""]["apart"].mean)
    assert 0 < p <= 1 and np.isfinite(change.mean)


def test_the_page_stands_alone(found, tmp_path):
    page = write_axis_report(found, tmp_path / "gender.html").read_text("utf-8")
    drawn = [
        (
            part["heading"],
            [plot["view"] for panel in part["parts"] if panel["view"] == "panel" for plot in panel["parts"]],
        )
        for part in Page(page).document["parts"]
    ]
    assert drawn[0] == ("By layer", ["curves", "curves"]) and drawn[1][1] == ["bars"] and drawn[3][1] == ["bars"] * 2
    maps = {heading: views for heading, views in drawn if heading.startswith("Maps: ")}
    one = ["map"] * 2  # DR and AttDR; with a mask there are four more
    assert list(maps.values()) == [one + one * 3, (one * 3) * 2, one * 3], maps
    assert Page(found._repr_html_()).document["parts"] == Page(page).document["parts"]
    for said in ("By layer", "Is AttCAT like DR?", "rank the listed words", "At the mask", "What removing costs"):
        assert said in page
    page = page.replace("http://www.w3.org/", "")  # the name of SVG, not an address that is asked
    assert "http://" not in page and "https://" not in page and "<script>alert" not in page
    assert "data:image/png" not in page  # the renderer draws


def test_bad_requests():
    with pytest.raises(InputError, match="is not a masked language model"):
        run_axis_study(explainer("bert/classify"), TEXTS, PAIRS, {})
    with pytest.raises(InputError, match="no sentence contains a word of the list"):
        run_axis_study(explainer("bert/mask"), ["the hen ran."], PAIRS, {})
    with pytest.raises(InputError, match="fewer than their 32 dimensions"):
        run_axis_study(explainer("bert/mask"), TEXTS[:4], PAIRS, {})
    with pytest.raises(InputError, match="unknown removal method 'soft'"):
        run_axis_study(explainer("bert/mask"), TEXTS, PAIRS, {}, removal_methods=("soft",), normalise=False)
