"""Several streams and several steps on a page, in a terminal and as figures."""

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
from tests.render.conftest import NASTY, made
from tests.render.example_results import KINDS, TEXT, every, picture
from tests.render.static_html import Page, assert_harmless
from tests.render.test_mpl_explanation import drawn, written
from tests.render.test_terminal import printed


def stepped(nasty: Explanation) -> Explanation:
    """Every dangerous string as the name of a step, and as the name of what was found."""
    matrix = np.stack([np.roll(nasty.scores, place) for place in range(len(NASTY))])
    steps = [{**nasty.target, "name": bad, "label": bad, "box": [0, 0, 1, 1]} for bad in NASTY]
    return replace(nasty, matrix=matrix, steps=tuple(NASTY), target={**nasty.target, "kind": "several", "steps": steps})


class TestPage:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_input_is_one_card(self, kind: str) -> None:
        explanation = every()[kind]
        page = html.render_explanations_page([explanation])
        assert_harmless(page)
        assert_harmless(html.render_notebook_html(explanation))
        parsed = Page(page)
        (given,) = parsed.inputs
        assert len(given["cards"]) == 1 and parsed.inside("h1") == [text_labels.format_heading(explanation)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_score_of_every_stream_is_there_without_a_script(self, kind: str) -> None:
        cells = Page(html.render_explanations_page([every()[kind]])).inside("td")
        for part in every()[kind].by_stream.values():
            wanted = [text_labels.format_number(float(score)) for score in part.scores]
            assert any(cells[i : i + len(wanted)] == wanted for i in range(len(cells)))

    def test_hostile_steps_come_out_as_text(self, nasty: Explanation, image: dict[str, Explanation]) -> None:
        hostile = stepped(nasty)
        over = replace(
            image["generic"],
            steps=hostile.steps,
            matrix=np.stack([image["generic"].scores] * len(NASTY)),
            target=hostile.target,
        )
        both = MultiStreamExplanation({"text": hostile, "image": over})
        for explanation in (hostile, over, both):
            assert_harmless(html.render_explanations_page([explanation]))
            said = printed(explanation, colours=False)
            assert not [sign for sign in said if ord(sign) < 32 and sign != "\n"] and "\u202e" not in said
            drawn(plot_explanation(explanation))

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0, 1e-30])
    def test_anything_can_be_shown(self, value: float) -> None:
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
            assert printed(changed) and drawn(plot_explanation(changed)).std() > 0

    def test_methods_agree_stream_by_stream(self) -> None:
        comparison = Comparison(
            dual_models.explainer("clip").explain(text=TEXT, image=picture(), method=["generic", "rollout"])
        )
        (given,) = Page(html.render_explanations_page(list(comparison.explanations.values()))).inputs
        assert [one["stream"] for one in given["agreement"]] == ["Text", "Image"]
        said = printed(render_comparison(comparison), colours=False)
        for tau in comparison.agreements.values():
            assert f"{tau[0, 1]:.2f}".replace("-", "−") in said


class TestTerminal:
    @pytest.mark.parametrize("kind", KINDS)
    def test_everything_that_matters_is_said_without_colours(self, kind: str) -> None:
        explanation = every()[kind]
        said = printed(explanation, colours=False)
        assert text_labels.format_certificate_line(explanation) in said and said.count("capture error") == 1
        inputs, _ = text_labels.split_input_streams(explanation)
        for part in inputs:
            assert all(escape_invisible(unit) in said for unit, _ in part.top(2) if part.units.grid is None)
            assert len(inputs) == 1 or part.stream in said
        for step in explanation.steps or ():
            assert escape_invisible(step) in said

    @pytest.mark.parametrize("kind", KINDS)
    def test_narrow_and_coloured_terminals_do_not_break_it(self, kind: str) -> None:
        assert max(map(len, printed(every()[kind], colours=False, width=40).splitlines())) <= 40
        assert printed(every()[kind], colours=True, width=100)

    def test_a_wide_matrix_keeps_the_strongest_units(self) -> None:
        matrix = np.zeros((30, 200))
        matrix[np.arange(30), np.arange(30) * 6] = 1.0
        wide = made(
            [f"w{i}" for i in range(200)], matrix.sum(0), matrix=matrix, steps=tuple(f"s{i}" for i in range(30))
        )
        said = printed(wide, colours=False, width=80)
        assert "strongest of 200 units" in said and "the first 24 of 30 steps" in said
        table = said.partition("Step by step")[2]
        assert " w6 " in table and " w7 " not in table


class TestFigures:
    @pytest.mark.parametrize("kind", KINDS)
    def test_streams_stand_side_by_side(self, kind: str) -> None:
        explanation = every()[kind]
        figure = plot_explanation(explanation)
        assert drawn(figure).std() > 0
        assert any(text_labels.format_target_line(explanation) in part for part in written(figure))
        inputs, _ = text_labels.split_input_streams(explanation)
        assert len(inputs) == 1 or {part.stream for part in inputs} <= set(written(figure))

    def test_kinds_are_drawn_for_the_streams_that_have_them(self) -> None:
        both = every()["text and picture"]
        assert "text" not in written(plot_explanation(both, "overlay"))  # alone, it needs no heading
        assert {"text", "image"} <= set(written(plot_explanation(both, "bars")))
        for kind, advice in (("matrix", "one row alone"), ("steps", "no steps"), ("frames", "only sounds")):
            with pytest.raises(InputError, match=advice):
                plot_explanation(both, kind)
        with pytest.raises(InputError, match="no regions"):
            plot_explanation(every()["regions without a picture"], "regions")

    @pytest.mark.parametrize(("which", "kind"), [("continuation", "matrix"), ("objects", "steps")])
    def test_rows_are_named(self, which: str, kind: str) -> None:
        explanation: AnyExplanation = every()[which]
        said = written(plot_explanation(explanation, kind))
        assert explanation.steps is not None and all(escape_invisible(step) in said for step in explanation.steps)


class TestWording:
    def test_what_is_explained(self) -> None:
        assert text_labels.format_heading(every()["text and picture"]) == f"Why “{TEXT}”?"
        said = {kind: text_labels.format_target_line(explanation) for kind, explanation in every().items()}
        assert said["text and picture"].startswith(f"cosine with “{TEXT}” = ")
        assert said["text and picture"].endswith("the similarity of both inputs")
        assert said["one object"].endswith("the object detected by query 2")
        assert said["objects"].endswith("the sum of 5 objects")
        assert text_labels.list_predictions(every()["objects"])[0][1] is not None

    def test_a_long_answer_is_shortened(self) -> None:
        long = made(["a"], [1.0])
        long = replace(long, target={**long.target, "name": "word " * 99})
        assert len(text_labels.format_heading(long)) < 99 and "…" in text_labels.format_target_line(long)

    def test_a_difference_of_steps_has_steps_without_descriptions(self) -> None:
        one: Any = every()["continuation"]
        gap = one - one
        assert gap.steps == one.steps and gap.step(1).scores == pytest.approx(0)
        assert text_labels.format_step_titles(gap) == [escape_invisible(step) for step in one.steps]
        assert_harmless(html.render_explanations_page([gap]))
