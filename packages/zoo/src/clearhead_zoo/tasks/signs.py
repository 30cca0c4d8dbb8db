"""Read the word on the red sign: an image has one, among signs of other colours with other words and loose shapes.

A sign is a plate with a word of three letters, one in each cell. The twelve words are all combinations of two first
letters, three vowels and two last letters, so that each letter is needed: with one of them hidden, two or three words
remain, equally probable. The mark needs no cells of its own, because each letter stands on the colour of its plate. So
the evidence is the three cells of the red sign. The words of the other signs, red shapes and all positions are drawn
without regard to the label.

>>> example = make_examples(5, seed=0)[4]
>>> example.label, example.evidence, len(example.distractors)
('bud', (53, 54, 55), 12)
>>> example.image.size
(96, 96)
"""

from __future__ import annotations

from itertools import product

import numpy as np

from clearhead_zoo.tasks import make_generator
from clearhead_zoo.tasks.cells import (
    GRID_SIZE,
    KINDS,
    LEFT_END,
    MIDDLE,
    NO_PLATE,
    NUM_CELLS,
    RIGHT_END,
    CellExample,
    CellScenes,
    make_example,
    make_scenes,
)
from clearhead_zoo.tasks.shapes import COLOUR_RGB, COLOURS, SHAPES, Booleans, Floats, Integers

__all__ = ["LABELS", "compute_targets", "make_examples", "sample_scenes"]

#: The letters that each place of a word can have.
LETTER_CHOICES = ("bh", "aiu", "dt")
LABELS = tuple("".join(letters) for letters in product(*LETTER_CHOICES))
WORD_LENGTH = len(LETTER_CHOICES)
#: The kinds of the letters of each word (words × places).
WORD_KINDS = np.array([[KINDS.index(letter.upper()) for letter in word] for word in LABELS])
READ_COLOUR = COLOURS.index("red")
MIN_SIGNS, MAX_SIGNS = 3, 4
MIN_SHAPES, MAX_SHAPES = 3, 8
#: Letters are dark on the bright colours and bright on the others.
DARK_INK, BRIGHT_INK, MIN_BRIGHT_PLATE = 30, 235, 120


def sample_scenes(rng: np.random.Generator, labels: Integers) -> CellScenes:
    """Scenes whose red sign has these words (indices into LABELS)."""
    rows = len(labels)
    row_indices = np.arange(rows)[:, None]
    # the first sign is the red one; no two are in the same row of the grid
    lines = rng.random((rows, GRID_SIZE)).argsort(axis=1)[:, :MAX_SIGNS]
    starts = lines * GRID_SIZE + rng.integers(GRID_SIZE - WORD_LENGTH + 1, size=lines.shape)
    words = np.concatenate([labels[:, None], rng.integers(len(LABELS), size=(rows, MAX_SIGNS - 1))], axis=1)
    other_colours = (READ_COLOUR + 1 + rng.integers(len(COLOURS) - 1, size=words.shape)) % len(COLOURS)
    sign_colours = np.where(np.arange(MAX_SIGNS) == 0, READ_COLOUR, other_colours)
    is_present = np.arange(MAX_SIGNS) < rng.integers(MIN_SIGNS, MAX_SIGNS + 1, (rows, 1))

    kind = np.full((rows, NUM_CELLS), -1)
    plate, plate_colour = np.full_like(kind, NO_PLATE), np.zeros_like(kind)
    for sign in range(MAX_SIGNS):
        rows_with_sign = np.flatnonzero(is_present[:, sign])[:, None]
        place = starts[rows_with_sign, sign] + np.arange(WORD_LENGTH)
        kind[rows_with_sign, place] = WORD_KINDS[words[rows_with_sign[:, 0], sign]]
        plate[rows_with_sign, place] = (LEFT_END, MIDDLE, RIGHT_END)
        plate_colour[rows_with_sign, place] = sign_colours[rows_with_sign, sign]
    is_evidence = np.zeros(kind.shape, dtype=bool)
    is_evidence[row_indices, starts[:, :1] + np.arange(WORD_LENGTH)] = True

    order = np.where(plate == NO_PLATE, rng.random(kind.shape), 2.0).argsort(axis=1).argsort(axis=1)
    is_shape = order < rng.integers(MIN_SHAPES, MAX_SHAPES + 1, (rows, 1))
    kind = np.where(is_shape, rng.integers(len(SHAPES), size=kind.shape), kind)
    colour = rng.integers(len(COLOURS), size=kind.shape)
    brightness = np.array(COLOUR_RGB) @ (0.3, 0.59, 0.11)
    ink = np.where(brightness[plate_colour] >= MIN_BRIGHT_PLATE, DARK_INK, BRIGHT_INK)
    return make_scenes(rng, kind, colour, is_evidence, plate, plate_colour, ink)


def compute_targets(scenes: CellScenes, hidden: Booleans) -> Floats:
    """The distribution of the label (rows × labels) given the cells that are not hidden.

    Words that agree with the letters that can be seen on the red sign are equally probable.
    """
    visible = np.where(scenes.is_evidence & ~hidden, scenes.kind, -1)
    is_possible = np.ones((len(scenes), len(LABELS)), dtype=bool)
    for place in range(WORD_LENGTH):
        # no letter can stand at two places, so a letter tells its place
        letters = WORD_KINDS[:, place]
        seen = (visible[:, :, None] == np.unique(letters)).any(axis=1)
        is_match = (visible[:, :, None] == letters).any(axis=1)
        is_possible &= is_match | ~seen.any(axis=1, keepdims=True)
    return np.asarray(is_possible / is_possible.sum(axis=1, keepdims=True), dtype=np.float32)


def make_examples(count: int, seed: int, split: str = "held-out") -> list[CellExample]:
    """Images with the twelve words in turn; each depends on the seed, the split and its index alone."""
    examples = []
    for index in range(count):
        word = index % len(LABELS)
        scene = sample_scenes(make_generator(seed, split, index), np.array([word]))
        examples.append(make_example(f"signs-{split}-{seed}-{index}", scene, LABELS[word]))
    return examples
