import pytest

from clearhead import Explanation
from clearhead.render.text_layout import (
    MAX_UNSEEN_CHARS,
    build_text_lines,
    escape_invisible,
    escape_invisible_multiline,
)
from clearhead.units import Units, build_numbered_units


def test_text_pieces_concatenate_to_the_text(text: dict[str, Explanation]) -> None:
    units = text["generic"].units
    (line,) = build_text_lines(units)
    assert "".join(piece.text for piece in line if not piece.is_special) == units.texts[0]
    assert [piece.unit_index for piece in line if piece.unit_index is not None] == list(range(len(units)))


def test_pair_has_two_lines_that_end_with_separators(pair: Explanation) -> None:
    lines = build_text_lines(pair.units)
    texts = ["".join(piece.text for piece in line if not piece.is_special) for line in lines]
    assert texts == list(pair.units.texts)
    assert [line[-1].is_special for line in lines] == [True, True]
    assert sorted(p.unit_index for line in lines for p in line if p.unit_index is not None) == list(
        range(len(pair.units))
    )


def test_units_that_share_characters_show_them_once() -> None:
    offsets = ((0, 1), (0, 1), (0, 1), (1, 2))
    units = Units("text", "token", ("ð", "Ł", "ĺ", "!"), (False,) * 4, ("😀!",), (0,) * 4, offsets)
    (line,) = build_text_lines(units)
    assert [(piece.text, piece.is_empty) for piece in line] == [("😀", False), ("", True), ("", True), ("!", False)]


def test_truncated_text_is_one_short_unseen_piece(truncated: Explanation) -> None:
    (line,) = build_text_lines(truncated.units)
    assert [piece.is_unseen for piece in line].count(True) == 1 and line[-1].is_unseen
    long = Units("text", "token", ("a",), (False,), ("a" + " word" * 1000,), (0,), ((0, 1),))
    assert len(build_text_lines(long)[0][-1].text) <= MAX_UNSEEN_CHARS + 3


def test_unit_names_replace_the_text_without_offsets() -> None:
    units = build_numbered_units(3, "text", ["[CLS]", "play", "##ing"], [True, False, False])
    assert "".join(piece.text for piece in build_text_lines(units)[0]) == "[CLS] playing".replace(
        "playing", "play##ing"
    )


@pytest.mark.parametrize("character", [chr(i) for i in (*range(32), *range(127, 160), 0x202E, 0x2066, 0xD800, 0xFEFF)])
def test_invisible_characters_are_escaped(character: str) -> None:
    assert character not in escape_invisible(character) and escape_invisible(character).isprintable()
    is_kept = character in "\n\t"
    assert (character in escape_invisible_multiline(character)) == is_kept


def test_direction_marks_are_kept_in_multiline_text() -> None:
    assert escape_invisible_multiline("\u200fשלום") == "\u200fשלום"
    assert escape_invisible("\u200fשלום") == "⟨U+200F⟩שלום"
