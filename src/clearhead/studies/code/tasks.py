"""What a code model is asked: a masked token, whether two functions do the same, a translation.

Each question keeps the parse of the whole text: a masked text need not parse, so classes come from the text before the
mask was put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clearhead.adapters.base import How
from clearhead.adapters.masked_lm import MaskedLanguageModel
from clearhead.concepts.word_pairs import families
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.studies.code.syntax import Syntax, align, parse

#: Classes whose tokens are not asked for: to guess a comment or an indentation says little about a program.
NOT_ASKED = ("comment", "layout", "special", "mask")


@dataclass(frozen=True)
class Question:
    """One input, how its texts are read, and the right answer.

    truth: the id of the masked token, the label of a pair, or the text of a translation
    about: the class of what was masked, or the family of a pair; empty where there is none
    function: the number of the function that it is about: questions about one function are not independent of each
        other; None where each has its own
    """

    raw: str | tuple[str, str]
    sources: tuple[Syntax, ...]
    truth: int | str
    about: str = ""
    function: int | None = None


def cloze(
    ex: Explainer, texts: Sequence[str], language: str, each: int = 1, seed: int = 0, most: int = 256
) -> list[Question]:
    """Mask `each` tokens of every function, one at a time, drawn among those that are neither comment nor layout.

    Functions that do not parse or have more than `most` tokens are left out.
    """
    subject = ex.subject
    if not isinstance(subject, MaskedLanguageModel) or subject.processor is None:
        raise InputError(f"{subject.name} is no masked language model with a tokenizer: load one, such as zoo:code")
    rng = np.random.default_rng(seed)
    found: list[Question] = []
    for number, text in enumerate(texts):
        source = parse(text, language)
        if source.broken:
            continue
        read = subject.words.read((text,), How())
        ids, units = read.inputs["input_ids"].tolist(), read.units
        kinds = align(units, [source]).kinds
        places = [place for place, kind in enumerate(kinds) if kind not in NOT_ASKED]
        if len(ids) > most or read.dropped or not places:
            continue
        for place in rng.choice(places, size=min(each, len(places)), replace=False):
            start, stop = _trimmed(text, *units.offsets[place])  # type: ignore[index]
            shown = source.masked(start, stop, subject.processor.mask_token)
            found.append(Question(shown.text, (shown,), int(ids[place]), kinds[place], number))
    return _some(found, f"{len(texts)} texts", language)


def pairs(
    texts: Sequence[tuple[str, str]],
    labels: Sequence[str],
    languages: tuple[str, str],
    forms_of: Sequence[tuple[str, str]] | None = None,
) -> list[Question]:
    """Do two functions do the same? Pairs of which one does not parse are left out.

    Pairs that share a function, themselves or through others, count as being about one.

    forms_of: the names of the functions that the texts are forms of, where one function was rewritten into several
        texts; else each text is a function
    """
    if len(texts) != len(labels):
        raise InputError(f"{len(texts)} pairs have {len(labels)} labels: give one for each")
    names = texts if forms_of is None else forms_of
    if len(texts) != len(names):
        raise InputError(f"{len(texts)} pairs have {len(names)} pairs of names of functions: give one for each")
    found, together = [], _together(names)
    for (one, other), label, (name, _) in zip(texts, labels, names, strict=True):
        sources = (parse(one, languages[0]), parse(other, languages[1]))
        if not any(source.broken for source in sources):
            found.append(Question((one, other), sources, label, function=together[name]))
    return _some(found, f"{len(texts)} pairs", " and ".join(dict.fromkeys(languages)))


def translations(texts: Sequence[str], answers: Sequence[str], language: str) -> list[Question]:
    """What a function is in another language. Functions that do not parse are left out."""
    if len(texts) != len(answers):
        raise InputError(f"{len(texts)} functions have {len(answers)} translations: give one for each")
    parsed = [(parse(text, language), answer) for text, answer in zip(texts, answers, strict=True)]
    found = [Question(source.text, (source,), answer) for source, answer in parsed if not source.broken]
    return _some(found, f"{len(texts)} functions", language)


def _together(names: Sequence[tuple[str, str]]) -> dict[str, int]:
    """A number for each name (or text); equal for those that pairs join."""
    joined = families(names)
    number = {name: place for place, name in enumerate(dict.fromkeys(joined.values()))}
    return {name: number[family] for name, family in joined.items()}


def _some(found: list[Question], given: str, language: str) -> list[Question]:
    if not found:
        raise InputError(f"none of {given} can be asked about: they do not parse as {language}, or are too long")
    return found


def _trimmed(text: str, start: int, stop: int) -> tuple[int, int]:
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), stop - (len(piece) - len(piece.rstrip()))
