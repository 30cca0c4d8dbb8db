"""Negation with scope: the first word names a thing, and the sentences after it tell whether it is open or shut.

"gate ? it is not true that the gate is locked but that the hatch is open ." The rule is read off the words:

- A thing has the state that is named next after it ("open" or "shut", each in three words), up to a full stop or
  "that". Things without one are UNKNOWN.
- "not", "never" and "neither" are negators. The scope of a negator ends at the next "but" or full stop.
- What is said of a thing is reversed once for each negator that has the thing or its state in its scope: "not the gate
  but the hatch is open" reverses the gate alone, "the gate and the hatch are not open" both.

All other words are distractors, and so are other things, their states, and negators whose scope ends before the thing
or starts after its state. A set of positions is *sufficient* if keeping them keeps the label, whichever of the other
words are masked; `witnesses` are all minimal sufficient sets. Besides the thing, its state and the negators in scope, a
witness has the word that ends the scope of earlier negators, if there are any: without it, they would reverse the
thing.

>>> text = "gate ? not the hatch but the gate is open ."
>>> compute_label(text.split()), compute_label(text.replace("but", "[MASK]").split())
('OPEN', 'SHUT')
>>> [[text.split()[position] for position in witness] for witness in find_witnesses(text.split())]
[['but', 'gate', 'open']]
>>> find_witnesses("gate ? the gate is not open . the hatch is not open .".split())
((3, 5, 6),)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from clearhead_zoo.tasks import TaskExample, make_generator, make_text_examples

UNKNOWN_LABEL = "UNKNOWN"
LABELS = ("SHUT", "OPEN", UNKNOWN_LABEL)
STATE_WORDS = {"SHUT": ("shut", "closed", "locked"), "OPEN": ("open", "ajar", "unlocked")}
STATE_OF_WORD = {word: state for state, words in STATE_WORDS.items() for word in words}
NEGATORS = ("not", "never", "neither")
FULL_STOP, BUT, THAT = ".", "but", "that"
#: Words that end the scope of a negator, and words behind which a state belongs to another thing.
SCOPE_ENDS, STATE_ENDS = (BUT, FULL_STOP), (THAT, FULL_STOP)
QUESTION_MARK = "?"
_THING_TEXT = (
    "attic barn basement box cabin cage cellar chapel chest closet crate drawer fridge garage gate hatch kitchen "
    "library locker office oven parlour safe shed shutter stable suitcase vault wardrobe window"
)
THINGS = tuple(_THING_TEXT.split())
FUNCTION_WORDS = ("the", "and", "or", "nor", "is", "are", "it", "true", "now", "still")
PAD_TOKEN, UNKNOWN_TOKEN, CLS_TOKEN, SEP_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
)
#: Words before the sentences: the thing that is asked about, and "?".
QUESTION_LENGTH = 2
MIN_SENTENCES, MAX_SENTENCES = 2, 3
#: How often the asked statement is reversed, in turn: as often an even number of times as an odd one, so that a state
#: word says nothing about the label by itself.
REVERSAL_COUNTS = (0, 1, 2, 1)


def build_vocabulary() -> list[str]:
    """Every word, at its number."""
    return [
        *SPECIAL_TOKENS,
        QUESTION_MARK,
        *SCOPE_ENDS,
        THAT,
        *NEGATORS,
        *STATE_OF_WORD,
        *FUNCTION_WORDS,
        *THINGS,
    ]


def compute_label(words: Sequence[str]) -> str:
    """What the sentences say of the thing that the first word names. Masked words say nothing.

    >>> compute_label("gate ? it is not true that the gate is not open .".split())
    'OPEN'
    >>> compute_label("gate ? the [MASK] is not open .".split())
    'UNKNOWN'
    """
    statement = find_statement(words)
    if statement is None:
        return UNKNOWN_LABEL
    named = STATE_OF_WORD[words[statement.state]]
    return named if not statement.is_reversed else next(other for other in STATE_WORDS if other != named)


@dataclass(frozen=True)
class Statement:
    """Positions of a thing, of its state, and of the negators that have either in their scope."""

    thing: int
    state: int
    negators: tuple[int, ...]

    @property
    def is_reversed(self) -> bool:
        return len(self.negators) % 2 == 1


def find_statement(words: Sequence[str]) -> Statement | None:
    """What is said of the thing that the first word names, which is mentioned at most once; None for UNKNOWN."""
    if words[0] not in words[QUESTION_LENGTH:]:
        return None
    thing = words.index(words[0], QUESTION_LENGTH)
    for position in range(thing + 1, len(words)):
        if words[position] in STATE_OF_WORD:
            return Statement(thing, position, _list_negators_in_scope(words, thing, position))
        if words[position] in STATE_ENDS:
            return None
    return None


def _list_negators_in_scope(words: Sequence[str], thing: int, state: int) -> tuple[int, ...]:
    in_scope: list[int] = []
    reversing: list[int] = []
    for position in range(QUESTION_LENGTH, state):
        if words[position] in NEGATORS:
            in_scope.append(position)
        elif words[position] in SCOPE_ENDS:
            in_scope = []
        if position == thing:
            reversing = in_scope
    return tuple(sorted({*reversing, *in_scope}))


def find_witnesses(words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """All minimal sufficient sets of positions, for texts of `sample_words`.

    A thing that is not mentioned has the empty set: nothing in the text is evidence that it is UNKNOWN.
    """
    statement = find_statement(words)
    if statement is None:
        return ((),)
    needed = (*statement.negators, statement.thing, statement.state)
    earlier = _list_earlier_scopes(words, statement)
    if not earlier:
        return (tuple(sorted(needed)),)
    # any of the words between the last scope and the thing will do: it ends all earlier scopes, too
    ends = [p for p in range(earlier[-1][-1] + 1, statement.thing) if words[p] in SCOPE_ENDS]
    return tuple(tuple(sorted((*needed, end))) for end in ends)


def _list_earlier_scopes(words: Sequence[str], statement: Statement) -> list[list[int]]:
    """Negators whose scope ends before the thing, those of one scope together."""
    scopes: list[list[int]] = []
    is_ended = True
    for position in range(QUESTION_LENGTH, statement.thing):
        if words[position] in SCOPE_ENDS:
            is_ended = True
        elif words[position] in NEGATORS:
            if is_ended:
                scopes.append([])
            scopes[-1].append(position)
            is_ended = False
    return [scope for scope in scopes if scope[0] not in statement.negators]


# -- texts


def sample_words(rng: np.random.Generator, label: str, num_reversals: int = 0) -> list[str]:
    """Words of a text with this label, with negators in scope in this number and at least one out of scope."""
    while True:
        words, things = sample_sentences(rng, int(rng.integers(MIN_SENTENCES, MAX_SENTENCES + 1)))
        # no sentence has taken this thing: a question about what is not mentioned
        words = [things.pop(), QUESTION_MARK, *words]
        if label == UNKNOWN_LABEL:
            return words
        mentioned = [word for word in words[QUESTION_LENGTH:] if word in THINGS]
        for index in rng.permutation(len(mentioned)):
            words[0] = mentioned[index]
            statement = find_statement(words)
            if statement is None or len(statement.negators) != num_reversals:
                continue
            if sum(word in NEGATORS for word in words) == num_reversals:
                continue
            # If two negators of an earlier scope cancelled, keeping both of them would do as well as keeping the word
            # that ends their scope, and no reader would call them evidence.
            if any(len(scope) % 2 == 0 for scope in _list_earlier_scopes(words, statement)):
                continue
            if compute_label(words) != label:
                other = next(other for other in STATE_WORDS if other != STATE_OF_WORD[words[statement.state]])
                words[statement.state] = _choose(rng, STATE_WORDS[other])
            return words


def iter_texts(rng: np.random.Generator, evident: bool = False) -> Iterator[list[str]]:
    """Endless texts, labels and numbers of reversals in turn: any stretch of twelve is balanced.

    evident: no text is UNKNOWN, so that it is any stretch of eight.
    """
    while True:
        for num_reversals in REVERSAL_COUNTS:
            for label in LABELS[:2] if evident else LABELS:
                yield sample_words(rng, label, num_reversals)


def make_examples(count: int, seed: int, split: str = "held-out", evident: bool = False) -> list[TaskExample]:
    """Texts with label and witnesses; evident: only those that say how the thing is."""
    texts = islice(iter_texts(make_generator(seed, split), evident), count)
    return make_text_examples(f"negation-{split}-{seed}", texts, compute_label, find_witnesses, QUESTION_LENGTH)


def sample_sentences(rng: np.random.Generator, num_sentences: int) -> tuple[list[str], list[str]]:
    """Words of so many sentences, and the things that they do not mention."""
    things = [THINGS[index] for index in rng.permutation(len(THINGS))]
    sentences = [_sample_sentence(rng, things) for _ in range(num_sentences)]
    return [word for sentence in sentences for word in sentence], things


def _choose(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _sample_sentence(rng: np.random.Generator, things: list[str]) -> list[str]:
    """A sentence of one of five forms, about the last of the things, which are taken from the list."""
    form = rng.integers(5)
    if form == 0:
        words = _sample_clause(rng, things)
    elif form == 1:
        words = _sample_clause(rng, things, is_negated=True)
    elif form == 2:
        listed = _sample_list(rng, things, "nor", 2, 3)
        words = ["neither", *listed, "is", *_sample_state(rng)]
    elif form == 3:
        excluded, included = _sample_list(rng, things, "or"), _sample_list(rng, things, "and")
        words = ["not", *excluded, BUT, *included, _choose_verb(included), *_sample_state(rng)]
    else:
        words = _sample_report(rng, things)
    return [*words, FULL_STOP]


def _sample_report(rng: np.random.Generator, things: list[str]) -> list[str]:
    """ "it is true that …" or "it is not true that …", of one clause or two.

    Under "not", clauses and things are joined by "or": "not true that … or that …" denies both, "and" would not.
    Nothing follows a negated clause in its scope, where a reader would not expect the reversal.
    """
    is_denied = bool(rng.integers(2))
    words = ["it", "is", *(["not"] if is_denied else []), "true", THAT]
    joint = "or" if is_denied else "and"
    ending = rng.integers(3)
    if ending == 0:  # one clause
        return words + _sample_clause(rng, things, joint, is_negated=bool(rng.integers(2)))
    if ending == 1:  # a second clause in the same scope
        words += _sample_clause(rng, things, joint)
        return [*words, joint, THAT, *_sample_clause(rng, things, joint, is_negated=bool(rng.integers(2)))]
    words += _sample_clause(rng, things, joint, is_negated=bool(rng.integers(2)))
    return [*words, BUT, THAT, *_sample_clause(rng, things, is_negated=rng.random() < 0.25)]


def _sample_clause(
    rng: np.random.Generator, things: list[str], joint: str = "and", is_negated: bool = False
) -> list[str]:
    """ "the gate and the hatch are (not) open"; a negated clause under "or" is about one thing."""
    listed = _sample_list(rng, things, joint, 1, 1 if is_negated and joint == "or" else 2)
    words = [*listed, _choose_verb(listed)]
    if not is_negated:
        return words + _sample_state(rng)
    if rng.random() < 0.3:
        return [*words, "never", _choose(rng, tuple(STATE_OF_WORD))]
    return [*words, "not", *_sample_state(rng)]


def _sample_list(rng: np.random.Generator, things: list[str], joint: str, least: int = 1, most: int = 2) -> list[str]:
    words = ["the", things.pop()]
    for _ in range(rng.integers(least, most + 1) - 1):
        words += [joint, "the", things.pop()]
    return words


def _choose_verb(listed: Sequence[str]) -> str:
    return "are" if "and" in listed else "is"


def _sample_state(rng: np.random.Generator) -> list[str]:
    """A state word, sometimes after an adverb."""
    state = _choose(rng, tuple(STATE_OF_WORD))
    return [_choose(rng, ("now", "still")), state] if rng.random() < 0.25 else [state]
