"""Negation with scope: witnesses equal the definition, and neither state words nor negators give the label alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")

from clearhead.bench.data import CharSpan, load_benchmark_dataset
from clearhead_zoo.tasks import TaskExample, make_generator, negation

SYNTAX_WORDS = {*negation.NEGATORS, *negation.SCOPE_ENDS, *negation.STATE_ENDS, *negation.STATE_OF_WORD}


def list_read_positions(words: list[str]) -> list[int]:
    """Positions of the words that the rule can depend on."""
    rest = range(negation.QUESTION_LENGTH, len(words))
    return [position for position in rest if words[position] in {*SYNTAX_WORDS, words[0]}]


def mask_words(words: list[str], positions: set[int]) -> list[str]:
    return [negation.MASK_TOKEN if position in positions else word for position, word in enumerate(words)]


def find_witnesses_by_definition(words: list[str]) -> set[tuple[int, ...]]:
    """Apply the definition to every set of the words that the rule reads: all of its supersets keep the label."""
    read = list_read_positions(words)
    label = negation.compute_label(words)
    sufficient: set[frozenset[int]] = set()
    for size in range(len(read), -1, -1):
        for kept in map(frozenset, itertools.combinations(read, size)):
            if (
                all(kept | {other} in sufficient for other in read if other not in kept)
                and negation.compute_label(mask_words(words, set(read) - kept)) == label
            ):
                sufficient.add(kept)
    return {tuple(sorted(kept)) for kept in sufficient if not any(kept - {position} in sufficient for position in kept)}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("gate ? the gate is open .", "OPEN"),
        ("gate ? the gate is not ajar .", "SHUT"),
        ("gate ? the vault is not open . the gate is open .", "OPEN"),
        ("gate ? the gate is open . the vault is never open .", "OPEN"),
        ("gate ? neither the vault nor the gate is locked .", "OPEN"),
        ("gate ? not the gate or the vault but the box is closed .", "OPEN"),
        ("gate ? not the vault but the box and the gate are closed .", "SHUT"),
        ("gate ? it is not true that the gate is not open .", "OPEN"),
        ("gate ? it is not true that the vault is shut or that the gate is shut .", "OPEN"),
        ("gate ? it is not true that the vault is shut but that the gate is shut .", "SHUT"),
        ("gate ? it is true that the gate and the vault are not open .", "SHUT"),
        ("gate ? the vault and the box are open .", "UNKNOWN"),
        # a state that belongs to another thing
        ("gate ? it is true that the gate is [MASK] and that the vault is open .", "UNKNOWN"),
        ("gate ? the gate is [MASK] . the vault is open .", "UNKNOWN"),
        # without the word that ends it, a scope goes on
        ("gate ? the vault is not open [MASK] the gate is open .", "SHUT"),
        ("gate ? it is not true that the vault is shut [MASK] that the gate is shut .", "OPEN"),
        ("gate ? not the vault [MASK] the gate is open .", "SHUT"),
    ],
)
def test_label_of_sentences_written_by_hand(text: str, label: str) -> None:
    assert negation.compute_label(text.split()) == label


def test_witnesses_equal_the_definition() -> None:
    examples = [e for e in negation.make_examples(1500, seed=3) if len(list_read_positions([*e.words])) <= 11]
    assert len(examples) > 100 and sum(len(example.witnesses) > 1 for example in examples) > 10
    assert {example.label for example in examples} == set(negation.LABELS)
    for example in examples:
        assert len(set(example.witnesses)) == len(example.witnesses)
        assert set(example.witnesses) == find_witnesses_by_definition([*example.words]), example.text


def test_witnesses_are_sufficient_and_minimal_in_long_texts() -> None:
    rng = make_generator(0, "held-out")
    for example in negation.make_examples(300, seed=4, evident=True):
        words, read = [*example.words], set(list_read_positions([*example.words]))
        for witness in example.witnesses:
            others = sorted(read.difference(witness))
            for rate in (0.0, 0.2, 0.5, 0.8, 1.0):
                masked = {position for position in others if rng.random() < rate}
                assert negation.compute_label(mask_words(words, masked)) == example.label
            for removed in witness:
                # mask everything that could end a scope or nothing, and all negators, all but one of them, or none
                ends = {p for p in others if words[p] in negation.SCOPE_ENDS}
                negators = {p for p in others if words[p] in negation.NEGATORS}
                choices = [negators, set(), *(negators - {kept} for kept in negators)]
                assert any(
                    negation.compute_label(mask_words(words, {removed, *masked_ends, *masked})) != example.label
                    for masked_ends in (ends, set())
                    for masked in choices
                )


def test_ablations_have_the_effect_that_the_card_states() -> None:
    rng = make_generator(1, "held-out")
    for example in negation.make_examples(400, seed=5, evident=True):
        words, evidence = [*example.words], set(example.evidence)
        assert negation.compute_label(mask_words(words, evidence)) == negation.UNKNOWN_LABEL
        reversing = [position for position in evidence if words[position] in negation.NEGATORS]
        for position in reversing:
            reversed_label = negation.compute_label(mask_words(words, {position}))
            assert {reversed_label, example.label} == {"SHUT", "OPEN"}
        ends = {position for position in evidence if words[position] in negation.SCOPE_ENDS}
        assert {negation.compute_label(mask_words(words, ends)), example.label} == (
            {"SHUT", "OPEN"} if ends else {example.label}
        )
        out_of_scope = {p for p, word in enumerate(words) if word in negation.NEGATORS} - evidence
        assert out_of_scope
        assert negation.compute_label(mask_words(words, out_of_scope)) == example.label
        assert negation.compute_label(mask_words(words, {*example.sample_control_positions(rng)})) == example.label
        needed = {*example.witnesses[0], *example.question_positions}
        rest = {position for position in range(len(words)) if position not in needed}
        assert negation.compute_label(mask_words(words, rest)) == example.label


def test_labels_and_numbers_of_negators_are_balanced() -> None:
    examples = negation.make_examples(1200, seed=6)
    assert Counter(e.label for e in examples) == dict.fromkeys(negation.LABELS, 400)
    evident = negation.make_examples(800, seed=6, evident=True)
    kinds = Counter((e.label, sum(e.words[p] in negation.NEGATORS for p in e.evidence)) for e in evident)
    assert kinds == {(label, n): 200 if n == 1 else 100 for label in ("SHUT", "OPEN") for n in (0, 1, 2)}
    assert max(len(example.words) for example in examples) + 2 <= 80
    vocabulary = negation.build_vocabulary()
    assert len(set(vocabulary)) == len(vocabulary)
    assert {word for example in examples for word in example.words} <= set(vocabulary)


def count_negators(example: TaskExample) -> int:
    return sum(word in negation.NEGATORS for word in example.words)


def get_asked_state(example: TaskExample) -> str:
    return next(negation.STATE_OF_WORD[example.words[p]] for p in example.evidence[::-1])


def count_open_words(example: TaskExample) -> int:
    return sum(2 * (negation.STATE_OF_WORD[w] == "OPEN") - 1 for w in example.words if w in negation.STATE_OF_WORD)


def reverse_state_in_sentence(example: TaskExample) -> bool:
    """Read negators of the sentence without their scope."""
    start = max([p for p, word in enumerate(example.words[: example.evidence[-1]]) if word == "."], default=0)
    end = example.words.index(".", example.evidence[-1])
    negators = sum(word in negation.NEGATORS for word in example.words[start:end])
    return (get_asked_state(example) == "OPEN") == (negators % 2 == 0)


@pytest.mark.parametrize(
    ("shortcut", "guess_is_open", "most"),
    [
        ("state word of the thing", lambda e: get_asked_state(e) == "OPEN", 0.55),
        ("parity of all negators", lambda e: count_negators(e) % 2 == 0, 0.55),
        ("state words of the text", lambda e: count_open_words(e) > 0, 0.55),
        (
            "state word, reversed once for each negator of the text",
            lambda e: (get_asked_state(e) == "OPEN") == (count_negators(e) % 2 == 0),
            0.65,
        ),
        ("state word, reversed once for each negator of the sentence", reverse_state_in_sentence, 0.85),
        ("position of the thing", lambda e: e.words.index(e.words[0], 2) % 2 == 0, 0.55),
        ("length of the text", lambda e: len(e.words) > 32, 0.55),
    ],
)
def test_no_shortcut_gives_the_label(shortcut: str, guess_is_open: Callable[[TaskExample], bool], most: float) -> None:
    examples = negation.make_examples(2000, seed=7, evident=True)
    rate = np.mean([guess_is_open(example) == (example.label == "OPEN") for example in examples])
    assert 1 - most < rate < most, shortcut


def test_benchmark_examples_have_evidence_that_decides_the_label() -> None:
    labels = load_benchmark_dataset("known", task="negation", count=1).labels
    assert tuple(labels) == negation.LABELS
    for example in load_benchmark_dataset("known", task="negation", count=24):
        assert isinstance(example.label, int) and labels[example.label] == example.target != negation.UNKNOWN_LABEL
        assert [example.input[span.start : span.stop] for span in example.excluded] == example.input.split()[:2]
        assert example.evidence
        for witness in example.evidence:
            words = [example.input[span.start : span.stop] for span in witness if isinstance(span, CharSpan)]
            assert example.input.split()[0] in words and words[-1] in negation.STATE_OF_WORD
