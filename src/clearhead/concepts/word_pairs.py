"""Word pairs of an axis (he–she …), and sentences that hold one of them, with their counterfactuals.

Any axis will do: pairs are an input. The first words of all pairs are one class, the second ones the other.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.adapters.readers.text import Words
from clearhead.concepts.densray import Vectors
from clearhead.concepts.direction_validation import held_out
from clearhead.concepts.directions import Directions
from clearhead.concepts.hidden_states import Progress, states_of
from clearhead.concepts.layer_hooks import layer_number, own_calls
from clearhead.engine.batching import followed
from clearhead.errors import InputError
from clearhead.explainer import Explainer

Pair = tuple[str, str]

_GENDER = """
    he/she him/her his/her himself/herself man/woman men/women boy/girl boys/girls father/mother fathers/mothers
    son/daughter sons/daughters brother/sister brothers/sisters husband/wife husbands/wives king/queen kings/queens
    prince/princess uncle/aunt nephew/niece grandfather/grandmother grandson/granddaughter gentleman/lady
    gentlemen/ladies lord/lady sir/madam actor/actress actors/actresses male/female males/females groom/bride dad/mom
    duke/duchess waiter/waitress hero/heroine boyfriend/girlfriend guy/gal
"""
#: Pairs for those who bring none: masculine first, feminine second.
GENDER: tuple[Pair, ...] = tuple((a, b) for a, _, b in (pair.partition("/") for pair in _GENDER.split()))


@dataclass(frozen=True)
class Occurrence:
    """A sentence with a word of a pair, and the same sentence with the other one in every place of it."""

    texts: Pair
    words: Pair

    def first_last(self) -> "Occurrence":
        return Occurrence((self.texts[1], self.texts[0]), (self.words[1], self.words[0]))


def read_pairs(first: str | Path, second: str | Path | None = None) -> list[Pair]:
    """Word pairs: two files with one word a line, line by line a pair; or one file with both words on a line.

    One file may be a table (.csv, .tsv), a JSON list of pairs, or text with a space between the two words.
    """
    columns = [_lines(path) for path in (first, second) if path is not None]
    rows = [list(row) for row in zip(*columns, strict=False)] if second is not None else _rows(Path(first), columns[0])
    plain = [[word.strip().casefold() for word in row] for row in rows]
    pairs = [(row[0], row[1]) for row in plain if len(row) == 2 and all(row)]
    if not pairs:
        named = f"{str(first)!r} and {str(second)!r} hold" if second is not None else f"{str(first)!r} holds"
        raise InputError(f"{named} no pair of words: give two words a line, or two files with one word a line")
    return pairs


def _lines(path: str | Path) -> list[str]:
    if not Path(path).is_file():
        raise InputError(f"there is no word list {str(path)!r}")
    return Path(path).read_text(encoding="utf-8-sig").split("\n")


def _rows(path: Path, lines: list[str]) -> list[list[str]]:
    if path.suffix == ".json":
        try:
            return [list(map(str, row)) for row in json.loads("\n".join(lines))]
        except (ValueError, TypeError) as problem:
            raise InputError(f"{str(path)!r} is no list of word pairs in JSON ({problem})") from None
    separator = {".csv": ",", ".tsv": "\t"}.get(path.suffix)
    return [line.split() for line in lines] if separator is None else list(csv.reader(lines, delimiter=separator))


def known_pairs(ex: Explainer, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs whose two words are one piece each of the model's vocabulary: only these have one vector."""
    given = list(pairs)
    known = [pair for pair in given if pair[0] != pair[1] and all(is_one_piece(ex, word) for word in pair)]
    if not known:
        raise InputError(f"of {len(given)} word pairs none has both words in the vocabulary of {ex.subject.name}")
    return list(dict.fromkeys(known))


def is_one_piece(ex: Explainer, word: str) -> bool:
    return _piece(ex, word) is not None


