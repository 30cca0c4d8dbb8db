"""Word pairs of an axis (he–she …), and sentences that contain one of the words, with their counterfactuals.

The pairs are an input, so any axis works. The first words of all pairs form one class, the second words the other.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.adapters.readers.text import TokenizerWrapper
from clearhead.concepts.densray import Vectors
from clearhead.concepts.direction_validation import fit_with_held_out
from clearhead.concepts.directions import Directions, LayerIndex
from clearhead.concepts.hidden_states import Progress, compute_layer_states
from clearhead.concepts.layer_hooks import find_self_attention_calls, resolve_layer_index
from clearhead.engine.batching import with_progress
from clearhead.errors import InputError
from clearhead.explainer import Explainer

WordPair = tuple[str, str]

_GENDER_PAIRS_TEXT = """
    he/she him/her his/her himself/herself man/woman men/women boy/girl boys/girls father/mother fathers/mothers
    son/daughter sons/daughters brother/sister brothers/sisters husband/wife husbands/wives king/queen kings/queens
    prince/princess uncle/aunt nephew/niece grandfather/grandmother grandson/granddaughter gentleman/lady
    gentlemen/ladies lord/lady sir/madam actor/actress actors/actresses male/female males/females groom/bride dad/mom
    duke/duchess waiter/waitress hero/heroine boyfriend/girlfriend guy/gal
"""
#: Default pairs: masculine first, feminine second.
GENDER_PAIRS: tuple[WordPair, ...] = tuple(
    (a, b) for a, _, b in (pair.partition("/") for pair in _GENDER_PAIRS_TEXT.split())
)


@dataclass(frozen=True)
class PairOccurrence:
    """A sentence with a word of a pair, and its counterfactual with every occurrence of the word swapped.

    Attributes:
        texts: The sentence with the first and with the second word of the pair.
        words: The pair.
    """

    texts: WordPair
    words: WordPair

    def swap(self) -> "PairOccurrence":
        """Return the occurrence with the two sides exchanged.

        Returns:
            A new occurrence, with the second text and word first.
        """
        return PairOccurrence((self.texts[1], self.texts[0]), (self.words[1], self.words[0]))


def read_word_pairs(first_path: str | Path, second_path: str | Path | None = None) -> list[WordPair]:
    """Read word pairs from one file with both words on a line, or from two files with one word a line.

    A single file may be a table (.csv, .tsv), a JSON list of pairs, or text with a space between the two words.

    Args:
        first_path: The file of pairs, or of the first words.
        second_path: The file of the second words, line by line the partners of the first.

    Returns:
        The pairs, in lower case.

    Raises:
        InputError: A file does not exist, cannot be parsed, or contains no pair.
    """
    if second_path is None:
        rows = _parse_rows(Path(first_path), _read_lines(first_path))
        source = f"{str(first_path)!r} contains"
    else:
        columns = [_read_lines(first_path), _read_lines(second_path)]
        rows = [list(row) for row in zip(*columns, strict=False)]
        source = f"{str(first_path)!r} and {str(second_path)!r} contain"
    normalised = [[word.strip().casefold() for word in row] for row in rows]
    pairs = [(row[0], row[1]) for row in normalised if len(row) == 2 and all(row)]
    if not pairs:
        raise InputError(f"{source} no pair of words: write two words per line, or two files with one word per line")
    return pairs


def _read_lines(path: str | Path) -> list[str]:
    """Read a word list as UTF-8 (a byte-order mark is dropped) and split it into lines."""
    if not Path(path).is_file():
        raise InputError(f"there is no word list {str(path)!r}")
    return Path(path).read_text(encoding="utf-8-sig").split("\n")


def _parse_rows(path: Path, lines: list[str]) -> list[list[str]]:
    """Parse word pairs by the file's suffix: a JSON list, CSV, TSV, or columns separated by white space."""
    if path.suffix == ".json":
        try:
            return [list(map(str, row)) for row in json.loads("\n".join(lines))]
        except (ValueError, TypeError) as problem:
            raise InputError(f"{str(path)!r} is not a JSON list of word pairs ({problem})") from None
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix)
    if delimiter is None:
        return [line.split() for line in lines]
    return list(csv.reader(lines, delimiter=delimiter))


def select_single_token_pairs(explainer: Explainer, pairs: Iterable[WordPair]) -> list[WordPair]:
    """Select the pairs whose two words are each a single token of the model: only these have one vector.

    Args:
        explainer: Explainer of a model that reads text.
        pairs: The candidate pairs.

    Returns:
        The pairs without duplicates, in their order.

    Raises:
        InputError: No pair has both words in the vocabulary.
    """
    candidates = list(pairs)
    usable = [
        pair for pair in candidates if pair[0] != pair[1] and all(is_single_token(explainer, word) for word in pair)
    ]
    if not usable:
        raise InputError(
            f"none of {len(candidates)} word pairs has both words in the vocabulary of {explainer.adapter.name}"
        )
    return list(dict.fromkeys(usable))


