"""How many red circles are there? Each image has one to six of them, among other shapes and circles of other colours.

The evidence is the cells of the red circles. Each of them is needed: with one of them hidden the right answer is one
less. The other objects, their number and their places are drawn without regard to the label.

>>> example = make_examples(5, seed=0)[4]
>>> example.label, example.evidence, len(example.distractors)
('5', (6, 26, 40, 47, 60), 8)
>>> example.image.size
(96, 96)
"""

from __future__ import annotations

import numpy as np

from clearhead_zoo.tasks import make_generator
from clearhead_zoo.tasks.cells import NUM_CELLS, CellExample, CellScenes, make_example, make_scenes
from clearhead_zoo.tasks.shapes import COLOURS, SHAPES, Booleans, Floats, Integers

__all__ = ["LABELS", "compute_targets", "make_examples", "sample_scenes"]

MAX_COUNT = 6
#: An image whose red circles are all hidden has none.
LABELS = tuple(str(number) for number in range(MAX_COUNT + 1))
COUNTED_COLOUR, COUNTED_SHAPE = COLOURS.index("red"), SHAPES.index("circle")
MIN_DISTRACTORS, MAX_DISTRACTORS = 4, 12


def sample_scenes(rng: np.random.Generator, labels: Integers) -> CellScenes:
    """Scenes with so many red circles (an index into LABELS is the count)."""
    rows = len(labels)
    order = rng.random((rows, NUM_CELLS)).argsort(axis=1).argsort(axis=1)
    is_counted = order < labels[:, None]
    num_distractors = rng.integers(MIN_DISTRACTORS, MAX_DISTRACTORS + 1, (rows, 1))
    is_distractor = ~is_counted & (order < labels[:, None] + num_distractors)
    # a third of the other objects are red, another third are circles
    shared_property = rng.integers(3, size=order.shape)
    other_colour = (COUNTED_COLOUR + 1 + rng.integers(len(COLOURS) - 1, size=order.shape)) % len(COLOURS)
    other_shape = (COUNTED_SHAPE + 1 + rng.integers(len(SHAPES) - 1, size=order.shape)) % len(SHAPES)
    colour = np.where(is_counted | (shared_property == 0), COUNTED_COLOUR, other_colour)
    shape = np.where(is_counted | (shared_property == 1), COUNTED_SHAPE, other_shape)
    return make_scenes(rng, np.where(is_counted | is_distractor, shape, -1), colour, is_counted)


def compute_targets(scenes: CellScenes, hidden: Booleans) -> Floats:
    """The distribution of the label (rows × labels) given the cells that are not hidden: all on the visible count."""
    count = (scenes.is_evidence & ~hidden).sum(axis=1)
    return np.eye(len(LABELS), dtype=np.float32)[count]


def make_examples(count: int, seed: int, split: str = "held-out") -> list[CellExample]:
    """Images with 1 to 6 red circles in turn; each depends on the seed, the split and its index alone."""
    examples = []
    for index in range(count):
        number = 1 + index % MAX_COUNT
        scene = sample_scenes(make_generator(seed, split, index), np.array([number]))
        examples.append(make_example(f"counting-{split}-{seed}-{index}", scene, LABELS[number]))
    return examples
