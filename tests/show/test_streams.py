"""Several streams and several steps on a page, in a terminal and as figures."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, JointExplanation, from_dict
from clearhead.joint import AnyExplanation
from clearhead.show import html, maps, wording
from clearhead.show.figures import plot
from clearhead.show.layout import name
from clearhead.show.terminal import render_comparison
from tests import dual_models
from tests.show.conftest import NASTY, made
from tests.show.streams import STEPS, TEXT, every, frames, picture
from tests.show.test_figures import drawn, written
from tests.show.test_html import Page, assert_harmless
from tests.show.test_terminal import printed

RESULTS = every()


def stepped(nasty: Explanation) -> Explanation:
    """Every dangerous string as the name of a step, and as the name of what was found."""
    matrix = np.stack([np.roll(nasty.scores, place) for place in range(len(NASTY))])
    steps = [{**nasty.target, "name": bad, "label": bad, "box": [0, 0, 1, 1]} for bad in NASTY]
    return replace(nasty, matrix=matrix, steps=tuple(NASTY), target={**nasty.target, "kind": "several", "steps": steps})


class TestPage:
    @pytest.mark.parametrize("kind", RESULTS)
    def test_one_input_is_one_section(self, kind: str) -> None:
        explanation = RESULTS[kind]
        page = html.page([explanation])
        assert_harmless(page)
        assert_harmless(html.fragment(explanation))
        parsed = Page(page)
        assert len(parsed.all("section", "ch-input")) == len(parsed.all("article", "ch-card")) == 1
        assert parsed.inside("h1") == [wording.heading(explanation)]
        for once in ("Certificate", "Get it again"):
            assert parsed.inside("summary").count(once) == 1
        inputs, _ = wording.streams(explanation)
        assert len(parsed.all("div", "ch-stream")) == len(inputs)
        assert parsed.inside("h4") == ([name(part.stream).capitalize() for part in inputs] if len(inputs) > 1 else [])

    @pytest.mark.parametrize("kind", RESULTS)
    def test_every_score_of_every_stream_is_there(self, kind: str) -> None:
        cells = Page(html.page([RESULTS[kind]])).inside("td")
        for part in RESULTS[kind].parts.values():
            full = html.cards.largest(part)
            wanted = [wording.aligned(float(score), full) for score in part.scores]
            assert any(cells[i : i + len(wanted)] == wanted for i in range(len(cells)))

    @pytest.mark.parametrize("kind", RESULTS)
    def test_the_explanation_itself_is_in_the_page(self, kind: str) -> None:
        explanation = RESULTS[kind]
        (data,) = [p for where, p in Page(html.page([explanation])).texts if where == "script" and p[0] == "{"]
        again = from_dict(json.loads(data))
        assert again.streams == explanation.streams and again.steps == explanation.steps

    def test_a_step_for_each_word_and_a_cell_for_each_unit(self) -> None:
        explanation = RESULTS["continuation"]
        assert isinstance(explanation, Explanation) and explanation.steps is not None and explanation.matrix is not None
        parsed = Page(html.page([explanation]))
        chips = parsed.all("button", "ch-chip")
        assert [chip["data-step"] for chip in chips] == [str(i) for i in range(len(explanation.steps))]
        assert [chip["title"] for chip in chips] == wording.step_titles(explanation)
        rows = [found for found in parsed.all("tr") if "data-step" in found]
        assert len(rows) == len(explanation.steps)
        titles = [str(found["title"]) for found in parsed.all("td") if "←" in (found.get("title") or "")]
        first = f"{name(explanation.steps[0])} ← {name(explanation.tokens[1])}: "
        assert len(titles) == explanation.matrix.size and titles[1].startswith(first)
        assert titles[1].endswith(wording.number(float(explanation.matrix[0, 1]), 3))

    def test_what_was_found_is_framed(self) -> None:
        explanation = RESULTS["objects"]
        assert isinstance(explanation, JointExplanation) and explanation.steps is not None
        parsed = Page(html.page([explanation]))
        boxes, count = parsed.all("i", "ch-box"), len(explanation.steps)
        assert len(boxes) == 3 * count  # on the picture, on the heat map, and each on its own map
        assert len(parsed.all("figure")) >= count
        assert "--below:url(data:image/" in next(str(d["style"]) for d in parsed.all("div", "ch-steps"))
        for step, (label, (left, top, right, bottom)) in wording.boxes(explanation).items():
            own = boxes[step]
            assert own["title"] == label and own["data-step"] == str(step)
            edges = [float(edge) for edge in re.findall(r"([\d.e+-]+)%", str(own["style"]))]
            inside = [100 * min(max(edge, 0), 1) for edge in (left, top, right, bottom)]
            wanted = [inside[0], inside[1], inside[2] - inside[0], inside[3] - inside[1]]
            assert edges == pytest.approx(wanted, rel=1e-3, abs=1e-2)
        alone = Page(html.page([RESULTS["one object"]]))
        assert len(alone.all("i", "ch-box")) == 2 and not alone.all("button", "ch-chip")

    def test_queries_are_no_input(self) -> None:
        parsed = Page(html.page([RESULTS["objects"]]))
        assert "All 5 scores of queries" in parsed.inside("summary") and not parsed.all("p", "ch-text")

    def test_regions_lie_over_their_picture(self) -> None:
        regions = RESULTS["text and regions"]["regions"]
        found = Page(html.page([RESULTS["text and regions"]])).all("i", "ch-region")
        assert [region["title"] for region in found] == [wording.hover(regions, i) for i in range(len(regions))]
        bare = Page(html.page([RESULTS["regions without a picture"]]))
        assert not bare.all("i", "ch-region") and "region 3" in " ".join(bare.inside("bdi"))

    def test_a_sound_is_drawn_over_time(self) -> None:
        explanation = RESULTS["sound"]
        assert isinstance(explanation, Explanation)
        parsed = Page(html.page([explanation]))
        moments = parsed.all("i", "ch-moment")
        assert [moment["title"] for moment in moments] == [wording.hover(explanation, i) for i in range(60)]
        assert len(parsed.all("i", "ch-down")) == int((explanation.scores < 0).sum())
        assert {"0.00s", "1.18s"} <= set(parsed.inside("span"))
        long = made([], np.ones(3000), units=frames(3000))
        assert len(Page(html.page([long])).all("i", "ch-moment")) <= 400
        assert len(Page(html.page([RESULTS["sound, step by step"]])).all("td", "ch-strip")) == len(STEPS)

    def test_a_large_matrix_becomes_strips(self) -> None:
        count = maps.CELLS // 40 + 1
        wide = made([f"t{i}" for i in range(count)], np.ones(count), matrix=np.ones((40, count)), steps=("a",) * 40)
        parsed = Page(html.page([wide]))
        assert len(parsed.all("td", "ch-strip")) == 40 and not [c for c in parsed.all("td") if "ch24" in str(c)]

    def test_every_row_can_be_seen(self) -> None:
        every_row = made(["a", "b"], [1.0, 2.0], matrix=np.array([[1.0, 2.0], [0.5, -1.0]]))
        parsed = Page(html.page([every_row]))
        assert "Row by row" in parsed.inside("summary") and len(parsed.all("table", "ch-map")) == 1

    def test_hostile_steps_come_out_as_text(self, nasty: Explanation, image: dict[str, Explanation]) -> None:
        hostile = stepped(nasty)
        over = replace(
            image["generic"],
            steps=hostile.steps,
            matrix=np.stack([image["generic"].scores] * len(NASTY)),
            target=hostile.target,
        )
        both = JointExplanation({"text": hostile, "image": over})
        for explanation in (hostile, over, both):
            assert_harmless(html.page([explanation]))
            said = printed(explanation, colours=False)
            assert not [sign for sign in said if ord(sign) < 32 and sign != "\n"] and "\u202e" not in said
            drawn(plot(explanation))

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0, 1e-30])
    def test_anything_can_be_shown(self, value: float) -> None:
        for kind in RESULTS:
            parts = {
                stream: replace(
                    part,
                    scores=np.full_like(part.scores, value),
                    matrix=None if part.matrix is None else np.full_like(part.matrix, value),
                )
                for stream, part in RESULTS[kind].parts.items()
            }
            changed = JointExplanation(parts)
            assert_harmless(html.page([changed]))
            assert printed(changed) and drawn(plot(changed)).std() > 0

    def test_methods_agree_stream_by_stream(self) -> None:
        comparison = Comparison(
            dual_models.explainer("clip").explain(text=TEXT, image=picture(), method=["generic", "rollout"])
        )
        parsed = Page(html.page(list(comparison.explanations.values())))
        assert len(parsed.all("table", "ch-agree")) == 2 and len(parsed.all("section", "ch-input")) == 1
        said = printed(render_comparison(comparison), colours=False)
        for tau in comparison.agreements.values():
            assert f"{tau[0, 1]:.2f}".replace("-", "−") in said
        assert "ch-wide" in str(parsed.all("div", "ch-methods"))


class TestTerminal:
    @pytest.mark.parametrize("kind", RESULTS)
    def test_everything_that_matters_is_said_without_colours(self, kind: str) -> None:
        explanation = RESULTS[kind]
        said = printed(explanation, colours=False)
        assert wording.certificate_line(explanation) in said and said.count("capture error") == 1
        inputs, _ = wording.streams(explanation)
        for part in inputs:
            assert all(name(unit) in said for unit, _ in part.top(2) if part.units.grid is None)
            assert len(inputs) == 1 or part.stream in said
        for step in explanation.steps or ():
            assert name(step) in said

    @pytest.mark.parametrize("kind", RESULTS)
    def test_narrow_and_coloured_terminals_do_not_break_it(self, kind: str) -> None:
        assert max(map(len, printed(RESULTS[kind], colours=False, width=40).splitlines())) <= 40
        assert printed(RESULTS[kind], colours=True, width=100)

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
    @pytest.mark.parametrize("kind", RESULTS)
    def test_streams_stand_side_by_side(self, kind: str) -> None:
        explanation = RESULTS[kind]
        figure = plot(explanation)
        assert drawn(figure).std() > 0
        assert any(wording.target_line(explanation) in part for part in written(figure))
        inputs, _ = wording.streams(explanation)
        assert len(inputs) == 1 or {part.stream for part in inputs} <= set(written(figure))

    def test_kinds_are_drawn_for_the_streams_that_have_them(self) -> None:
        both = RESULTS["text and picture"]
        assert "text" not in written(plot(both, "overlay"))  # alone, it needs no heading
        assert {"text", "image"} <= set(written(plot(both, "bars")))
        for kind, advice in (("matrix", "one row alone"), ("steps", "no steps"), ("frames", "only sounds")):
            with pytest.raises(InputError, match=advice):
                plot(both, kind)
        with pytest.raises(InputError, match="no regions"):
            plot(RESULTS["regions without a picture"], "regions")

    @pytest.mark.parametrize(("which", "kind"), [("continuation", "matrix"), ("objects", "steps")])
    def test_rows_are_named(self, which: str, kind: str) -> None:
        explanation: AnyExplanation = RESULTS[which]
        said = written(plot(explanation, kind))
        assert explanation.steps is not None and all(name(step) in said for step in explanation.steps)


class TestWording:
    def test_what_is_explained(self) -> None:
        assert wording.heading(RESULTS["text and picture"]) == f"Why “{TEXT}”?"
        said = {kind: wording.target_line(explanation) for kind, explanation in RESULTS.items()}
        assert said["text and picture"].startswith(f"cosine with “{TEXT}” = ")
        assert said["text and picture"].endswith("how alike the two are")
        assert said["one object"].endswith("what is found by query 2")
        assert said["objects"].endswith("the sum of 5 steps")
        assert wording.predictions(RESULTS["objects"])[0][1] is not None

    def test_a_long_answer_is_shortened(self) -> None:
        long = made(["a"], [1.0])
        long = replace(long, target={**long.target, "name": "word " * 99})
        assert len(wording.heading(long)) < 99 and "…" in wording.target_line(long)

    def test_a_difference_of_steps_has_steps_without_descriptions(self) -> None:
        one: Any = RESULTS["continuation"]
        gap = one - one
        assert gap.steps == one.steps and gap.step(1).scores == pytest.approx(0)
        assert wording.step_titles(gap) == [name(step) for step in one.steps]
        assert_harmless(html.page([gap]))
