"""Tasks with ground-truth evidence: each generator returns texts together with the pieces that decide the label.

Pure Python and numpy. Every example is a function of (seed, split), and the examples of two splits are disjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["TaskExample", "join_words", "make_generator", "make_text_examples", "replace_spans"]

SPLITS = ("train", "held-out")
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TaskExample:
    """A text in pieces (words, or letters), its label, and the pieces that decide the label.

    Attributes:
        id: Name of the example, unique within its task.
        text: The text.
        spans: Start and stop of each piece in the text, in characters.
        label: The label.
        witnesses: Every minimal set of positions that is sufficient for the label; a single empty set if the label is
            the same whatever is kept, because nothing in the text is evidence against it.
        question_positions: Positions that specify the question (a queried key, the name of a rule): always needed,
            never evidence.
    """

    id: str
    text: str
    spans: tuple[Span, ...]
    label: str
    witnesses: tuple[tuple[int, ...], ...]
    question_positions: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The pieces of the text, which positions number from 0."""
        return tuple(self.text[start:end] for start, end in self.spans)

    @property
    def evidence(self) -> tuple[int, ...]:
        """Positions that belong to some witness, in order."""
        return tuple(sorted({position for witness in self.witnesses for position in witness}))

    @property
    def evidence_spans(self) -> tuple[Span, ...]:
        """The same in characters of the text."""
        return tuple(self.spans[position] for position in self.evidence)

    def sample_control_positions(self, rng: np.random.Generator) -> tuple[int, ...]:
        """As many other positions as there are in the evidence (fewer, if the text has no more), drawn at random."""
        taken = {*self.evidence, *self.question_positions}
        free = [position for position in range(len(self.spans)) if position not in taken]
        count = min(len(free), len(self.evidence))
        return tuple(sorted(int(position) for position in rng.permutation(free)[:count]))


def make_generator(seed: int, split: str, step: int = 0) -> np.random.Generator:
    """The random numbers of one split; training asks for those of a step, so that a resumed run sees what comes next.

    >>> [int(make_generator(0, split).integers(1000)) for split in SPLITS]
    [850, 522]
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not known; there are: {', '.join(SPLITS)}")
    return np.random.default_rng([seed, SPLITS.index(split), step])


def join_words(words: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Words as one text, and where each of them stands in it.

    >>> join_words(["k7", "v12"])
    ('k7 v12', ((0, 2), (3, 6)))
    """
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), tuple(spans)


def make_text_examples(
    name: str,
    texts: Iterable[Sequence[str]],
    compute_label: Callable[[Sequence[str]], str],
    find_witnesses: Callable[[Sequence[str]], tuple[tuple[int, ...], ...]],
    num_question_words: int,
) -> list[TaskExample]:
    """Build examples from texts in words, whose first words are the question; ids are the name and a number."""
    examples = []
    for number, words in enumerate(texts):
        text, spans = join_words(words)
        examples.append(
            TaskExample(
                id=f"{name}-{number}",
                text=text,
                spans=spans,
                label=compute_label(words),
                witnesses=find_witnesses(words),
                question_positions=tuple(range(num_question_words)),
            )
        )
    return examples


def replace_spans(text: str, spans: Iterable[Span], replacement: str) -> str:
    """The text with each of the spans replaced.

    >>> replace_spans("k7 v12", [(3, 6)], "[MASK]")
    'k7 [MASK]'
    """
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text
