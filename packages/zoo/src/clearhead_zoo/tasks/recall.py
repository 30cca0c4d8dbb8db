"""Key–value recall: "k7 v2 k3 v9 k3 →" asks for the value that stands behind k3, v9. No key is listed twice.

>>> example = make_examples(1, seed=0, pairs=3)[0]
>>> example.text, example.label
('k1338 v17 k909 v42 k963 v10 k1338 →', 'v17')
>>> [example.words[position] for position in example.evidence]
['k1338', 'v17']
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead_zoo.tasks import TaskExample, join_words, make_generator

Integers: TypeAlias = NDArray[np.int64]

NUM_KEYS, NUM_VALUES = 2048, 64
ARROW_TOKEN = "→"
PAD_TOKEN, UNKNOWN_TOKEN, BOS_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[BOS]", "[MASK]")
ARROW_ID = len(SPECIAL_TOKENS)
FIRST_KEY_ID = ARROW_ID + 1
FIRST_VALUE_ID = FIRST_KEY_ID + NUM_KEYS


def build_vocabulary() -> list[str]:
    """Every word, at its number."""
    return [*SPECIAL_TOKENS, ARROW_TOKEN, *(f"k{key}" for key in range(NUM_KEYS)), *list_values()]


def list_values() -> list[str]:
    """List the tokens of values, v0, v1, …, which are the labels of the task."""
    return [f"v{value}" for value in range(NUM_VALUES)]


def compute_max_pairs(num_tokens: int) -> int:
    """How many pairs fit beside the first token, the queried key and the arrow.

    >>> compute_max_pairs(512), compute_max_pairs(4096)
    (254, 2046)
    """
    return (num_tokens - 3) // 2


@dataclass(frozen=True)
class KeyValueLists:
    """Many lists of one length: keys and values (rows × pairs), and which pairs are asked for (rows × queries)."""

    keys: Integers
    values: Integers
    queried_indices: Integers


def sample_lists(rng: np.random.Generator, num_rows: int, num_pairs: int, num_queries: int = 1) -> KeyValueLists:
    """Random lists. Within a list no key comes twice and none is asked for twice, so each answer is in one place."""
    if not 1 <= num_pairs < NUM_KEYS or not 1 <= num_queries <= num_pairs:
        raise ValueError(
            f"pairs={num_pairs}, queries={num_queries}: there are {NUM_KEYS} keys, and each pair is asked for once"
        )
    keys = rng.permuted(np.tile(np.arange(NUM_KEYS), (num_rows, 1)), axis=1)[:, :num_pairs]
    queried = rng.permuted(np.tile(np.arange(num_pairs), (num_rows, 1)), axis=1)[:, :num_queries]
    return KeyValueLists(keys, rng.integers(NUM_VALUES, size=(num_rows, num_pairs)), queried)


def encode_lists(key_value_lists: KeyValueLists, masked: NDArray[np.bool_] | None = None) -> tuple[Integers, Integers]:
    """Rows of tokens, `[BOS] k v k v … k → v k → v`, and the columns of the arrows.

    masked: rows × pairs × 2, the keys and values to hide (none of the pairs that are asked for)
    """
    rows, pairs = key_value_lists.keys.shape
    listed = np.stack([key_value_lists.keys + FIRST_KEY_ID, key_value_lists.values + FIRST_VALUE_ID], axis=2)
    questions = np.take_along_axis(listed, key_value_lists.queried_indices[:, :, None], axis=1)
    if masked is not None:
        listed = np.where(masked, SPECIAL_TOKENS.index(MASK_TOKEN), listed)
    arrows = np.full((rows, key_value_lists.queried_indices.shape[1], 1), ARROW_ID)
    questions = np.concatenate([questions[:, :, :1], arrows, questions[:, :, 1:]], axis=2)
    begin = np.full((rows, 1), SPECIAL_TOKENS.index(BOS_TOKEN))
    ids = np.concatenate([begin, listed.reshape(rows, -1), questions.reshape(rows, -1)], axis=1)
    return ids, 2 * pairs + 2 + 3 * np.arange(key_value_lists.queried_indices.shape[1])


def make_examples(
    count: int, seed: int, split: str = "held-out", pairs: int | tuple[int, int] = (2, 254)
) -> list[TaskExample]:
    """Lists with one question each. pairs: how many, or the least and the most, drawn evenly."""
    rng = make_generator(seed, split)
    least, most = (pairs, pairs) if isinstance(pairs, int) else pairs
    made = []
    for number in range(count):
        asked = sample_lists(rng, 1, int(rng.integers(least, most + 1)))
        place = 2 * int(asked.queried_indices[0, 0])
        words = [
            word for key, value in zip(asked.keys[0], asked.values[0], strict=True) for word in _format_pair(key, value)
        ]
        label = words[place + 1]
        text, spans = join_words([*words, words[place], ARROW_TOKEN])
        made.append(
            TaskExample(
                id=f"recall-{split}-{seed}-{number}",
                text=text,
                spans=spans,
                label=label,
                witnesses=((place, place + 1),),
                question_positions=(len(words), len(words) + 1),
            )
        )
    return made


def find_answer(text: str) -> str | None:
    """What stands behind the queried key: the rule itself. None where the key is not listed.

    >>> find_answer("k7 v2 k3 v9 k3 →"), find_answer("k7 v2 k3 →")
    ('v9', None)
    """
    *listed, queried, _ = text.split()
    pairs = list(zip(listed[::2], listed[1::2], strict=True))
    found = [value for key, value in pairs if key == queried]
    if len(found) > 1:
        raise ValueError(f"{queried} is listed {len(found)} times in {text!r}")
    return found[0] if found else None


def _format_pair(key: int, value: int) -> tuple[str, str]:
    return f"k{key}", f"v{value}"
