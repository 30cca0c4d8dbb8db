"""Two-hop look-up: "n5 n8 ; n2 n5 ; n2 ⇒" asks for what n2 leads to in two hops: n2 to n5, n5 to n8.

A list of pairs, each from a node to a node. No node is the source of two pairs, but it may be the target of several,
so lists also contain other chains, pairs that lead to the same nodes, and chains that go on after two hops. The arrow
says how many hops are asked for: "→" one, "⇒" two. If some word of the chain is missing or masked, the answer is "?",
so every word of both pairs is needed, and no other word matters.

>>> example = make_examples(1, seed=1, pairs=4)[0]
>>> example.text, example.label
('n0 n14 ; n52 n37 ; n57 n52 ; n34 n57 ; n34 ⇒', 'n52')
>>> [example.words[position] for position in example.evidence]
['n57', 'n52', 'n34', 'n57']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead_zoo.tasks import TaskExample, join_words, make_generator

Integers: TypeAlias = NDArray[np.int64]

NUM_NODES = 64
ONE_HOP_TOKEN, TWO_HOP_TOKEN = ARROW_TOKENS = ("→", "⇒")
SEPARATOR_TOKEN, UNKNOWN_ANSWER = ";", "?"
PAD_TOKEN, UNKNOWN_TOKEN, BOS_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[BOS]", "[MASK]")
MASK_ID, BOS_ID = SPECIAL_TOKENS.index(MASK_TOKEN), SPECIAL_TOKENS.index(BOS_TOKEN)
FIRST_ARROW_ID = len(SPECIAL_TOKENS)
SEPARATOR_ID = FIRST_ARROW_ID + len(ARROW_TOKENS)
UNKNOWN_ANSWER_ID = SEPARATOR_ID + 1
FIRST_NODE_ID = UNKNOWN_ANSWER_ID + 1
#: Words of a pair: source, target, separator.
PAIR_LENGTH = 3
#: Words of a query: source, arrow, answer, separator.
QUERY_LENGTH = 4
MIN_PAIRS, MAX_PAIRS = 4, 16
#: Probability that a target is the source of another pair.
LINK_PROBABILITY = 0.75


def build_vocabulary() -> list[str]:
    """Every word, at its number."""
    return [*SPECIAL_TOKENS, *ARROW_TOKENS, SEPARATOR_TOKEN, *list_answers()]


def list_answers() -> list[str]:
    return [UNKNOWN_ANSWER, *(f"n{node}" for node in range(NUM_NODES))]


@dataclass(frozen=True)
class PairLists:
    """Many lists of one length: sources and targets (rows × pairs)."""

    sources: Integers
    targets: Integers


def sample_lists(rng: np.random.Generator, num_rows: int, num_pairs: int) -> PairLists:
    """Random lists. No node is a source twice, and none leads to itself."""
    if not 2 <= num_pairs < NUM_NODES:
        raise ValueError(f"pairs={num_pairs}: two hops take two pairs, and there are {NUM_NODES} nodes")
    nodes = rng.permuted(np.tile(np.arange(NUM_NODES), (num_rows, 1)), axis=1)
    shape = (num_rows, num_pairs)
    # a shift of 1 … pairs - 1 never gives the source itself
    other_sources = (np.arange(num_pairs) + rng.integers(1, num_pairs, size=shape)) % num_pairs
    leaves = rng.integers(num_pairs, NUM_NODES, size=shape)
    chosen = np.where(rng.random(shape) < LINK_PROBABILITY, other_sources, leaves)
    return PairLists(nodes[:, :num_pairs], np.take_along_axis(nodes, chosen, axis=1))


def encode_lists(pair_lists: PairLists, masked: NDArray[np.bool_] | None = None) -> Integers:
    """Rows of tokens, `[BOS] source target ; source target ; …`.

    masked: rows × (3 · pairs), the words to mask
    """
    rows, pairs = pair_lists.sources.shape
    words = np.stack(
        [
            pair_lists.sources + FIRST_NODE_ID,
            pair_lists.targets + FIRST_NODE_ID,
            np.full((rows, pairs), SEPARATOR_ID),
        ],
        axis=2,
    ).reshape(rows, -1)
    if masked is not None:
        words = np.where(masked, MASK_ID, words)
    return np.concatenate([np.full((rows, 1), BOS_ID), words], axis=1)


def follow_hop(ids: Integers, nodes: Integers) -> tuple[Integers, Integers]:
    """Follow one hop from each node (rows × queries) in rows of `encode_lists`.

    Returns the node or `UNKNOWN_ANSWER_ID` that each node leads to, and the number of its pair (-1 where there is
    none).
    """
    sources, targets = ids[:, 1::PAIR_LENGTH], ids[:, 2::PAIR_LENGTH]
    # a masked node is not a node: it leads nowhere
    is_pair = (sources[:, None] == nodes[:, :, None]) & (nodes[:, :, None] >= FIRST_NODE_ID)
    pair = np.where(is_pair.any(-1), is_pair.argmax(-1), -1)
    target = np.where(pair >= 0, np.take_along_axis(targets, np.maximum(pair, 0), axis=1), UNKNOWN_ANSWER_ID)
    return np.where(target >= FIRST_NODE_ID, target, UNKNOWN_ANSWER_ID), pair


def append_queries(ids: Integers, queried: Integers, hops: Integers) -> tuple[Integers, Integers]:
    """Append `source arrow answer ;` for each query, with the answer that the unmasked words give.

    queried: rows × queries, the tokens that are asked about
    hops: rows × queries, 1 or 2

    Returns the rows, and the columns of the arrows.
    """
    rows, queries = queried.shape
    first, _ = follow_hop(ids, queried)
    second, _ = follow_hop(ids, first)
    answers = np.where(hops == 1, first, second)
    arrows = FIRST_ARROW_ID + hops - 1
    separators = np.full((rows, queries), SEPARATOR_ID)
    questions = np.stack([queried, arrows, answers, separators], axis=2).reshape(rows, -1)
    return np.concatenate([ids, questions], axis=1), ids.shape[1] + 1 + QUERY_LENGTH * np.arange(queries)


def make_examples(
    count: int, seed: int, split: str = "held-out", pairs: int | tuple[int, int] = (MIN_PAIRS, MAX_PAIRS)
) -> list[TaskExample]:
    """Lists with one question of two hops each, about a chain of three different nodes.

    pairs: how many, or the least and the most, drawn evenly
    """
    rng = make_generator(seed, split)
    least, most = (pairs, pairs) if isinstance(pairs, int) else pairs
    made: list[TaskExample] = []
    while len(made) < count:
        lists = sample_lists(rng, 1, int(rng.integers(least, most + 1)))
        sources, targets = lists.sources[0].tolist(), lists.targets[0].tolist()
        chains = [
            (first, sources.index(target))
            for first, target in enumerate(targets)
            if target in sources and targets[sources.index(target)] != sources[first]
        ]
        if not chains:
            continue
        first, second = chains[rng.integers(len(chains))]
        words = [
            word
            for source, target in zip(sources, targets, strict=True)
            for word in (f"n{source}", f"n{target}", SEPARATOR_TOKEN)
        ]
        text, spans = join_words([*words, f"n{sources[first]}", TWO_HOP_TOKEN])
        starts = sorted((PAIR_LENGTH * first, PAIR_LENGTH * second))
        made.append(
            TaskExample(
                id=f"two-hop-{split}-{seed}-{len(made)}",
                text=text,
                spans=spans,
                label=f"n{targets[second]}",
                witnesses=(tuple(position for start in starts for position in (start, start + 1)),),
                question_positions=(len(words), len(words) + 1),
            )
        )
    return made


def find_answer(text: str) -> str:
    """What the queried node leads to: the rule itself. "?" where a word of the chain is masked or missing.

    >>> find_answer("n5 n8 ; n2 n5 ; n2 ⇒"), find_answer("n5 n8 ; n2 n5 ; n2 →")
    ('n8', 'n5')
    >>> find_answer("n5 n8 ; n2 [MASK] ; n2 ⇒"), find_answer("n5 n8 ; n2 n5 ; n5 ⇒")
    ('?', '?')
    """
    *listed, node, arrow = text.split()
    if arrow not in ARROW_TOKENS:
        raise ValueError(f"the last word is {arrow!r}, and has to be one of: {', '.join(ARROW_TOKENS)}")
    target_of = _read_pairs(listed)
    for _ in range(1 + ARROW_TOKENS.index(arrow)):
        node = target_of.get(node, UNKNOWN_ANSWER)
    return node


def _read_pairs(listed: Sequence[str]) -> dict[str, str]:
    """Target by source, of the pairs that have both."""
    pairs = [
        (source, target)
        for source, target in zip(listed[::PAIR_LENGTH], listed[1::PAIR_LENGTH], strict=True)
        if MASK_TOKEN not in (source, target)
    ]
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a node is the source of two pairs in {' '.join(listed)!r}")
    return dict(pairs)
