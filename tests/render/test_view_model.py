"""What the renderer is given."""

import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, MultiStreamExplanation, aggregate, from_dict
from clearhead.links import AttentionLinks
from clearhead.probes import compute_attention_links
from clearhead.probes.attention_view import AttentionView
from clearhead.probes.cross_attention_view import MultiStreamAttentionView
from clearhead.probes.head_patterns import PATTERN_DESCRIPTIONS
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.render import text_labels
from clearhead.render.array_codec import MAX_EXACT_ELEMENTS, encode_array, quantise_sqrt
from clearhead.render.html import render_explanations_page, render_standalone_page
from clearhead.render.text_layout import escape_invisible
from clearhead.render.view_model import build_page_view_model, build_view_model, make_unique_labels
from clearhead.render.views.attention import (
    MAX_INLINE_MAP_BYTES,
    MAX_LINKS_PER_HEAD,
    MAX_PREVIEW_MAP_BYTES,
    max_pool_maps,
)
from clearhead.stats import ConfidenceInterval
from tests import dual_models, joint_models
from tests.render.conftest import made
from tests.render.example_results import KINDS, STEPS, TEXT, every, frames, picture


def numbers(array: dict[str, Any]) -> np.ndarray:
    """What the renderer reads from a packed array."""
    raw = b64decode(array["data"])
    if array["type"] == "f4":
        return np.frombuffer(raw, "<f4").reshape(array["shape"])
    steps = np.frombuffer(raw, np.int8).astype(float)
    return np.where(steps == -128, np.nan, steps * array["step"]).reshape(array["shape"])


def attended(n: int, layers: int = 2, heads: int = 3, sharp: float = 4.0) -> AttentionView:
    """Attention without a model."""
    rng = np.random.default_rng(0)
    weights = np.exp(sharp * rng.normal(size=(layers, heads, n, n)))
    weights /= weights.sum(-1, keepdims=True)
    looks = dict.fromkeys(PATTERN_DESCRIPTIONS, np.zeros((layers, heads))) | {"entropy": np.full((layers, heads), 0.5)}
    depths = {"raw": weights.mean(1)[:, 0], "rollout": weights.mean(1)[:, 0]}
    names = tuple(f"t{place}" for place in range(n))
    return AttentionView("some/model", names, 0, "yes", weights, depths, looks)


def streamed(queries: int, keys: int, n: int = 6, heads: int = 3) -> MultiStreamAttentionView:
    """A stream that looks at itself, and one that looks at another."""
    crossed = attended(max(queries, keys), 2, heads)
    crossed.tokens, crossed.readout_row = tuple(f"q{place}" for place in range(queries)), None
    crossed.key_names = tuple(f"k{place}" for place in range(keys))
    crossed.attention = crossed.attention[:, :, :queries, :keys]
    crossed.scores_by_depth = {"mean of all rows": crossed.attention.mean((1, 2))}
    return MultiStreamAttentionView("some/model", "yes", {"text": attended(n, 2, heads), "text → image": crossed})


def spread(found: AttentionView, layers: int = 12, heads: int = 12) -> AttentionView:
    """One map as if it were that of every head: what a page costs depends on shapes alone, and memory is dear."""
    n = len(found.tokens)
    found.attention = np.broadcast_to(found.attention, (layers, heads, n, n))
    found.scores_by_depth = {kind: np.repeat(rows, layers, 0) for kind, rows in found.scores_by_depth.items()}
    found.head_statistics = {
        kind: np.broadcast_to(part, (layers, heads)) for kind, part in found.head_statistics.items()
    }
    return found


