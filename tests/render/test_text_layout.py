import pytest

from clearhead import Explanation
from clearhead.render.text_layout import CUT, lines, name, running
from clearhead.units import Units, numbered


def test_the_pieces_are_the_text(text: dict[str, Explanation]) -> None:
    units = text["generic"].units
    (line,) = lines(units)
    assert "".join(piece.text for piece in line if not piece.special) == units.texts[0]
    assert [piece.unit for piece in line if piece.unit is not None] == list(range(len(units)))


def test_a_pair_is_two_lines_and_separators_close_them(pair: Explanation) -> None:
    found = lines(pair.units)
    written = ["".join(piece.text for piece in line if not piece.special) for line in found]
    assert written == list(pair.units.texts)
    assert [line[-1].special for line in found] == [True, True]
    assert sorted(p.unit for line in found for p in line if p.unit is not None) == list(range(len(pair.units)))


def test_units_that_share_characters_show_them_once() -> None:
    offsets = ((0, 1), (0, 1), (0, 1), (1, 2))
    units = Units("text", "token", ("ð", "Ł", "ĺ", "!"), (False,) * 4, ("😀!",), (0,) * 4, offsets)
    (line,) = lines(units)
    assert [(piece.text, piece.hidden) for piece in line] == [("😀", False), ("", True), ("", True), ("!", False)]


def test_what_was_cut_off_is_unseen_and_short(cut: Explanation) -> None:
    (line,) = lines(cut.units)
    assert [piece.unseen for piece in line].count(True) == 1 and line[-1].unseen
    long = Units("text", "token", ("a",), (False,), ("a" + " word" * 1000,), (0,), ((0, 1),))
    assert len(lines(long)[0][-1].text) <= CUT + 3


def test_without_offsets_names_stand_for_the_text() -> None:
    units = numbered(3, "text", ["[CLS]", "play", "##ing"], [True, False, False])
    assert "".join(piece.text for piece in lines(units)[0]) == "[CLS] playing".replace("playing", "play##ing")


@pytest.mark.parametrize("sign", [chr(i) for i in (*range(32), *range(127, 160), 0x202E, 0x2066, 0xD800, 0xFEFF)])
def test_nothing_invisible_is_left(sign: str) -> None:
    assert sign not in name(sign) and name(sign).isprintable()
    kept = sign in "\n\t"
    assert (sign in running(sign)) == kept


def test_marks_of_direction_stay_in_running_text() -> None:
    assert running("\u200fשלום") == "\u200fשלום"
    assert name("\u200fשלום") == "⟨U+200F⟩שלום"
