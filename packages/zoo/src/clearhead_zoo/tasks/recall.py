"""Key–value recall: "k7 v2 k3 v9 k3 →" asks for the value that stands behind k3, v9. No key is listed twice.

>>> example = examples(1, seed=0, pairs=3)[0]
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

from clearhead_zoo.tasks import Example, generator, spaced

Integers: TypeAlias = NDArray[np.int64]

KEYS, VALUES = 2048, 64
ARROW = "→"
PAD, UNKNOWN, BEGIN, MASK = SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[MASK]")
ARROW_ID = len(SPECIAL)
FIRST_KEY = ARROW_ID + 1
FIRST_VALUE = FIRST_KEY + KEYS


def vocabulary() -> list[str]:
    """Every word, at its number."""
    return [*SPECIAL, ARROW, *(f"k{key}" for key in range(KEYS)), *values()]


def values() -> list[str]:
    return [f"v{value}" for value in range(VALUES)]


def most_pairs(tokens: int) -> int:
    """How many pairs fit beside the first token, the queried key and the arrow.

    >>> most_pairs(512), most_pairs(4096)
    (254, 2046)
    """
    return (tokens - 3) // 2


@dataclass(frozen=True)
class Lists:
    """Many lists of one length: keys and values (rows × pairs), and which pairs are asked for (rows × queries)."""

    keys: Integers
    values: Integers
    queried: Integers


def lists(rng: np.random.Generator, rows: int, pairs: int, queries: int = 1) -> Lists:
    """Random lists. Within a list no key comes twice and none is asked for twice, so each answer is in one place."""
    if not 1 <= pairs < KEYS or not 1 <= queries <= pairs:
        raise ValueError(f"pairs={pairs}, queries={queries}: there are {KEYS} keys, and each pair is asked for once")
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs]
    queried = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)[:, :queries]
    return Lists(keys, rng.integers(VALUES, size=(rows, pairs)), queried)


def token_ids(asked: Lists, masked: NDArray[np.bool_] | None = None) -> tuple[Integers, Integers]:
    """Rows of tokens, `[BOS] k v k v … k → v k → v`, and the columns of the arrows.

    masked: rows × pairs × 2, the keys and values to hide (none of the pairs that are asked for)
    """
    rows, pairs = asked.keys.shape
    listed = np.stack([asked.keys + FIRST_KEY, asked.values + FIRST_VALUE], axis=2)
    questions = np.take_along_axis(listed, asked.queried[:, :, None], axis=1)
    if masked is not None:
        listed = np.where(masked, SPECIAL.index(MASK), listed)
    arrows = np.full((rows, asked.queried.shape[1], 1), ARROW_ID)
    questions = np.concatenate([questions[:, :, :1], arrows, questions[:, :, 1:]], axis=2)
    begin = np.full((rows, 1), SPECIAL.index(BEGIN))
    ids = np.concatenate([begin, listed.reshape(rows, -1), questions.reshape(rows, -1)], axis=1)
    return ids, 2 * pairs + 2 + 3 * np.arange(asked.queried.shape[1])


def examples(count: int, seed: int, split: str = "held-out", pairs: int | tuple[int, int] = (2, 254)) -> list[Example]:
    """Lists with one question each. pairs: how many, or the least and the most, drawn evenly."""
    rng = generator(seed, split)
    least, most = (pairs, pairs) if isinstance(pairs, int) else pairs
    made = []
    for number in range(count):
        asked = lists(rng, 1, int(rng.integers(least, most + 1)))
        place = 2 * int(asked.queried[0, 0])
        words = [word for key, value in zip(asked.keys[0], asked.values[0], strict=True) for word in _pair(key, value)]
        label = words[place + 1]
        text, spans = spaced([*words, words[place], ARROW])
        made.append(
            Example(
                id=f"recall-{split}-{seed}-{number}",
                text=text,
                spans=spans,
                label=label,
                witnesses=((place, place + 1),),
                question=(len(words), len(words) + 1),
            )
        )
    return made


def answer(text: str) -> str | None:
    """What stands behind the queried key: the rule itself. None where the key is not listed.

    >>> answer("k7 v2 k3 v9 k3 →"), answer("k7 v2 k3 →")
    ('v9', None)
    """
    *listed, queried, _ = text.split()
    pairs = list(zip(listed[::2], listed[1::2], strict=True))
    found = [value for key, value in pairs if key == queried]
    if len(found) > 1:
        raise ValueError(f"{queried} is listed {len(found)} times in {text!r}")
    return found[0] if found else None


def _pair(key: int, value: int) -> tuple[str, str]:
    return f"k{key}", f"v{value}"
