"""Published sentences about people, as templates: CrowS-Pairs, WinoBias and Winogender, read from where they lie.

Each gives sentences with a mask where two versions of it differ, and the two words that stood there.

    crows_pairs   the more and the less stereotypical sentence (Nangia et al. 2020); the first word is the more so
    winobias      the stereotypical and the other pronoun of one sentence (Zhao et al. 2018); filler: who it refers to
    winogender    the masculine and the feminine pronoun (Rudinger et al. 2018); filler: who it refers to
"""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from clearhead.errors import InputError, unknown
from clearhead.studies.gender.templates import Template

_WORD = re.compile(r"\w+(?:['’]\w+)*")


def differing(one: str, other: str) -> list[tuple[re.Match[str], str]]:
    """Where two sentences of as many words differ: the place in the first, and the word of the second.

    >>> [(place.group(), word) for place, word in differing("He left his hat.", "She left her hat.")]
    [('He', 'She'), ('his', 'her')]
    """
    first, second = list(_WORD.finditer(one)), _WORD.findall(other)
    if len(first) != len(second):
        return []
    pairs = zip(first, second, strict=True)
    return [(place, word) for place, word in pairs if place.group().casefold() != word.casefold()]


def masked(one: str, other: str, mask: str, filler: str | None = None, most: int = 2) -> Template | None:
    """The first sentence with masks where the two differ; None where they do nowhere, or in more than `most` words."""
    found = differing(one, other)
    if not 1 <= len(found) <= most:
        return None
    text = one
    for place, _ in reversed(found):
        text = text[: place.start()] + mask + text[place.end() :]
    place, word = found[0]
    return Template(text, filler, words=(place.group().casefold(), word.casefold()))


def crows_pairs(path: str | Path, mask: str, kind: str | None = "gender") -> list[Template]:
    """`crows_pairs_anonymized.csv`: the rows of one bias type (None: all) that differ in at most two words."""
    rows = list(_table(Path(path), ",", ("sent_more", "sent_less", "bias_type")))
    kinds = sorted({row["bias_type"] for row in rows})
    if kind is not None and kind not in kinds:
        raise unknown("bias type", kind, kinds)
    own = [row for row in rows if kind in (None, row["bias_type"])]
    return _some((masked(row["sent_more"], row["sent_less"], mask) for row in own), path)


def winobias(path: str | Path, mask: str) -> list[Template]:
    """A `pro_stereotyped_type….txt.…` file; its `anti_stereotyped_…` twin is looked for beside it."""
    path = Path(path)
    twin = path.with_name(path.name.replace("pro_stereotyped", "anti_stereotyped"))
    if twin == path:
        raise InputError(f"{path.name!r} is no file of WinoBias: its names begin with pro_stereotyped_")
    sides = [_numbered(file) for file in (path, twin)]
    found = []
    for one, other in zip(*sides, strict=False):
        people = [words for words in re.findall(r"\[([^\]]+)\]", one) if words.casefold().startswith("the ")]
        first, second = (re.sub(r"[\[\]]", "", side) for side in (one, other))
        referent = people[0].split(maxsplit=1)[1] if people else None
        found.append(masked(first, second, mask, referent, most=1))
    return _some(found, path)


def winogender(path: str | Path, mask: str) -> list[Template]:
    """`all_sentences.tsv`: sentences with a named participant, once each; an answer of 0 refers to the occupation."""
    sentences = {}
    for row in _table(Path(path), "\t", ("sentid", "sentence")):
        occupation, other, answer, gender, *_ = row["sentid"].split(".")
        sentences[occupation, other, answer, gender] = row["sentence"]
    found = []
    for (occupation, other, answer, gender), sentence in sentences.items():
        twin = sentences.get((occupation, other, answer, "female"))
        if gender == "male" and twin is not None and other != "someone":
            found.append(masked(sentence, twin, mask, other if answer == "1" else occupation, most=1))
    return _some(found, path)


SOURCES: dict[str, Callable[[str | Path, str], list[Template]]] = {
    "crows-pairs": crows_pairs,
    "winobias": winobias,
    "winogender": winogender,
}


def read_source(name: str, path: str | Path, mask: str) -> list[Template]:
    if name not in SOURCES:
        raise unknown("set of sentences", name, SOURCES)
    if not Path(path).is_file():
        raise InputError(f"there is no file {str(path)!r} of {name}")
    try:
        return SOURCES[name](path, mask)
    except (UnicodeDecodeError, csv.Error, ValueError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"{str(path)!r} cannot be read as {name} ({problem})") from None


def _some(found: "Iterator[Template | None] | list[Template | None]", path: str | Path) -> list[Template]:
    kept = list(dict.fromkeys(one for one in found if one is not None))
    if not kept:
        raise InputError(f"{str(path)!r} holds no two sentences that differ in a word or two")
    return kept


def _table(path: Path, separator: str, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=separator)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{str(path)!r} has no column {missing[0]!r}: it has {', '.join(reader.fieldnames or ())}")
        yield from reader


def _numbered(path: Path) -> list[str]:
    """Lines without the number that they begin with."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}, which holds the other version of each sentence")
    return [re.sub(r"^\d+\s+", "", line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
