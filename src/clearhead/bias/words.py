"""Word pairs of an axis (he–she …), and sentences that hold one of them, with their counterfactuals.

Any axis will do: pairs are an input. The first words of all pairs are one class, the second ones the other.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.concepts.densray import held_out
from clearhead.concepts.directions import Directions
from clearhead.concepts.layers import layer_number, own_calls
from clearhead.concepts.states import states_of
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.subjects.words import Words

Pair = tuple[str, str]


@dataclass(frozen=True)
class Occurrence:
    """A sentence with a word of a pair, and the same sentence with the other one in every place of it."""

    texts: Pair
    words: Pair

    def first_last(self) -> "Occurrence":
        return Occurrence((self.texts[1], self.texts[0]), (self.words[1], self.words[0]))


def read_pairs(first: str | Path, second: str | Path) -> list[Pair]:
    """Two files with one word a line, line by line a pair."""
    columns = []
    for path in (first, second):
        if not Path(path).is_file():
            raise InputError(f"there is no word list {str(path)!r}")
        columns.append(Path(path).read_text(encoding="utf-8").split("\n"))
    left, right = ([line.strip().casefold() for line in column] for column in columns)
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a and b]
    if not pairs:
        raise InputError(f"{str(first)!r} and {str(second)!r} hold no pair of words")
    return pairs


def known_pairs(ex: Explainer, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs whose two words are one piece each of the model's vocabulary: only these have one vector."""
    given = list(pairs)
    words: Words = ex.subject.words  # type: ignore[attr-defined]

    def single(word: str) -> bool:
        ids = words.ask("encode", word, add_special_tokens=False)
        return len(ids) == 1 and ids[0] != getattr(words.tokenizer, "unk_token_id", None)

    known = [pair for pair in given if pair[0] != pair[1] and all(map(single, pair))]
    if not known:
        raise InputError(f"of {len(given)} word pairs none has both words in the vocabulary of {ex.subject.name}")
    return list(dict.fromkeys(known))


def occurrences(texts: Iterable[str], pairs: Sequence[Pair], longest: int = 60) -> Iterator[Occurrence]:
    """Sentences with one of the words, first words and second ones alike; the first of its pairs counts.

    longest: sentences of more words are left out
    """
    other: dict[str, tuple[str, bool]] = {}
    for a, b in reversed(pairs):  # a word of several pairs goes with its first partner
        other[a], other[b] = (b, False), (a, True)
    pattern = re.compile(r"\w+")
    for text in texts:
        for sentence in re.split(r"(?<=[.!?])\s+", text.casefold()):
            found = [word for word in pattern.findall(sentence) if word in other]
            if not found or len(sentence.split()) > longest:
                continue
            word = found[0]
            partner, second = other[word]
            swapped = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", partner, sentence)
            one = Occurrence((sentence, swapped), (word, partner))
            yield one.first_last() if second else one


def collect(texts: Iterable[str], pairs: Sequence[Pair], count: int) -> list[Occurrence]:
    """So many occurrences, none more often than twice its share: pronouns are not all there is."""
    most = max(1, 2 * count // len(pairs))
    found: list[Occurrence] = []
    seen = dict.fromkeys(pairs, 0)
    for one in occurrences(texts, pairs):
        if seen.setdefault(one.words, 0) < most:
            seen[one.words] += 1
            found.append(one)
            if len(found) == count:
                break
    if not found:
        raise InputError(f"no sentence holds a word of the list ({', '.join(a for a, _ in pairs[:8])} …)")
    return found


def axis_directions(
    ex: Explainer,
    found: Sequence[Occurrence],
    layers: Sequence[int] | None = None,
    names: Pair = ("first", "second"),
    *,
    normalise: bool = True,
    batch_size: int = 32,
    seed: int = 0,
) -> Directions:
    """DensRay at every layer (h^1 … h^L), tested on words that it was not found with."""
    count = len(own_calls(ex))
    wanted = list(range(1, count + 1)) if layers is None else [layer_number(layer, count) for layer in layers]
    sides = [word_vectors(ex, found, side, wanted, batch_size) for side in (0, 1)]
    there = [i for i in range(len(found)) if all(side[i] is not None for side in sides)]
    if not there:
        raise InputError("no listed word is one token of its sentence: check the pairs with known_pairs(ex, pairs)")
    families = _families([found[i].words for i in there])
    directions = {}
    for place, layer in enumerate(wanted):
        first, second = (torch.stack([side[i][place] for i in there]) for side in sides)  # type: ignore[index]
        directions[layer] = held_out(
            first, second, groups=(families, families), names=names, normalise=normalise, seed=seed
        )
    return Directions(directions)


def word_vectors(
    ex: Explainer, found: Sequence[Occurrence], side: int, layers: Sequence[int], batch_size: int
) -> "list[torch.Tensor | None]":
    """layer × model of the first place of the word; None where it is cut off, or no token by itself."""
    vectors: list[torch.Tensor | None] = []
    for start in range(0, len(found), 512):  # so that the states of all units need not be kept at once
        part = found[start : start + 512]
        states = states_of(ex, [one.texts[side] for one in part], layers, batch_size=batch_size)
        for one, own in zip(part, states, strict=True):
            place = place_of(ex, own.sample.inputs["input_ids"], one.words[side])
            vectors.append(None if place is None else torch.stack([own.states[layer][place] for layer in layers]))
    return vectors


def place_of(ex: Explainer, ids: torch.Tensor, word: str) -> int | None:
    (wanted,) = ex.subject.words.ask("encode", word, add_special_tokens=False)[:1] or [None]  # type: ignore[attr-defined]
    places = (ids == wanted).nonzero().flatten().tolist()
    return places[0] if places else None


def _families(pairs: Sequence[Pair]) -> list[str]:
    """Pairs that share a word (his–her, him–her) belong together: one name for each family."""
    root: dict[str, str] = {}

    def find(word: str) -> str:
        while root.setdefault(word, word) != word:
            word = root[word]
        return word

    for a, b in pairs:
        root[find(a)] = find(b)
    return [find(a) for a, _ in pairs]
