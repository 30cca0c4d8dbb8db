"""Movie-review texts for `sentiment` and `rationale`, with held-out data excluded from all training data.

SST-2 and the polarity and subjectivity sentences have a common source, so a sentence of a test file can occur in
another file with different spelling: everything close to a held-out sentence is dropped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from clearhead.bench.data import CharSpan, load_benchmark_dataset

LABELS = ["NEGATIVE", "POSITIVE"]
LabelledText = tuple[str, int]
#: The label of a text that has none.
UNLABELLED = -1
MIN_SENTENCE_WORDS = 12


@dataclass(frozen=True)
class Review:
    """A movie review, one sentence a line, and the passages that people marked as evidence for its label."""

    text: str
    label: int
    passages: tuple[str, ...]

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()


def read_reviews(data: Path, split: str) -> list[Review]:
    """ERASER's movie reviews; the reader keeps the validation reviews out of the training ones."""
    found = []
    for example in load_benchmark_dataset("eraser-movies", split, data):
        pieces = [piece for group in example.evidence or () for piece in group if isinstance(piece, CharSpan)]
        passages = (" ".join(example.input[piece.start : piece.stop].split()) for piece in pieces)
        assert isinstance(example.label, int)
        found.append(Review(example.input, example.label, tuple(dict.fromkeys(passages))))
    return found


def read_labelled(name: str, split: str, data: Path) -> list[LabelledText]:
    return [
        (example.input, example.label)
        for example in load_benchmark_dataset(name, split, data)
        if isinstance(example.label, int)
    ]


def normalise_letters(text: str) -> str:
    """Only letters and digits, without accents: equal for two spellings or tokenisations of one sentence."""
    return re.sub(r"[^a-z0-9]", "", unicodedata.normalize("NFKD", text.lower()))


def split_word_set(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", unicodedata.normalize("NFKD", text.lower())))


def tokenize_like_sst(text: str) -> str:
    """SST splits clitics off ("it 's", "do n't"); the polarity data do not."""
    return re.sub(
        r"\s+", " ", re.sub(r"n't\b", " n't", re.sub(r"(?<=\w)('(?:s|re|ve|ll|d|m)\b)", r" \1", text))
    ).strip()


class HeldOutFilter:
    """Sentences that training must not see, not even retold with other punctuation or a word or two changed."""

    def __init__(self, sentences: Iterable[str]) -> None:
        sentences = list(sentences)
        self.normalised_sentences = {normalise_letters(sentence) for sentence in sentences}
        bags = [bag for bag in map(split_word_set, sentences) if len(bag) > 4]
        self.sentence_sizes = np.array([len(bag) for bag in bags])
        places: dict[str, list[int]] = {}
        for place, bag in enumerate(bags):
            for word in bag:
                places.setdefault(word, []).append(place)
        self.sentences_by_word = {word: np.array(found) for word, found in places.items()}

    def contains_similar(self, text: str) -> bool:
        """The same letters, or most of the words of either one: catches cut, joined and re-spelt versions.

        >>> held_out = HeldOutFilter(["one of the year 's best films , if not the best ."])
        >>> [held_out.contains_similar(f"one of the {end}") for end in ("year's best films", "worst films")]
        [True, False]
        """
        if normalise_letters(text) in self.normalised_sentences:
            return True
        bag = split_word_set(text)
        hits = [self.sentences_by_word[word] for word in bag if word in self.sentences_by_word]
        if len(bag) <= 4 or not hits:
            return False
        shared = np.bincount(np.concatenate(hits), minlength=len(self.sentence_sizes))
        return bool((shared > 0.7 * np.minimum(self.sentence_sizes, len(bag))).any())


@dataclass(frozen=True)
class SentimentData:
    """What sentiment is learned from (`examples`, and texts without a label) and what decides between candidates."""

    examples: list[LabelledText]
    unlabelled: list[str]
    dev: list[LabelledText]
    sentences: list[LabelledText]

    @cached_property
    def long_dev_examples(self) -> list[LabelledText]:
        """The longer half of what decides: the test file has whole sentences, dev.tsv mostly short phrases."""
        return [example for example in self.dev if len(example[0].split()) >= MIN_SENTENCE_WORDS] + self.sentences


def read_sentiment(data: Path, held_out: int, seed: int) -> SentimentData:
    """SST-2's training phrases, sentences of the polarity set, product reviews and marked passages.

    Held out are the test file, dev.tsv and `held_out` sentences of the polarity set that SST-2 does not train on.
    """
    test = [text for text, _ in read_labelled("sst2", "test", data)]
    dev = read_labelled("sst2", "validation", data)
    in_dev, near_test, in_test = (
        {normalise_letters(text) for text, _ in dev},
        HeldOutFilter(test),
        {normalise_letters(text) for text in test},
    )
    phrases = [
        example for example in read_labelled("sst2", "train", data) if normalise_letters(example[0]) not in in_test
    ]
    known = in_dev | {normalise_letters(text) for text, _ in phrases}
    polar = [
        (tokenize_like_sst(text), label)
        for text, label in read_labelled("rt-polarity", "all", data)
        if normalise_letters(text) not in known and not near_test.contains_similar(text)
    ]
    order = np.random.default_rng(seed).permutation(len(polar))
    sentences = [polar[place] for place in order[:held_out]]
    near = HeldOutFilter(text for text, _ in sentences)
    passages = [
        (text, review.label)
        for review in read_reviews(data, "train")
        for text in review.passages
        if has_usable_length(text)
    ]
    extra = [polar[place] for place in order[held_out:]] + read_labelled("custrev", "all", data) + passages
    examples = [example for example in phrases if not near.contains_similar(example[0])]
    examples += [
        example
        for example in extra
        if not near.contains_similar(example[0]) and not near_test.contains_similar(example[0])
    ]
    return SentimentData(examples, read_unlabelled(data, near_test, near, known), dev, sentences)


def read_unlabelled(data: Path, near_test: HeldOutFilter, near: HeldOutFilter, known: set[str]) -> list[str]:
    """Sentences of the training reviews and of the subjectivity set, as far as they are new and not held out."""
    lines = [line.strip() for review in read_reviews(data, "train") for line in review.text.splitlines()]
    lines += [tokenize_like_sst(text) for text, _ in read_labelled("subj", "all", data)]
    fresh = (text for text in dict.fromkeys(lines) if has_usable_length(text) and normalise_letters(text) not in known)
    return [text for text in fresh if not near_test.contains_similar(text) and not near.contains_similar(text)]


def has_usable_length(text: str) -> bool:
    return 3 <= len(text.split()) <= 60


def repeat_whole_sentences(examples: Sequence[LabelledText]) -> list[LabelledText]:
    """Most phrases are short; whole sentences are what people ask about, so these count twice."""
    return [*examples, *(example for example in examples if len(example[0].split()) >= MIN_SENTENCE_WORDS)]
