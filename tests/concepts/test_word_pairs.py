"""Word pairs and sentences: what is found, how it is swapped, and which side is which."""

import pytest

from clearhead.concepts.word_pairs import GENDER, axis_directions, collect, known_pairs, occurrences, read_pairs
from clearhead.errors import InputError
from tests.models import explainer

PAIRS = [("he", "she"), ("his", "her"), ("him", "her")]


def test_every_occurrence_is_swapped_and_the_first_word_comes_first():
    (one, two) = occurrences(["She said she would. It is here.", "He left his hat."], PAIRS)
    assert one.texts == ("he said he would.", "she said she would.") and one.words == ("he", "she")
    assert two.texts == ("he left his hat.", "she left his hat.")


def test_parts_of_words_are_not_words():
    with pytest.raises(InputError, match="no sentence holds a word of the list"):
        collect(["the heron shed a tear"], PAIRS, 10)


def test_pairs_that_come_with_it():
    assert ("he", "she") in GENDER and all(len(set(pair)) == 2 for pair in GENDER) and len(set(GENDER)) == len(GENDER)


def test_frequent_pairs_do_not_crowd_out_the_others():
    found = collect(["he is here."] * 50 + ["his hat."] * 50, PAIRS, 30)
    assert {one.words for one in found} == {("he", "she"), ("his", "her")}


def test_pairs_from_files(tmp_path):
    (tmp_path / "a").write_text("He\nking\n\n")
    (tmp_path / "b").write_text("she\nQueen\n\n")
    assert read_pairs(tmp_path / "a", tmp_path / "b") == [("he", "she"), ("king", "queen")]
    with pytest.raises(InputError, match="there is no word list"):
        read_pairs(tmp_path / "a", tmp_path / "c")


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
    assert read_pairs(tmp_path / name) == [("he", "she"), ("king", "queen")]
    (tmp_path / name).write_text("[]")
    with pytest.raises(InputError, match=r"holds no pair of words: give two words a line"):
        read_pairs(tmp_path / name)


def test_pairs_that_the_vocabulary_does_not_have():
    ex = explainer("bert/mask")
    assert known_pairs(ex, [("he", "she"), ("king", "queen")]) == [("he", "she")]
    with pytest.raises(InputError, match="of 1 word pairs none has both words"):
        known_pairs(ex, [("king", "queen")])


def test_directions_point_to_the_first_words():
    ex = explainer("bert/mask")
    texts = [
        f"{word} {verb} the {thing}."
        for word in ("he", "she", "the", "it")
        for verb in ("is", "like")
        for thing in ("book", "mov", "hat", "on")
    ]
    found = collect(texts, [("he", "she"), ("the", "it")], 100)
    directions = axis_directions(ex, found, [1, 3], names=("a", "b"), normalise=False)
    assert list(directions) == [1, 3] and directions[1].names == ("a", "b")
    assert directions[3].counts[0] == directions[3].counts[1] == len(found)
    # two pairs, one of them held out: what was found with the one is tested on the other
    assert directions[1].tested.count < 2 * len(found)