def is_single_token(explainer: Explainer, word: str) -> bool:
    """Whether a word is a single token of the model's vocabulary.

    Args:
        explainer: Explainer of the model.
        word: The word, without a space in front.

    Returns:
        Whether the word is one token, with a space in front or without, and not the unknown token.

    Raises:
        InputError: The model takes no text.
    """
    return _find_token_id(explainer, word) is not None


def _find_token_id(explainer: Explainer, word: str, at_start: bool = False) -> int | None:
    """The token of a word inside a sentence, or at its start: byte-level BPE has two different tokens."""
    tokenizer_wrapper = _get_tokenizer_wrapper(explainer)
    spellings = [word]
    if not at_start:
        spellings.insert(0, f" {word}")
    for spelling in spellings:
        ids = tokenizer_wrapper.call_tokenizer("encode", spelling, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != getattr(tokenizer_wrapper.tokenizer, "unk_token_id", None):
            return int(ids[0])
    return None


def _get_tokenizer_wrapper(explainer: Explainer) -> TokenizerWrapper:
    """Return the adapter's tokenizer wrapper; a model that takes no text raises `InputError`."""
    tokenizer_wrapper = getattr(explainer.adapter, "tokenizer_wrapper", None)
    if not isinstance(tokenizer_wrapper, TokenizerWrapper):
        raise InputError(f"{explainer.adapter.name} does not take text, which an axis of words requires")
    return tokenizer_wrapper


def iter_occurrences(texts: Iterable[str], pairs: Sequence[WordPair], max_words: int = 60) -> Iterator[PairOccurrence]:
    """Yield the sentences that contain a word of either side; of several words, the first one counts.

    Args:
        texts: Texts, which are split into sentences.
        pairs: The word pairs; a word of several pairs is swapped with its first partner.
        max_words: Longer sentences are skipped.

    Yields:
        The sentence and its counterfactual.
    """
    partners: dict[str, tuple[str, bool]] = {}
    for a, b in reversed(pairs):  # earlier pairs overwrite later ones
        partners[a] = (b, False)
        partners[b] = (a, True)
    pattern = re.compile(r"\w+")
    for text in texts:
        for sentence in re.split(r"(?<=[.!?])\s+", text.casefold()):
            word = next((word for word in pattern.findall(sentence) if word in partners), None)
            if word is None or len(sentence.split()) > max_words:
                continue
            partner, is_second = partners[word]
            swapped = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", partner, sentence)
            occurrence = PairOccurrence((sentence, swapped), (word, partner))
            yield occurrence.swap() if is_second else occurrence


def collect_occurrences(texts: Iterable[str], pairs: Sequence[WordPair], max_occurrences: int) -> list[PairOccurrence]:
    """Collect occurrences of the pairs, no pair more than twice its share, so that pronouns do not dominate.

    Args:
        texts: Texts, which are split into sentences.
        pairs: The word pairs.
        max_occurrences: Maximum number of occurrences.

    Returns:
        The occurrences, in the order of the texts.

    Raises:
        InputError: No sentence contains a word of the list.
    """
    max_per_pair = max(1, 2 * max_occurrences // len(pairs))
    occurrences: list[PairOccurrence] = []
    pair_counts = dict.fromkeys(pairs, 0)
    for occurrence in iter_occurrences(texts, pairs):
        if pair_counts.setdefault(occurrence.words, 0) < max_per_pair:
            pair_counts[occurrence.words] += 1
            occurrences.append(occurrence)
            if len(occurrences) == max_occurrences:
                break
    if not occurrences:
        raise InputError(f"no sentence contains a word of the list ({', '.join(a for a, _ in pairs[:8])} …)")
    return occurrences


@dataclass(frozen=True)
class AxisVectors:
    """The vectors of both sides of an axis, pair by pair, at each layer.

    Attributes:
        by_layer: The vectors of the first and of the second side, by layer.
        first_groups: For each vector of the first side, the group of words that is held out as a unit.
        second_groups: The same for the second side; None if they are those of the first.
    """

    by_layer: dict[LayerIndex, tuple[Vectors, Vectors]]
    first_groups: list[str]
    second_groups: list[str] | None = None

    @property
    def groups(self) -> tuple[list[str], list[str]]:
        """The groups of both sides."""
        return self.first_groups, self.second_groups or self.first_groups


def compute_axis_vectors(
    explainer: Explainer,
    occurrences: Sequence[PairOccurrence],
    layers: Sequence[LayerIndex] | None = None,
    *,
    batch_size: int = 32,
    progress: Progress = False,
) -> AxisVectors:
    """Compute the hidden states of the pair words in their sentences and in the counterfactual sentences.

    Args:
        explainer: Explainer of a model that reads text.
        occurrences: Sentences with words of the pairs.
        layers: Layers whose output is read, from 0; default: all layers.
        batch_size: Number of sentences in a pass.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        The vectors by layer; occurrences whose word is cut off or split into several tokens are skipped.

    Raises:
        InputError: No word is a single token of its sentence, or a layer does not exist.
    """
    num_layers = len(find_self_attention_calls(explainer))
    if layers is None:
        layers = range(num_layers)
    layer_indices = [resolve_layer_index(layer, num_layers) for layer in layers]
    # chunks bound the memory: the states of all units of a chunk are kept at once
    chunks = [list(occurrences[start : start + 256]) for start in range(0, len(occurrences), 256)]
    sides: list[list[torch.Tensor | None]] = [[], []]
    for chunk in with_progress(chunks, progress):
        for side in (0, 1):
            sides[side] += compute_word_vectors(explainer, chunk, side, layer_indices, batch_size)
    complete = [i for i in range(len(occurrences)) if all(side[i] is not None for side in sides)]
    if not complete:
        raise InputError(
            "none of the listed words is a single token in its sentence: check the pairs with "
            "select_single_token_pairs(explainer, pairs)"
        )
    stacked = [torch.stack([side[i] for i in complete]) for side in sides]  # type: ignore[misc]
    by_layer = {layer: (stacked[0][:, column], stacked[1][:, column]) for column, layer in enumerate(layer_indices)}
    pairs = [occurrences[i].words for i in complete]
    group_names = group_joined_pairs(pairs)
    return AxisVectors(by_layer, [group_names[a] for a, _ in pairs])


def fit_axis_directions(
    explainer: Explainer,
    occurrences: Sequence[PairOccurrence],
    layers: Sequence[LayerIndex] | None = None,
    names: WordPair = ("first", "second"),
    *,
    normalise: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    few: bool = False,
    progress: Progress = False,
) -> Directions:
    """Fit DensRay at every layer, tested on held-out groups of words.

    Args:
        explainer: Explainer of a model that reads text.
        occurrences: Sentences with words of the pairs.
        layers: Layers whose output is read, from 0; default: all layers.
        names: Names of the two sides of the axis.
        normalise: Use only the direction of each pair's difference.
        batch_size: Number of sentences in a pass.
        seed: Seed of the held-out split.
        few: Allow fewer vectors than dimensions.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        The directions by layer, with held-out metrics.

    Raises:
        InputError: Too few vectors, no usable word, or a layer that does not exist.
    """
    vectors = compute_axis_vectors(explainer, occurrences, layers, batch_size=batch_size, progress=progress)
    return fit_directions(vectors, names, normalise=normalise, seed=seed, few=few)


def fit_directions(vectors: AxisVectors, names: WordPair = ("first", "second"), **fit_kwargs: Any) -> Directions:
    """Fit a direction at every layer, each tested on held-out groups of words.

    Args:
        vectors: The vectors of both sides, by layer.
        names: Names of the two sides of the axis.
        **fit_kwargs: Options of `fit_with_held_out`; find= sets another function than DensRay.

    Returns:
        The directions by layer, with held-out metrics.
    """
    return Directions(
        {
            layer: fit_with_held_out(*sets, groups=vectors.groups, names=names, **fit_kwargs)
            for layer, sets in vectors.by_layer.items()
        }
    )


def compute_word_vectors(
    explainer: Explainer,
    occurrences: Sequence[PairOccurrence],
    side: int,
    layers: Sequence[LayerIndex],
    batch_size: int,
) -> "list[torch.Tensor | None]":
    """Compute the states (layer × model) of the first occurrence of the word; None where it is not a single token.

    Args:
        explainer: Explainer of a model that reads text.
        occurrences: Sentences with words of the pairs.
        side: 0 for the first words of the pairs, 1 for the second.
        layers: Layers whose output is read, from 0.
        batch_size: Number of sentences in a pass.
    """
    texts = [occurrence.texts[side] for occurrence in occurrences]
    layer_states = compute_layer_states(explainer, texts, layers, batch_size=batch_size)
    vectors: list[torch.Tensor | None] = []
    for occurrence, states in zip(occurrences, layer_states, strict=True):
        position = find_word_position(explainer, states.sample.inputs["input_ids"], occurrence.words[side])
        if position is None:
            vectors.append(None)
        else:
            vectors.append(torch.stack([states.states[layer][position] for layer in layers]))
    return vectors


def find_word_position(explainer: Explainer, ids: torch.Tensor, word: str) -> int | None:
    """Find the first position of a word that is a single token; None if there is none."""
    token_id = _find_token_id(explainer, word)
    if token_id is not None:
        positions = (ids == token_id).nonzero().flatten().tolist()
        if positions:
            return int(positions[0])
    start_token_id = _find_token_id(explainer, word, at_start=True)
    if start_token_id is not None:  # after the first positions, this token is a subword of another word
        for position in (0, 1):
            if position < len(ids) and ids[position] == start_token_id:
                return position
    return None


def group_joined_pairs(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Group texts that pairs connect, directly or through others (his–her, him–her).

    Args:
        pairs: The pairs.

    Returns:
        The name of its group, by text.
    """
    root: dict[str, str] = {}

    def find(text: str) -> str:
        while root.setdefault(text, text) != text:
            text = root[text]
        return text

    for a, b in pairs:
        root[find(a)] = find(b)
    return {text: find(text) for text in list(root)}
