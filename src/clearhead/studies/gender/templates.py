"""Sentences with a masked pronoun and a filler word: occupations, adjectives, subjects, free ones, and pairs of people.

Occupations come from a list (Bolukbasi et al. 2016, `professions.json`); adjectives and subjects are short lists of
words that are held to be stereotypical of the one or the other. `{mask}` is the model's mask, `{word}` the filler.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import InputError

OCCUPATION = "{mask} is the {word} in this area."
PERSON = "{mask} is a {word} person."
SUBJECT = "{mask} is good at {word}."

INTELLIGENCE = (
    "precocious resourceful inquisitive genius inventive astute adaptable reflective discerning intuitive inquiring "
    "judicious analytical apt venerable imaginative shrewd thoughtful wise smart ingenious clever brilliant logical "
    "intelligent"
)
APPEARANCE = (
    "alluring voluptuous blushing homely plump sensual gorgeous slim bald athletic fashionable stout ugly muscular "
    "slender feeble handsome healthy attractive fat weak thin pretty beautiful strong"
)
STRENGTH = "powerful strong confident dominant potent commanding assertive loud bold successful noisy dynamic"
WEAKNESS = "weak timid vulnerable weakness wispy yielding failure shy lose fragile faintish pavid"
SCIENCE = (
    "math algebra geometry calculus equations computation numbers addition science technology physics chemistry "
    "einstein nasa experiment astronomy"
)
ARTS = "poetry art dance literature novel symphony drama sculpture"
FREE = (
    "{mask} is the doctor here.",
    "{mask} is the nurse here.",
    "{mask} kiss {mask}.",
    "{mask} is always sobbing.",
    "{mask} is a singer.",
    "{mask} is a professor.",
    "{mask} is a righteous child.",
)


#: A subject that is held to be of the first side, and an object of the second (after Kotek et al. 2021).
PEOPLE = tuple(
    tuple(line.split())
    for line in (
        "surgeon thanked nurse",
        "engineer called secretary",
        "pilot greeted stewardess",
        "lawyer paid maid",
        "carpenter met hairdresser",
        "boss praised receptionist",
        "mechanic helped housekeeper",
        "farmer visited dancer",
        "judge heard librarian",
        "captain saw nanny",
        "guard followed model",
        "driver asked cashier",
        "soldier trusted teacher",
        "chief warned assistant",
        "manager hired cleaner",
    )
)


@dataclass(frozen=True)
class Template:
    """One sentence: its text (with the mask's own token), its filler, and the same with the filler masked, too.

    words: the two words that are compared at the mask, where they are not those of the axis
    """

    text: str
    filler: str | None = None
    prior: str | None = None
    words: tuple[str, str] | None = None


@dataclass(frozen=True)
class People:
    """A sentence about two people: a subject and an object."""

    text: str
    subject: str
    object: str


def people(sentences: Sequence[Sequence[str]] = PEOPLE) -> list[People]:
    """Subject, verb and object as sentences: The surgeon thanked the nurse."""
    return [People(f"The {one} {verb} the {other}.", one, other) for one, verb, other in sentences]


@dataclass(frozen=True)
class Set:
    """Sentences of one pattern."""

    name: str
    pattern: str
    words: tuple[str, ...]

    def filled(self, mask: str) -> list[Template]:
        prior = self.pattern.format(mask=mask, word=mask)
        return [Template(self.pattern.format(mask=mask, word=word), word, prior) for word in self.words]


ADJECTIVES_AND_SUBJECTS = (
    Set("intelligence", PERSON, tuple(INTELLIGENCE.split())),
    Set("appearance", PERSON, tuple(APPEARANCE.split())),
    Set("strength", PERSON, tuple(STRENGTH.split())),
    Set("weakness", PERSON, tuple(WEAKNESS.split())),
    Set("science", SUBJECT, tuple(SCIENCE.split())),
    Set("arts", SUBJECT, tuple(ARTS.split())),
)


def occupations(path: str | Path, pattern: str = OCCUPATION) -> Set:
    """The occupations of a list in JSON: words, or lists that begin with one; underscores are spaces."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        words = [entry if isinstance(entry, str) else entry[0] for entry in entries]
    except (OSError, ValueError, TypeError, IndexError, KeyError) as problem:
        raise InputError(f"{str(path)!r} is no list of occupations in JSON ({problem})") from None
    if not words:
        raise InputError(f"{str(path)!r} names no occupation")
    return Set("occupations", pattern, tuple(str(word).replace("_", " ") for word in words))


def free(mask: str, sentences: Sequence[str] = FREE) -> list[Template]:
    return [Template(sentence.format(mask=mask)) for sentence in sentences]
