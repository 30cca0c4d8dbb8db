"""Nested rules over marked words: the first word names a rule, the rest of the text satisfies it or does not.

Rules look only at which marked words occur; order, repetition and all other words are distraction. A set of positions
is *sufficient* if keeping them keeps the label, whichever of the other words are dropped; `witnesses` are all the
smallest such sets. So a label that nothing in the text supports ("at least two of …" and there is one) has the empty
set as its only witness: its reason is an absence. `evident=True` leaves such texts out.

>>> sorted(RULES)
['both', 'most', 'nested', 'pair', 'unless', 'veto']
>>> print(format_rule(RULES["nested"]))
at least 2 of (amber, (birch or coral), (delta and not ember))
>>> compute_label("nested garden amber delta coral".split())
'YES'
>>> find_witnesses("nested garden amber delta coral".split())
((2, 3), (2, 4), (3, 4))
>>> find_witnesses("nested garden amber delta ember".split())
((4,),)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, product
from typing import TypeAlias

import numpy as np

from clearhead_zoo.tasks import TaskExample, make_generator, make_text_examples


@dataclass(frozen=True)
class Not:
    """True where a rule is false.

    Attributes:
        rule: The negated rule.
    """

    rule: Rule


@dataclass(frozen=True)
class AtLeast:
    """True where at least `count` of the rules are: 1 is "or", all is "and".

    Attributes:
        count: Number of rules that must be true.
        rules: The rules.
    """

    count: int
    rules: tuple[Rule, ...]


Rule: TypeAlias = "str | Not | AtLeast"
WordSet: TypeAlias = frozenset[str]


def any_of(*rules: Rule) -> AtLeast:
    """Combine rules by "or".

    Args:
        *rules: Words or rules.

    Returns:
        A rule that is true where at least one of them is.
    """
    return AtLeast(1, rules)


def all_of(*rules: Rule) -> AtLeast:
    """Combine rules by "and".

    Args:
        *rules: Words or rules.

    Returns:
        A rule that is true where all of them are; always without rules.
    """
    return AtLeast(len(rules), rules)


LABELS = ("NO", "YES")
MARKED_WORDS = ("amber", "birch", "coral", "delta", "ember", "flint", "grove", "heron")
RULES: dict[str, Rule] = {
    "pair": AtLeast(2, ("amber", "birch", "coral", "delta")),
    "both": any_of(all_of("coral", "ember"), all_of("flint", "grove")),
    "most": all_of(AtLeast(3, ("birch", "delta", "ember", "grove", "heron")), Not("flint")),
    "unless": all_of(any_of("amber", "heron"), Not("delta")),
    "veto": any_of(Not(any_of("birch", "grove")), all_of("coral", "heron")),
    "nested": AtLeast(2, ("amber", any_of("birch", "coral"), all_of("delta", Not("ember")))),
}
_DISTRACTOR_TEXT = (
    "above after again almost apple arrow autumn basket before below bottle bread bridge bright brown button "
    "candle carpet chair cheese circle clock cloud coffee cold corner cotton cousin dinner doctor early engine "
    "evening farmer father feather finger floor flower forest friend garden gentle glass green hammer harbor "
    "honest house island jacket kitchen ladder lemon letter little market meadow middle mirror monday morning "
    "mother mountain never number office orange paper pencil pepper pillow planet pocket quiet rabbit river "
    "round school seven shadow silver simple sister slow small spring square station stone street summer table "
    "teacher three ticket tunnel under valley velvet village wagon water weather white window winter wooden "
    "yellow"
)
DISTRACTORS = tuple(_DISTRACTOR_TEXT.split())
PAD_TOKEN, UNKNOWN_TOKEN, CLS_TOKEN, SEP_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
)
MAX_REPEATS, MAX_EXTRA_DISTRACTORS = 2, 12


def build_vocabulary() -> list[str]:
    """Every word, at its number."""
    return [*SPECIAL_TOKENS, *RULES, *MARKED_WORDS, *DISTRACTORS]


def is_satisfied(rule: Rule, present: WordSet) -> bool:
    """Return whether a rule is true for the words of a text.

    Args:
        rule: A word, which is true where it is present, or a rule.
        present: The words of the text.

    Returns:
        The truth value.

    Example:
        >>> is_satisfied(all_of("coral", Not("ember")), frozenset({"coral", "flint"}))
        True
    """
    match rule:
        case str():
            return rule in present
        case Not():
            return not is_satisfied(rule.rule, present)
        case AtLeast():
            return sum(is_satisfied(part, present) for part in rule.rules) >= rule.count


def format_rule(rule: Rule, is_nested: bool = False) -> str:
    """The rule in words.

    >>> format_rule(RULES["unless"])
    '(amber or heron) and not delta'
    """
    match rule:
        case str():
            return rule
        case Not():
            return f"not {format_rule(rule.rule, True)}"
        case AtLeast():
            parts = [format_rule(part, True) for part in rule.rules]
            if rule.count == 1 or rule.count == len(parts):
                joined = (" or " if rule.count == 1 else " and ").join(parts)
                return f"({joined})" if is_nested else joined
            return f"at least {rule.count} of ({', '.join(parts)})"


def compute_label(words: Sequence[str]) -> str:
    """What the named rule says about the other words. Masked words count as absent.

    >>> compute_label(["pair", "amber", "coral"]), compute_label(["pair", "amber", "[MASK]"])
    ('YES', 'NO')
    """
    return LABELS[is_satisfied(_get_rule(words[0]), frozenset(words[1:]))]


def find_witnesses(words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """All minimal sufficient sets of positions, the smallest first."""
    places = {word: [place for place, other in enumerate(words) if place and other == word] for word in words[1:]}
    sets = find_minimal_sets(words[0], frozenset(words[1:]) & frozenset(MARKED_WORDS))
    # any occurrence of a repeated word serves, so each choice is a witness of its own
    found = [tuple(sorted(choice)) for kept in sets for choice in product(*(places[word] for word in sorted(kept)))]
    return tuple(sorted(found, key=lambda positions: (len(positions), positions)))


@cache
def find_minimal_sets(name: str, present: WordSet) -> tuple[WordSet, ...]:
    """All minimal sets of words that fix the rule's label, whichever of the other present words are dropped."""
    rule = _get_rule(name)
    label = is_satisfied(rule, present)
    sufficient: set[WordSet] = set()
    for size in range(len(present), -1, -1):
        for kept in map(frozenset, combinations(sorted(present), size)):
            # by induction: the label holds for the set itself and whatever one more word leads to is sufficient
            if is_satisfied(rule, kept) == label and all(kept | {word} in sufficient for word in present - kept):
                sufficient.add(kept)
    return tuple(kept for kept in sufficient if not any(kept - {word} in sufficient for word in kept))


