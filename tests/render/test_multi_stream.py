"""Multi-stream and multi-step explanations as page, terminal output and figures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, MultiStreamExplanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import html, text_labels
from clearhead.render.mpl.explanation import plot_explanation
from clearhead.render.terminal import render_comparison
from clearhead.render.text_layout import escape_invisible
from tests import dual_models
from tests.render.conftest import HOSTILE_STRINGS, make_explanation
from tests.render.example_results import KINDS, TEXT, every, picture
from tests.render.static_html import Page, assert_harmless
from tests.render.test_mpl_explanation import drawn, written
from tests.render.test_terminal import render_to_string


def with_hostile_steps(hostile: Explanation) -> Explanation:
    """Add steps whose names and labels are hostile strings."""
    matrix = np.stack([np.roll(hostile.scores, shift) for shift in range(len(HOSTILE_STRINGS))])
    steps = [{**hostile.target, "name": name, "label": name, "box": [0, 0, 1, 1]} for name in HOSTILE_STRINGS]
    return replace(
        hostile,
        matrix=matrix,
        steps=tuple(HOSTILE_STRINGS),
        target={**hostile.target, "kind": "multiple", "steps": steps},
    )


class TestPage:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_input_is_one_card(self, kind: str) -> None:
        explanation = every()[kind]
        page = html.render_explanations_page([explanation])
        assert_harmless(page)
        assert_harmless(html.render_notebook_html(explanation))
        parsed = Page(page)
        (input_view,) = parsed.inputs
        assert len(input_view["cards"]) == 1 and parsed.inside("h1") == [text_labels.format_heading(explanation)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_static_page_lists_every_score_of_every_stream(self, kind: str) -> None:
        cells = Page(html.render_explanations_page([every()[kind]])).inside("td")
        for explanation in every()[kind].by_stream.values():
            expected = [text_labels.format_number(float(score)) for score in explanation.scores]
            assert any(cells[i : i + len(expected)] == expected for i in range(len(cells)))

    def test_hostile_step_names_are_escaped(self, hostile: Explanation, image: dict[str, Explanation]) -> None:
        text_explanation = with_hostile_steps(hostile)
        image_explanation = replace(
            image["generic"],
            steps=text_explanation.steps,
            matrix=np.stack([image["generic"].scores] * len(HOSTILE_STRINGS)),
            target=text_explanation.target,
        )
        both = MultiStreamExplanation({"text": text_explanation, "image": image_explanation})
        for explanation in (text_explanation, image_explanation, both):
            assert_harmless(html.render_explanations_page([explanation]))
            output = render_to_string(explanation, colours=False)
            assert not [character for character in output if ord(character) < 32 and character != "\n"]
            assert "\u202e" not in output
            drawn(plot_explanation(explanation))

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0, 1e-30])
    def test_degenerate_scores_are_rendered(self, value: float) -> None:
        for kind in KINDS:
            parts = {
                stream: replace(
                    part,
                    scores=np.full_like(part.scores, value),
                    matrix=None if part.matrix is None else np.full_like(part.matrix, value),
                )
                for stream, part in every()[kind].by_stream.items()
            }
            changed = MultiStreamExplanation(parts)
            assert_harmless(html.render_explanations_page([changed]))
            assert render_to_string(changed) and drawn(plot_explanation(changed)).std() > 0

    def test_agreement_is_reported_per_stream(self) -> None:
        comparison = Comparison(
            dual_models.explainer("clip").explain(text=TEXT, image=picture(), method=["generic", "rollout"])
        )
        (input_view,) = Page(html.render_explanations_page(list(comparison.explanations.values()))).inputs
        assert [agreement["stream"] for agreement in input_view["agreement"]] == ["Text", "Image"]
        output = render_to_string(render_comparison(comparison), colours=False)
        for tau in comparison.agreements.values():
            assert f"{tau[0, 1]:.2f}".replace("-", "−") in output


class TestTerminal:
    @pytest.mark.parametrize("kind", KINDS)
    def test_plain_output_has_certificate_units_and_steps(self, kind: str) -> None:
        explanation = every()[kind]
        output = render_to_string(explanation, colours=False)
        assert text_labels.format_certificate_line(explanation) in output and output.count("capture error") == 1
        inputs, _ = text_labels.split_input_streams(explanation)
        for part in inputs:
            assert all(escape_invisible(unit) in output for unit, _ in part.top(2) if part.units.grid is None)
            assert len(inputs) == 1 or part.stream in output
        for step in explanation.steps or ():
            assert escape_invisible(step) in output

    @pytest.mark.parametrize("kind", KINDS)
    def test_output_fits_a_narrow_terminal(self, kind: str) -> None:
        assert max(map(len, render_to_string(every()[kind], colours=False, width=40).splitlines())) <= 40
        assert render_to_string(every()[kind], colours=True, width=100)

    def test_wide_matrix_keeps_the_strongest_units(self) -> None:
        matrix = np.zeros((30, 200))
        matrix[np.arange(30), np.arange(30) * 6] = 1.0
        wide = make_explanation(
            [f"w{i}" for i in range(200)], matrix.sum(0), matrix=matrix, steps=tuple(f"s{i}" for i in range(30))
        )
        output = render_to_string(wide, colours=False, width=80)
        assert "strongest of 200 units" in output and "the first 24 of 30 steps" in output
        table = output.partition("Step by step")[2]
        assert " w6 " in table and " w7 " not in table


class TestFigures:
    @pytest.mark.parametrize("kind", KINDS)
    def test_figure_shows_target_and_every_input_stream(self, kind: str) -> None:
        explanation = every()[kind]
        figure = plot_explanation(explanation)
        assert drawn(figure).std() > 0
        assert any(text_labels.format_target_line(explanation) in part for part in written(figure))
        inputs, _ = text_labels.split_input_streams(explanation)
        assert len(inputs) == 1 or {part.stream for part in inputs} <= set(written(figure))

    def test_plot_kinds_need_a_stream_that_supports_them(self) -> None:
        image_text = every()["text and picture"]
        assert "text" not in written(plot_explanation(image_text, "overlay"))  # a single stream needs no heading
        assert {"text", "image"} <= set(written(plot_explanation(image_text, "bars")))
        for kind, advice in (("matrix", "only one row"), ("steps", "no steps"), ("frames", "only audio")):
            with pytest.raises(InputError, match=advice):
                plot_explanation(image_text, kind)
        with pytest.raises(InputError, match="no image regions"):
            plot_explanation(every()["regions without a picture"], "regions")

    @pytest.mark.parametrize(("which", "kind"), [("continuation", "matrix"), ("objects", "steps")])
    def test_matrix_and_step_plots_name_the_steps(self, which: str, kind: str) -> None:
        explanation: AnyExplanation = every()[which]
        labels = written(plot_explanation(explanation, kind))
        assert explanation.steps is not None and all(escape_invisible(step) in labels for step in explanation.steps)


class TestWording:
    def test_heading_and_target_line_name_the_target(self) -> None:
        assert text_labels.format_heading(every()["text and picture"]) == f"Why “{TEXT}”?"
        target_lines = {kind: text_labels.format_target_line(explanation) for kind, explanation in every().items()}
        assert target_lines["text and picture"].startswith(f"cosine with “{TEXT}” = ")
        assert target_lines["text and picture"].endswith("the similarity of both inputs")
        assert target_lines["one object"].endswith("the object detected by query 2")
        assert target_lines["objects"].endswith("the sum of 5 objects")
        assert text_labels.list_predictions(every()["objects"])[0][1] is not None

    def test_long_target_name_is_shortened(self) -> None:
        long = make_explanation(["a"], [1.0])
        long = replace(long, target={**long.target, "name": "word " * 99})
        assert len(text_labels.format_heading(long)) < 99 and "…" in text_labels.format_target_line(long)

    def test_difference_of_explanations_keeps_the_steps(self) -> None:
        explanation: Any = every()["continuation"]
        difference = explanation - explanation
        assert difference.steps == explanation.steps and difference.step(1).scores == pytest.approx(0)
        assert text_labels.format_step_titles(difference) == [escape_invisible(step) for step in explanation.steps]
        assert_harmless(html.render_explanations_page([difference]))
