from io import StringIO

import numpy as np
from rich.console import Console, RenderableType

from clearhead import Comparison, Explanation, aggregate
from clearhead.render import text_labels
from clearhead.render.terminal import render_aggregate, render_comparison, render_explanation
from clearhead.render.terminal import render_coloured_text as coloured
from clearhead.render.text_layout import escape_invisible
from tests.render.conftest import HOSTILE_STRINGS, Change, make_explanation, with_intervals


def render_to_string(renderable: RenderableType, colours: bool = True, width: int = 100) -> str:
    file = StringIO()
    Console(width=width, file=file, force_terminal=colours, color_system="truecolor" if colours else None).print(
        renderable
    )
    return file.getvalue()


def test_plain_output_has_target_certificate_and_predictions(text: dict[str, Explanation]) -> None:
    explanation = text["input-x-gradient"]
    output = render_to_string(explanation, colours=False)
    assert "\x1b" not in output
    assert (
        text_labels.format_target_line(explanation) in output
        and text_labels.format_certificate_line(explanation) in output
    )
    for line in explanation.units.texts[0].split("\n"):
        assert line in output
    for unit, _ in explanation.top(3):
        assert escape_invisible(unit) in output
    for row in explanation.prediction["top"]:
        assert row["label"] in output and text_labels.format_percent(row["probability"]) in output


def test_coloured_text_preserves_the_text(text: dict[str, Explanation], pair: Explanation) -> None:
    explanation = text["generic"]
    assert coloured(explanation).plain == f"[CLS] {explanation.units.texts[0]} [SEP] "
    assert [line for line in pair.units.texts if line not in coloured(pair).plain] == []


def test_control_characters_are_escaped(hostile: Explanation) -> None:
    for renderable in (hostile, Comparison({HOSTILE_STRINGS[6]: hostile, HOSTILE_STRINGS[7]: hostile})):
        output = render_to_string(renderable, colours=False)
        assert not [character for character in output if ord(character) < 32 and character != "\n"]
        assert "\u202e" not in output and "\x9b" not in output


def test_brackets_are_not_parsed_as_markup() -> None:
    from tests.render.conftest import make_explanation

    assert "[bold]x[/bold]" in render_to_string(make_explanation(["[bold]x[/bold]", "[/]"], [1.0, 0.5]), colours=False)


def test_truncation_is_reported(truncated: Explanation) -> None:
    assert "tokens were truncated" in render_to_string(truncated, colours=False)
    assert "tokens truncated" in render_to_string(truncated, colours=False).splitlines()[-1]


def test_degenerate_scores_are_rendered(
    change: Change, text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    for explanation in (text["attcat"], image["attcat"]):
        for colours in (True, False):
            assert render_to_string(render_explanation(change(explanation)), colours)


def test_image_is_shown_next_to_its_heat_map(image: dict[str, Explanation]) -> None:
    output = render_to_string(image["generic"])
    assert "picture" in output and "heat map" in output and output.count("▀") > 2 * 36 * 16
    assert "▀" not in render_to_string(image["generic"], colours=False)


def test_comparison_lists_methods_and_agreement(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanations in (text, image):
        comparison = Comparison(explanations)
        output = render_to_string(render_comparison(comparison), colours=False, width=140)
        for method in explanations:
            assert method in output
        for tau in comparison.agreement[np.triu_indices(len(explanations))]:
            assert f"{tau:.2f}".replace("-", "−") in output


def test_aggregate_is_rendered_as_bars(text: dict[str, Explanation]) -> None:
    aggregated = aggregate([text["attcat"]] * 2)
    output = render_to_string(render_aggregate(aggregated, max_rows=4), colours=False)
    assert len(output.strip().splitlines()) == 5 and "━" in output
    rows = sorted(aggregated.rows, key=lambda row: -abs(row[1]))[:4]
    assert all(name in output for name, _, _ in rows)


def test_output_fits_a_narrow_terminal(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    for explanation in (*text.values(), *image.values()):
        assert max(map(len, render_to_string(explanation, colours=False, width=40).splitlines())) <= 40


def test_regression_explanation_is_rendered(regression: Explanation) -> None:
    output = render_to_string(regression, colours=False)
    for row in regression.prediction["top"]:
        assert row["label"] in output and text_labels.format_number(row["logit"]) in output
    assert f"output of {regression.target['name']}" in output and "the predicted value" in output
    assert render_to_string(Comparison({"a": regression, "b": regression}), colours=False)


def test_half_widths_of_intervals_are_shown() -> None:
    explanation = make_explanation(["good", "bad"], [0.5, -1.0])
    assert "±" not in render_to_string(render_explanation(explanation), colours=False)
    output = render_to_string(render_explanation(with_intervals(explanation, [0.25, 0.125])), colours=False)
    assert "± 90 % interval" in output
    assert "0.50 ± 0.25" in output and "−1.00 ± 0.12" in output
