"""How units lie in their text: lines of pieces that, read one after the other, are the text as it was written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import category

from clearhead.explanation.explanation import Explanation
from clearhead.units import LEVELS, Units

#: Characters that change the direction of what follows them, or are not there to be seen.
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_OVERRIDES = _BIDI[3:]
# Control characters become the pictures that Unicode has for them: no NUL or escape may reach a terminal or a page.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "\u2421"}
_CONTROLS |= {code: f"⟨U+{code:04X}⟩" for code in [*range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF, *range(0xD800, 0xE000)]}
_IN_NAMES = _CONTROLS | {ord(sign): f"⟨U+{ord(sign):04X}⟩" for sign in _BIDI}
_IN_TEXT = _CONTROLS | {ord(sign): f"⟨U+{ord(sign):04X}⟩" for sign in _OVERRIDES}
_IN_TEXT = {code: sign for code, sign in _IN_TEXT.items() if code not in (0x09, 0x0A)}


@dataclass(frozen=True)
class Piece:
    """A stretch of text: a unit's, or what lies between units (`unit` is None).

    `unseen` text is in no unit (it was cut off, or the tokenizer dropped it), and only so much of it is kept as shows
    that; a `hidden` unit shares all its characters with one before it (an emoji that is four byte tokens), so that it
    has nothing of its own to show.
    """

    text: str
    unit: int | None = None
    special: bool = False
    unseen: bool = False
    hidden: bool = False


Line = list[Piece]

#: How many characters of unseen text are kept.
CUT = 400


Shape = Literal["grid", "boxes", "time", "text", "list"]


def shape(explanation: Explanation) -> Shape:
    """How units lie: on a picture's grid, in boxes over it, along time, in a text; otherwise they make a mere list."""
    units = explanation.units
    if units.grid is not None:
        return "grid"
    if units.boxes is not None and explanation.picture is not None:
        return "boxes"
    return "time" if units.kind == "frame" else "text" if units.kind in LEVELS else "list"


def name(raw: str) -> str:
    """A unit's name with nothing invisible in it.

    >>> name("a\\x00b\\u202e")
    'a␀b⟨U+202E⟩'
    """
    return raw.translate(_IN_NAMES)


def running(raw: str) -> str:
    """Running text: line breaks and the marks of its own direction stay, overrides of direction are made visible."""
    return raw.replace("\r\n", "\n").replace("\r", "\n").translate(_IN_TEXT)


def lines(units: Units) -> list[Line]:
    """One line per text, special tokens where they stand; the names alone where there are no offsets."""
    if units.offsets is None or not units.texts:
        return [_names(units)]
    per_text: list[list[int]] = [[] for _ in units.texts]
    segment = 0
    for place in range(len(units)):
        # A separator belongs to the text that it closes, whatever segment the tokenizer says.
        if not units.special[place] and units.segments is not None:
            segment = units.segments[place]
        per_text[segment].append(place)
    return [list(_line(units, text, places)) for text, places in zip(units.texts, per_text, strict=True)]


def _names(units: Units) -> Line:
    pieces: Line = []
    for place, special in enumerate(units.special):
        joined = units.names[place].startswith("##") or not pieces
        pieces += [] if joined else [Piece(" ")]
        pieces.append(Piece(name(units.names[place]), place, special))
    return pieces


def _line(units: Units, text: str, places: Sequence[int]) -> Iterator[Piece]:
    assert units.offsets is not None
    cursor = 0
    for place in places:
        if units.special[place]:
            # A closing token stands after the last character that the model saw.
            yield Piece(name(units.names[place]), place, special=True)
            continue
        start, stop = units.offsets[place]
        if start > cursor:
            yield _between(text[cursor:start])
        start = max(start, cursor)
        yield Piece(running(text[start:stop]), place, hidden=start >= stop)
        cursor = max(cursor, stop)
    if cursor < len(text):
        yield _between(text[cursor:])


def _between(text: str) -> Piece:
    # White space is between units anyway; accents and control characters are what tokenizers drop on purpose.
    unseen = any(category(sign)[0] not in "ZCM" for sign in text)
    if unseen and len(text) > CUT:
        half = CUT // 2
        text = f"{text[:half]} … {text[-half:]}"
    return Piece(running(text), unseen=unseen)
