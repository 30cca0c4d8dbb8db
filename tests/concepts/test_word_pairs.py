"""Word pairs and sentences: matching, swapping, and the order of the two sides."""

import pytest

from clearhead.concepts.word_pairs import (
    GENDER_PAIRS,
    collect_occurrences,
    fit_axis_directions,
    iter_occurrences,
    read_word_pairs,
    select_single_token_pairs,
)
from clearhead.errors import InputError
from tests.models import explainer

PAIRS = [("he", "she"), ("his", "her"), ("him", "her")]


def test_every_occurrence_is_swapped_and_first_words_come_first():
    (first, second) = iter_occurrences(["She said she would. It is here.", "He left his hat."], PAIRS)
    assert first.texts == ("he said he would.", "she said she would.") and first.words == ("he", "she")
    assert second.texts == ("he left his hat.", "she left his hat.")


def test_substrings_of_words_do_not_match():
    with pytest.raises(InputError, match="no sentence contains a word of the list"):
        collect_occurrences(["the heron shed a tear"], PAIRS, 10)


def test_default_gender_pairs_are_unique():
    assert (
        ("he", "she") in GENDER_PAIRS
        and all(len(set(pair)) == 2 for pair in GENDER_PAIRS)
        and len(set(GENDER_PAIRS)) == len(GENDER_PAIRS)
    )


def test_occurrences_of_a_pair_are_capped():
    result = collect_occurrences(["he is here."] * 50 + ["his hat."] * 50, PAIRS, 30)
    assert {occurrence.words for occurrence in result} == {("he", "she"), ("his", "her")}


def test_pairs_from_two_files(tmp_path):
    (tmp_path / "a").write_text("He\nking\n\n")
    (tmp_path / "b").write_text("she\nQueen\n\n")
    assert read_word_pairs(tmp_path / "a", tmp_path / "b") == [("he", "she"), ("king", "queen")]
    with pytest.raises(InputError, match="there is no word list"):
        read_word_pairs(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.tsv", "He\tshe\nking\tqueen\n"),
        ("pairs.csv", "he,she\nking,queen"),
        ("pairs.txt", "he she\n\nking queen\nlonely\n"),
        ("pairs.json", '[["he", "she"], ["king", "queen"]]'),
    ],
)
def test_pairs_from_one_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_word_pairs(tmp_path / name) == [("he", "she"), ("king", "queen")]
    (tmp_path / name).write_text("[]")
    with pytest.raises(InputError, match=r"contains no pair of words: write two words per line"):
        read_word_pairs(tmp_path / name)


def test_pairs_outside_the_vocabulary_are_dropped():
    ex = explainer("bert/mask")
    assert select_single_token_pairs(ex, [("he", "she"), ("king", "queen")]) == [("he", "she")]
    with pytest.raises(InputError, match="none of 1 word pairs has both words"):
        select_single_token_pairs(ex, [("king", "queen")])


def test_directions_point_to_the_first_words():
    ex = explainer("bert/mask")
    texts = [
        f"{word} {verb} the {thing}."
        for word in ("he", "she", "the", "it")
        for verb in ("is", "like")
        for thing in ("book", "mov", "hat", "on")
    ]
    result = collect_occurrences(texts, [("he", "she"), ("the", "it")], 100)
    directions = fit_axis_directions(ex, result, [0, 2], names=("a", "b"), normalise=False)
    assert list(directions) == [0, 2] and directions[0].names == ("a", "b")
    assert directions[2].counts[0] == directions[2].counts[1] == len(result)
    # two pairs, one of them held out: the direction of one is tested on the other
    assert directions[0].held_out_metrics.count < 2 * len(result)