class TestInput:
    def test_the_pieces_are_the_text(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        (stream,) = build_view_model(explanation)["streams"]
        (line,) = stream["lines"]
        assert "".join(piece[0] for piece in line if len(piece) < 3) == explanation.units.texts[0]
        assert [piece[1] for piece in line if len(piece) > 1] == list(range(len(explanation)))

    def test_words_are_another_reading_of_the_same_scores(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        words = build_view_model(explanation)["streams"][0]["words"]
        sums = np.bincount(words["parents"], weights=explanation.scores)
        assert sums == pytest.approx(explanation.words().scores) and words["labels"] == explanation.words().tokens

    def test_methods_on_one_input_stand_together(self, text: dict[str, Explanation], pair: Explanation) -> None:
        both = build_view_model([*text.values(), pair])
        assert both["view"] == "page" and [len(part["cards"]) for part in both["parts"]] == [3, 1]
        (agreement,) = both["parts"][0]["agreement"]
        assert np.array(agreement["values"]) == pytest.approx(Comparison(text).agreement)
        assert build_view_model(Comparison(text)) == build_view_model(text) == build_view_model(list(text.values()))

    def test_two_targets_and_their_contrast_are_three_questions(self) -> None:
        one = made(["a", "b"], [1.0, 2.0])
        other = replace(one, target={**one.target, "name": "no"})
        assert list(make_unique_labels([one, other, one - other])) == ["Why yes?", "Why no?", "Why yes and not no?"]
        assert list(make_unique_labels([one, one])) == ["made-up", "made-up (2)"]
        assert list(make_unique_labels([one, replace(other, method="b")])) == ["made-up of yes", "b of no"]
        assert build_view_model([one, other])["heading"] == "Why?"

    def test_what_people_marked_is_kept_within_the_units(self) -> None:
        (stream,) = build_view_model(made(["a", "b"], [1.0, 2.0]), evidence=[1, 1, 7])["streams"]
        assert stream["evidence"] == [1]

    def test_what_is_marked_or_linked_goes_with_one_input_alone(self) -> None:
        one, other = made(["a", "b"], [1.0, 2.0]), made(["c", "d"], [1.0, 2.0])
        links = [AttentionLinks("text", "text", np.eye(2))]
        for draw in (build_view_model, render_explanations_page):
            with pytest.raises(InputError, match="evidence= is of one input, but 2 were given"):
                draw([one, other], evidence=[1])
            with pytest.raises(InputError, match="links= is of one input, but 2 were given"):
                draw([one, other], links=links)
            assert draw([one, replace(one, method="b")], evidence=[1], links=links)

    def test_layers_have_the_numbers_that_the_model_gives_them(self, text: dict[str, Explanation]) -> None:
        later = replace(text["generic"], provenance={**text["generic"].provenance, "layers": [3, 6]})
        layers = build_view_model(later)["cards"][0]["streams"]["text"]["arrays"]["layers"]
        assert layers["rows"] == ["3", "4", "5"]
        assert later.per_layer is not None and numbers(layers) == pytest.approx(later.per_layer, rel=1e-6)

    def test_scores_that_add_up_say_from_where_to_where(self) -> None:
        assert build_view_model(replace(made(["a"], [1.0]), base_value=0.5))["cards"][0]["force"] == {
            "base": 0.5,
            "value": 1.5,
            "scale": "logit",
        }
        assert build_view_model(made(["a"], [1.0]))["cards"][0]["force"] is None

    def test_an_empty_list_is_refused(self) -> None:
        with pytest.raises(InputError, match="nothing to show"):
            build_view_model([])


class TestStreams:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_stream_has_its_units_and_scores(self, kind: str) -> None:
        explanation = every()[kind]
        given = build_view_model(explanation)
        json.dumps(given, allow_nan=False)
        inputs, rest = text_labels.split_input_streams(explanation)
        assert [(s["stream"], s["input"]) for s in given["streams"]] == [
            *((part.stream, True) for part in inputs),
            *((part.stream, False) for part in rest),
        ]
        again = from_dict(given["cards"][0]["explanation"])
        assert again.streams == explanation.streams and again.steps == explanation.steps
        for stream in given["streams"]:
            part = explanation[stream["stream"]]
            assert stream["labels"] == [text_labels.format_unit_label(part, place) for place in range(len(part))]
            assert again[part.stream].scores == pytest.approx(part.scores)

    def test_a_row_for_each_step_and_a_number_for_each_unit(self) -> None:
        explanation = every()["continuation"]
        assert isinstance(explanation, Explanation) and explanation.steps is not None and explanation.matrix is not None
        (card,) = build_view_model(explanation)["cards"]
        assert [step["title"] for step in card["steps"]] == text_labels.format_step_titles(explanation)
        matrix = card["streams"][explanation.stream]["arrays"]["matrix"]
        assert matrix["corner"] == "step" and matrix["rows"] == [escape_invisible(step) for step in explanation.steps]
        assert numbers(matrix) == pytest.approx(explanation.matrix, rel=1e-6)

    def test_what_was_found_is_framed(self) -> None:
        explanation = every()["objects"]
        assert isinstance(explanation, MultiStreamExplanation) and explanation.steps is not None
        found = build_view_model(explanation)["found"]
        assert {box["step"]: (box["label"], tuple(box["box"])) for box in found} == text_labels.find_detected_boxes(
            explanation
        )
        assert len(found) == len(explanation.steps) and len(build_view_model(every()["one object"])["found"]) == 1

    def test_regions_without_a_picture_are_a_list(self) -> None:
        shapes = {
            kind: {s["stream"]: s["shape"] for s in build_view_model(every()[kind])["streams"]}
            for kind in ("text and regions", "regions without a picture", "text and picture", "sound")
        }
        assert shapes["text and regions"]["regions"] == "boxes" and shapes["text and picture"]["image"] == "grid"
        assert shapes["regions without a picture"]["regions"] == "list" and shapes["sound"] == {"audio": "time"}

    def test_a_long_sound_has_few_moments(self) -> None:
        long = build_view_model(made([], np.ones(3000), units=frames(3000)))
        assert len(long["cards"][0]["streams"]["audio"]["moments"]) <= 400
        steps = build_view_model(every()["sound, step by step"])["cards"][0]["steps"]
        assert [step["name"] for step in steps] == list(STEPS)

    def test_every_row_can_be_seen(self) -> None:
        matrix = np.array([[1.0, 2.0], [0.5, -1.0]])
        given = build_view_model(made(["a", "b"], [1.0, 2.0], matrix=matrix))["cards"][0]["streams"]["text"]["arrays"][
            "matrix"
        ]
        assert given["corner"] == "row" and numbers(given).tolist() == matrix.tolist()


class TestPacking:
    def test_large_arrays_are_rounded_to_a_part_of_the_largest(self) -> None:
        values = np.random.default_rng(0).normal(size=(MAX_EXACT_ELEMENTS // 100 + 1, 100))
        values[3, 4] = np.nan
        given = encode_array(values, vmax=2.0)
        assert given["type"] == "i1" and given["full"] == 2.0
        assert np.abs(numbers(given) - values)[~np.isnan(values)].max() <= np.nanmax(np.abs(values)) / 127 / 2 + 1e-12
        assert np.isnan(numbers(given)[3, 4])

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
    def test_anything_can_be_packed(self, value: float) -> None:
        given = encode_array(np.full(MAX_EXACT_ELEMENTS + 1, value), 1.0)
        json.dumps(given, allow_nan=False)
        assert np.isnan(numbers(given)).all() if value != 0 else (numbers(given) == 0).all()


class TestLinks:
    def test_words_and_regions_look_at_one_another(self) -> None:
        lxmert = joint_models.explainer("lxmert")
        given = {"text": TEXT, "regions": joint_models.regions(4)}
        to, back = compute_attention_links(lxmert, **given)
        e = lxmert.explain(**given)
        assert to.weights.shape == back.weights.T.shape == (len(e["text"]), len(e["regions"]))
        tape = lxmert.record(**given, requires="attention")
        for one, ends in ((to, ("text", "regions")), (back, ("regions", "text"))):
            calls = [c for c in tape.calls if (c.query_stream, c.key_stream) == ends]
            assert one.weights[1, 2] == pytest.approx(np.mean([float(c.attention[0, :, 1, 2].mean()) for c in calls]))  # type: ignore[index]
        made = build_view_model(e, links=(to, back))["links"]
        assert [(way["from"], way["to"]) for way in made["ways"]] == [("text", "regions"), ("regions", "text")]
        assert len(made["ends"]["regions"]["boxes"]) == 4 and len(made["ends"]["text"]["labels"]) == len(e["text"])
        assert build_view_model(e)["links"] is None

    def test_of_one_sequence_each_stream_has_its_own_places(self) -> None:
        vilt, (given, *_) = joint_models.explainer("vilt"), joint_models.inputs("vilt")
        to, back = compute_attention_links(vilt, **given)
        e = vilt.explain(**given)
        words, patches = len(e["text"]), len(e["image"])
        calls = [call.attention[0].mean(0) for call in vilt.record(**given, requires="attention").calls]  # type: ignore[index]
        whole = np.mean([call.detach().numpy() for call in calls], axis=0)
        assert to.weights == pytest.approx(whole[:words, words : words + patches])
        assert back.weights == pytest.approx(whole[words : words + patches, :words])

    def test_there_are_none_where_neither_looks_at_the_other(self) -> None:
        assert compute_attention_links(dual_models.explainer("clip"), text=TEXT, image=picture()) == ()


class TestAttention:
    def test_a_short_input_has_every_weight(self) -> None:
        found = attended(7)
        given = build_view_model(found)
        bytes_ = np.frombuffer(b64decode(given["tiles"]["data"]), np.uint8).reshape(given["tiles"]["shape"])
        # A byte is a square root: the error is at most half a step of it.
        assert np.abs(np.sqrt(found.attention) - bytes_ / 255).max() <= 0.5 / 255 + 1e-9
        assert given["size"] == [7, 7] and "links" not in given

    def test_pooling_loses_no_peak(self) -> None:
        maps = np.random.default_rng(0).uniform(size=(2, 10, 10))
        small = max_pool_maps(maps, (4, 4))
        starts = [0, 2, 5, 7, 10]
        for row, column in np.ndindex(4, 4):
            block = maps[:, starts[row] : starts[row + 1], starts[column] : starts[column + 1]]
            assert (small[:, row, column] == block.max((1, 2))).all()
        assert max_pool_maps(maps, (10, 10)) is maps
        assert (max_pool_maps(maps, (10, 2)) == np.stack([maps[..., :5].max(-1), maps[..., 5:].max(-1)], -1)).all()

    def test_a_thousand_tokens_and_every_head_stay_below_three_megabytes(self) -> None:
        found = spread(attended(1000, 1, 1))
        given = build_view_model(found)
        assert (
            np.prod(given["size"]) * 144 <= MAX_INLINE_MAP_BYTES
            and len(given["links"][0][0]["weights"]["data"]) >= MAX_LINKS_PER_HEAD
        )
        assert len(given["graph"]["units"]) == 40 and given["graph"]["of"] == 1000
        assert len(render_standalone_page(build_page_view_model([given], "Attention")).encode()) < 3_000_000

    def test_maps_that_are_fetched_one_by_one_leave_a_small_document(self) -> None:
        given = build_view_model(attended(60, 12, 12), inline=False)
        assert given["size"] == [40, 40] and "links" not in given and len(json.dumps(given)) < 400_000

    @pytest.mark.parametrize(("queries", "keys"), [(5, 9), (300, 20), (3, 900)])
    def test_maps_from_one_stream_to_another_keep_to_their_share(self, queries: int, keys: int) -> None:
        found = streamed(queries, keys, 200, 12)
        given, crossed = build_view_model(found, inline=False), found["text → image"]
        bytes_ = [np.prod(own["tiles"]["shape"]) for own in given["maps"]]
        assert [own["name"] for own in given["maps"]] == ["text", "text → image"] and sum(
            bytes_
        ) <= 1.1 * MAX_PREVIEW_MAP_BYTES
        own = given["maps"][1]
        assert "graph" not in own and own["row"] is None and len(own["keys"]) == keys
        tiles = np.frombuffer(b64decode(own["tiles"]["data"]), np.uint8).reshape(own["tiles"]["shape"])
        assert tiles.shape[2:] == tuple(own["size"])
        assert (tiles.max((2, 3)) == quantise_sqrt(crossed.attention.max((2, 3)))).all()  # no peak is lost


def test_many_inputs_and_probes_have_documents(text: dict[str, Explanation]) -> None:
    words = aggregate([text["generic"]])
    assert build_view_model(words)["rows"] == [list(row) for row in words.rows]
    figure = ProbeEstimate("accuracy", ConfidenceInterval(0.5, 0.4, 0.6, 10), "how often")
    given = build_view_model(
        ProbeResult("uniform", "m", {"seed": 0}, [{}] * 10, [figure], "So.", {"weight": [[1.0, 2.0]]})
    )
    assert given["figures"][0]["low"] == 0.4 and numbers(given["maps"]["weight"]).tolist() == [[1.0, 2.0]]
