"""Layout of units in their text: lines of spans whose concatenation is the original text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import category

from clearhead.explanation.explanation import Explanation
from clearhead.units import TEXT_LEVELS, Units

#: Invisible characters that change the direction of the text after them.
_BIDI_CHARACTERS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_BIDI_OVERRIDES = _BIDI_CHARACTERS[3:]
# Control characters become Unicode's control pictures: no NUL or escape may reach a terminal or a page.
_CONTROL_ESCAPES = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "\u2421"}
_CONTROL_ESCAPES |= {
    code: f"⟨U+{code:04X}⟩" for code in [*range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF, *range(0xD800, 0xE000)]
}
_NAME_ESCAPES = _CONTROL_ESCAPES | {ord(char): f"⟨U+{ord(char):04X}⟩" for char in _BIDI_CHARACTERS}
_TEXT_ESCAPES = _CONTROL_ESCAPES | {ord(char): f"⟨U+{ord(char):04X}⟩" for char in _BIDI_OVERRIDES}
_TEXT_ESCAPES = {code: replacement for code, replacement in _TEXT_ESCAPES.items() if code not in (0x09, 0x0A)}


@dataclass(frozen=True)
class TextSpan:
    """A span of text: that of a unit, or the text between units.

    Attributes:
        text: The text, with invisible characters escaped.
        unit_index: The index of the unit; None for text between units.
        is_special: Whether the unit is a special token, such as [CLS].
        is_unseen: Whether the text belongs to no unit: it was truncated, or dropped by the tokenizer. Long unseen text
            is shortened.
        is_empty: Whether the unit shares all its characters with the one before it, as byte tokens of an emoji do.
    """

    text: str
    unit_index: int | None = None
    is_special: bool = False
    is_unseen: bool = False
    is_empty: bool = False


TextLine = list[TextSpan]

#: The longest unseen text that is not shortened.
MAX_UNSEEN_CHARS = 400


UnitLayout = Literal["grid", "boxes", "time", "text", "list"]


def find_unit_layout(explanation: Explanation) -> UnitLayout:
    """Return how units are laid out: on an image grid, as boxes over an image, in time, in a text, or as a list."""
    units = explanation.units
    if units.grid is not None:
        return "grid"
    if units.boxes is not None and explanation.image is not None:
        return "boxes"
    if units.kind == "frame":
        return "time"
    if units.kind in TEXT_LEVELS:
        return "text"
    return "list"


def escape_invisible(text: str) -> str:
    r"""Make invisible characters visible in a name: control characters, line breaks, marks of direction.

    Args:
        text: Text from outside, such as a token or a label.

    Returns:
        The text with a visible sign in place of each invisible character.

    Example:
        >>> escape_invisible("a\x00b\u202e")
        'a␀b⟨U+202E⟩'
    """
    return text.translate(_NAME_ESCAPES)


def escape_invisible_multiline(text: str) -> str:
    """Make invisible characters visible in running text; line breaks and plain marks of direction are kept."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_TEXT_ESCAPES)


def build_text_lines(units: Units) -> list[TextLine]:
    """Return one line of spans per text, including special tokens; one line of names if units have no offsets."""
    if units.offsets is None or not units.texts:
        return [_build_name_line(units)]
    indices_per_text: list[list[int]] = [[] for _ in units.texts]
    segment = 0
    for index in range(len(units)):
        # A separator belongs to the text before it, whatever its segment id.
        if not units.special[index] and units.segments is not None:
            segment = units.segments[index]
        indices_per_text[segment].append(index)
    return [
        list(_iter_line_spans(units, text, indices))
        for text, indices in zip(units.texts, indices_per_text, strict=True)
    ]


def _build_name_line(units: Units) -> TextLine:
    """The names of units, separated by spaces except before a subword ("##")."""
    spans: TextLine = []
    for index, is_special in enumerate(units.special):
        name = units.names[index]
        if spans and not name.startswith("##"):
            spans.append(TextSpan(" "))
        spans.append(TextSpan(escape_invisible(name), index, is_special))
    return spans


def _iter_line_spans(units: Units, text: str, indices: Sequence[int]) -> Iterator[TextSpan]:
    """Yield the spans of one text and its units."""
    assert units.offsets is not None
    cursor = 0
    for index in indices:
        if units.special[index]:
            # A closing token comes after the last character that the model received.
            yield TextSpan(escape_invisible(units.names[index]), index, is_special=True)
            continue
        start, stop = units.offsets[index]
        if start > cursor:
            yield _build_gap_span(text[cursor:start])
        start = max(start, cursor)
        yield TextSpan(escape_invisible_multiline(text[start:stop]), index, is_empty=start >= stop)
        cursor = max(cursor, stop)
    if cursor < len(text):
        yield _build_gap_span(text[cursor:])


def _build_gap_span(text: str) -> TextSpan:
    """Text between units; unseen unless tokenizers drop it by design (white space, accents, control characters)."""
    is_unseen = any(category(character)[0] not in "ZCM" for character in text)
    if is_unseen and len(text) > MAX_UNSEEN_CHARS:
        half = MAX_UNSEEN_CHARS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return TextSpan(escape_invisible_multiline(text), is_unseen=is_unseen)