@cache
def list_marked_sets(name: str, label: str, evident: bool) -> tuple[tuple[str, ...], ...]:
    """Every choice of marked words for which the rule gives this label (and, if evident, some word is its reason)."""
    choices = [kept for size in range(len(MARKED_WORDS) + 1) for kept in combinations(MARKED_WORDS, size)]
    return tuple(
        kept
        for kept in choices
        if compute_label([name, *kept]) == label
        and not (evident and frozenset() in find_minimal_sets(name, frozenset(kept)))
    )


def sample_words(rng: np.random.Generator, name: str, label: str, evident: bool = False) -> list[str]:
    """Words of a text: the rule's name, then marked words and at least as many distractors in random order."""
    choices = list_marked_sets(name, label, evident)
    marked = list(choices[rng.integers(len(choices))])
    repeated = (
        [marked[place] for place in rng.integers(len(marked), size=rng.integers(MAX_REPEATS + 1))] if marked else []
    )
    marked += repeated
    others = rng.integers(len(DISTRACTORS), size=max(len(marked), 4) + rng.integers(MAX_EXTRA_DISTRACTORS + 1))
    words = marked + [DISTRACTORS[place] for place in others]
    return [name, *(words[place] for place in rng.permutation(len(words)))]


def iter_texts(rng: np.random.Generator, evident: bool = False) -> Iterator[list[str]]:
    """Endless texts, rules and labels in turn: any stretch of twelve is balanced.

    A rule without "not" has no evident NO, so evident texts come in stretches of ten: six YES, four NO.
    """
    kinds = [(name, label) for name in RULES for label in LABELS if list_marked_sets(name, label, evident)]
    while True:
        for name, label in kinds:
            yield sample_words(rng, name, label, evident)


def make_examples(count: int, seed: int, split: str = "held-out", evident: bool = False) -> list[TaskExample]:
    """Texts with label and witnesses; evident: only those whose label has a reason in the text."""
    texts = islice(iter_texts(make_generator(seed, split), evident), count)
    return make_text_examples(f"logic-{split}-{seed}", texts, compute_label, find_witnesses, 1)


def _get_rule(name: str) -> Rule:
    if name not in RULES:
        raise ValueError(f"{name!r} is not a rule; the first word is one of: {', '.join(RULES)}")
    return RULES[name]