def _piece(ex: Explainer, word: str, begins: bool = False) -> int | None:
    """The one token that a word is inside a sentence, or where it `begins` one; byte-level BPE has two for it."""
    words = _words(ex)
    for written in (word,) if begins else (f" {word}", word):
        ids = words.ask("encode", written, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != getattr(words.tokenizer, "unk_token_id", None):
            return int(ids[0])
    return None


def _words(ex: Explainer) -> Words:
    words = getattr(ex.subject, "words", None)
    if not isinstance(words, Words):
        raise InputError(f"{ex.subject.name} reads no text, and an axis of words needs a model that does")
    return words


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


@dataclass(frozen=True)
class AxisVectors:
    """At each layer, the vectors of both sides, pair by pair; families: what may not be torn apart when some are held
    out, for each vector of the first side, and of the second if these are others.
    """

    by_layer: dict[int, tuple[Vectors, Vectors]]
    families: list[str]
    others: list[str] | None = None

    @property
    def groups(self) -> tuple[list[str], list[str]]:
        return self.families, self.others or self.families


def axis_vectors(
    ex: Explainer,
    found: Sequence[Occurrence],
    layers: Sequence[int] | None = None,
    *,
    batch_size: int = 32,
    progress: Progress = False,
) -> AxisVectors:
    """The states of the listed words at every layer (h^1 … h^L), in their sentences and in the counterfactual ones."""
    count = len(own_calls(ex))
    wanted = list(range(1, count + 1)) if layers is None else [layer_number(layer, count) for layer in layers]
    parts = [list(found[start : start + 256]) for start in range(0, len(found), 256)]  # states of all units are many
    sides: list[list[torch.Tensor | None]] = [[], []]
    for part in followed(parts, progress):
        for side in (0, 1):
            sides[side] += word_vectors(ex, part, side, wanted, batch_size)
    there = [i for i in range(len(found)) if all(side[i] is not None for side in sides)]
    if not there:
        raise InputError("no listed word is one token of its sentence: check the pairs with known_pairs(ex, pairs)")
    stacked = [torch.stack([side[i] for i in there]) for side in sides]  # type: ignore[misc]
    by_layer = {layer: (stacked[0][:, place], stacked[1][:, place]) for place, layer in enumerate(wanted)}
    pairs = [found[i].words for i in there]
    names = families(pairs)
    return AxisVectors(by_layer, [names[a] for a, _ in pairs])


def axis_directions(
    ex: Explainer,
    found: Sequence[Occurrence],
    layers: Sequence[int] | None = None,
    names: Pair = ("first", "second"),
    *,
    normalise: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    few: bool = False,
    progress: Progress = False,
) -> Directions:
    """DensRay at every layer (h^1 … h^L), tested on words that it was not found with."""
    vectors = axis_vectors(ex, found, layers, batch_size=batch_size, progress=progress)
    return directions_of(vectors, names, normalise=normalise, seed=seed, few=few)


def directions_of(vectors: AxisVectors, names: Pair = ("first", "second"), **how: Any) -> Directions:
    """The direction of every layer, each tested on families of words that it was not found with.

    how: as in `held_out`; find= for another function than DensRay
    """
    return Directions(
        {layer: held_out(*sets, groups=vectors.groups, names=names, **how) for layer, sets in vectors.by_layer.items()}
    )


def word_vectors(
    ex: Explainer, found: Sequence[Occurrence], side: int, layers: Sequence[int], batch_size: int
) -> "list[torch.Tensor | None]":
    """layer × model of the first place of the word; None where it is cut off, or no token by itself."""
    vectors: list[torch.Tensor | None] = []
    states = states_of(ex, [one.texts[side] for one in found], layers, batch_size=batch_size)
    for one, own in zip(found, states, strict=True):
        place = place_of(ex, own.sample.inputs["input_ids"], one.words[side])
        vectors.append(None if place is None else torch.stack([own.states[layer][place] for layer in layers]))
    return vectors


def place_of(ex: Explainer, ids: torch.Tensor, word: str) -> int | None:
    inside, first = _piece(ex, word), _piece(ex, word, begins=True)
    places = [] if inside is None else (ids == inside).nonzero().flatten().tolist()
    if not places and first is not None:  # elsewhere than at the beginning it is a piece of another word
        places = [place for place in (0, 1) if place < len(ids) and ids[place] == first]
    return places[0] if places else None


def families(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """One name for all that pairs join, in one step or several (his–her, him–her): by text, the name of its family."""
    root: dict[str, str] = {}

    def find(text: str) -> str:
        while root.setdefault(text, text) != text:
            text = root[text]
        return text

    for a, b in pairs:
        root[find(a)] = find(b)
    return {text: find(text) for text in list(root)}
