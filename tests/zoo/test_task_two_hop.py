"""Two-hop look-up: the words of both pairs decide the answer, each of them is needed, and there is no shortcut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")

from clearhead.bench.data import CharSpan, load_benchmark_dataset
from clearhead_zoo.tasks import TaskExample, make_generator, replace_spans, two_hop


def mask_positions(example: TaskExample, positions: list[int]) -> str:
    return replace_spans(example.text, [example.spans[position] for position in positions], two_hop.MASK_TOKEN)


def list_pairs(example: TaskExample) -> list[tuple[str, str]]:
    listed = example.words[:-2]
    return list(zip(listed[::3], listed[1::3], strict=True))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), pairs=st.integers(two_hop.MIN_PAIRS, two_hop.MAX_PAIRS))
def test_answer_depends_on_every_word_of_the_evidence_and_on_no_other(seed: int, pairs: int) -> None:
    (example,) = two_hop.make_examples(1, seed, pairs=pairs)
    assert two_hop.find_answer(example.text) == example.label != two_hop.UNKNOWN_ANSWER
    (witness,) = example.witnesses
    others = [p for p in range(len(example.words)) if p not in {*witness, *example.question_positions}]
    assert two_hop.find_answer(mask_positions(example, others)) == example.label
    rng = make_generator(seed, "held-out")
    for _ in range(20):
        masked = [position for position in others if rng.random() < 0.5]
        assert two_hop.find_answer(mask_positions(example, masked)) == example.label
        removed = [*masked, witness[rng.integers(len(witness))]]
        assert two_hop.find_answer(mask_positions(example, removed)) == two_hop.UNKNOWN_ANSWER


def test_chain_has_three_nodes_and_its_pairs_stand_in_either_order() -> None:
    first_pair_is_first = []
    for example in two_hop.make_examples(400, seed=2):
        words = [example.words[position] for position in example.evidence]
        pairs = {words[0]: words[1], words[2]: words[3]}
        start = example.words[example.question_positions[0]]
        assert example.words[example.question_positions[1]] == two_hop.TWO_HOP_TOKEN
        assert pairs[pairs[start]] == example.label and len({start, pairs[start], example.label}) == 3
        first_pair_is_first.append(words[0] == start)
    assert 0.42 < np.mean(first_pair_is_first) < 0.58


@pytest.mark.parametrize(
    ("shortcut", "guess"),
    [
        ("last target", lambda pairs, asked: pairs[-1][1]),
        ("first target", lambda pairs, asked: pairs[0][1]),
        ("one hop", lambda pairs, asked: dict(pairs)[asked]),
        ("most frequent target", lambda pairs, asked: Counter(t for _, t in pairs).most_common(1)[0][0]),
        (
            "target of the pair after the first hop",
            lambda pairs, asked: [t for _, t in pairs * 2][[s for s, _ in pairs].index(asked) + 1],
        ),
        (
            "most frequent target of sources that are targets",
            lambda pairs, asked: Counter(t for s, t in pairs if s in {t for _, t in pairs}).most_common(1)[0][0],
        ),
    ],
)
def test_no_shortcut_gives_the_answer(shortcut: str, guess: Callable[[list[tuple[str, str]], str], str]) -> None:
    examples = two_hop.make_examples(1000, seed=3)
    is_correct = [guess(list_pairs(e), e.words[e.question_positions[0]]) == e.label for e in examples]
    assert np.mean(is_correct) < 0.3, shortcut


def test_labels_and_answer_positions_are_spread_evenly() -> None:
    examples = two_hop.make_examples(3200, seed=4, pairs=8)
    labels = Counter(example.label for example in examples)
    assert len(labels) == two_hop.NUM_NODES and max(labels.values()) < 90 and min(labels.values()) > 20
    ends = Counter(p // 3 for e in examples for p in e.evidence if p % 3 == 1 and e.words[p] == e.label)
    assert max(ends.values()) < 1.25 * min(ends.values())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), pairs=st.integers(2, 16), rate=st.sampled_from([0.0, 0.1, 0.5]))
def test_encoded_answers_equal_the_rule_applied_to_the_words(seed: int, pairs: int, rate: float) -> None:
    rng = make_generator(seed, "train")
    lists = two_hop.sample_lists(rng, 6, pairs)
    listed = two_hop.encode_lists(lists, rng.random((6, 3 * pairs)) < rate)
    queried = rng.integers(two_hop.NUM_NODES, size=(6, 4)) + two_hop.FIRST_NODE_ID
    queried[:, 0] = lists.sources[:, 0] + two_hop.FIRST_NODE_ID
    ids, arrows = two_hop.append_queries(listed, queried, rng.integers(1, 3, size=(6, 4)))
    for row in np.array(two_hop.build_vocabulary())[ids]:
        assert row[0] == two_hop.BOS_TOKEN and row[-1] == two_hop.SEPARATOR_TOKEN
        for arrow in arrows:
            question = " ".join([*row[1 : 1 + 3 * pairs], *row[arrow - 1 : arrow + 1]])
            assert two_hop.find_answer(question) == row[arrow + 1]


def test_wrong_lists_raise() -> None:
    with pytest.raises(ValueError, match="pairs=64: two hops take two pairs, and there are 64 nodes"):
        two_hop.sample_lists(make_generator(0, "train"), 1, 64)
    with pytest.raises(ValueError, match="a node is the source of two pairs"):
        two_hop.find_answer("n1 n2 ; n1 n3 ; n1 →")
    with pytest.raises(ValueError, match="the last word is ';', and has to be one of: →, ⇒"):
        two_hop.find_answer("n1 n2 ; n1 ;")


def test_benchmark_examples_have_four_evidence_words_and_the_true_answer() -> None:
    for example in load_benchmark_dataset("known", task="two-hop", count=20):
        (witness,) = example.evidence
        spans = [span for span in witness if isinstance(span, CharSpan)]
        words = [example.input[span.start : span.stop] for span in spans]
        assert len(spans) == 4 and example.continuation in (words[1], words[3])
        assert two_hop.find_answer(example.input) == example.continuation
        assert [example.input[span.start : span.stop] for span in example.excluded] == example.input.split()[-2:]
