from io import StringIO

import numpy as np
from rich.console import Console, RenderableType

from clearhead import Comparison, Explanation, aggregate
from clearhead.render import text_labels
from clearhead.render.terminal import render_aggregate, render_comparison, render_explanation
from clearhead.render.terminal import render_coloured_text as coloured
from clearhead.render.text_layout import escape_invisible
from tests.render.conftest import NASTY, Change


def printed(what: RenderableType, colours: bool = True, width: int = 100) -> str:
    file = StringIO()
    Console(width=width, file=file, force_terminal=colours, color_system="truecolor" if colours else None).print(what)
    return file.getvalue()


def test_everything_that_matters_is_said_without_colours(text: dict[str, Explanation]) -> None:
    explanation = text["input-x-gradient"]
    said = printed(explanation, colours=False)
    assert "\x1b" not in said
    assert (
        text_labels.format_target_line(explanation) in said and text_labels.format_certificate_line(explanation) in said
    )
    for line in explanation.units.texts[0].split("\n"):
        assert line in said
    for unit, _ in explanation.top(3):
        assert escape_invisible(unit) in said
    for row in explanation.prediction["top"]:
        assert row["label"] in said and text_labels.format_percent(row["probability"]) in said


def test_the_coloured_text_is_the_text(text: dict[str, Explanation], pair: Explanation) -> None:
    explanation = text["generic"]
    assert coloured(explanation).plain == f"[CLS] {explanation.units.texts[0]} [SEP] "
    assert [part for part in pair.units.texts if part not in coloured(pair).plain] == []


def test_no_control_character_reaches_the_terminal(nasty: Explanation) -> None:
    for what in (nasty, Comparison({NASTY[6]: nasty, NASTY[7]: nasty})):
        said = printed(what, colours=False)
        assert not [sign for sign in said if ord(sign) < 32 and sign != "\n"]
        assert "\u202e" not in said and "\x9b" not in said


def test_brackets_are_not_read_as_styles() -> None:
    from tests.render.conftest import made

    assert "[bold]x[/bold]" in printed(made(["[bold]x[/bold]", "[/]"], [1.0, 0.5]), colours=False)


def test_truncation_is_loud(cut: Explanation) -> None:
    assert "tokens were truncated" in printed(cut, colours=False)
    assert "tokens truncated" in printed(cut, colours=False).splitlines()[-1]


def test_anything_can_be_shown(change: Change, text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (text["attcat"], image["attcat"]):
        for colours in (True, False):
            assert printed(render_explanation(change(explanation)), colours)


def test_a_picture_stands_beside_its_heat_map(image: dict[str, Explanation]) -> None:
    said = printed(image["generic"])
    assert "picture" in said and "heat map" in said and said.count("▀") > 2 * 36 * 16
    assert "▀" not in printed(image["generic"], colours=False)


def test_methods_and_their_agreement(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for found in (text, image):
        comparison = Comparison(found)
        said = printed(render_comparison(comparison), colours=False, width=140)
        for method in found:
            assert method in said
        for tau in comparison.agreement[np.triu_indices(len(found))]:
            assert f"{tau:.2f}".replace("-", "−") in said


def test_an_aggregate_is_bars(text: dict[str, Explanation]) -> None:
    found = aggregate([text["attcat"]] * 2)
    said = printed(render_aggregate(found, max_rows=4), colours=False)
    assert len(said.strip().splitlines()) == 5 and "━" in said
    shown = sorted(found.rows, key=lambda row: -abs(row[1]))[:4]
    assert all(what in said for what, _, _ in shown)


def test_narrow_terminals_do_not_break_it(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (*text.values(), *image.values()):
        assert max(map(len, printed(explanation, colours=False, width=40).splitlines())) <= 40


def test_a_measuring_model_is_shown(regression: Explanation) -> None:
    said = printed(regression, colours=False)
    for row in regression.prediction["top"]:
        assert row["label"] in said and text_labels.format_number(row["logit"]) in said
    assert f"output of {regression.target['name']}" in said and "the predicted value" in said
    assert printed(Comparison({"a": regression, "b": regression}), colours=False)
