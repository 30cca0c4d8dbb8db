"""What the renderer is given."""

import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead import Comparison, Explanation, InputError, JointExplanation, aggregate, from_dict
from clearhead.links import Links
from clearhead.probes import links
from clearhead.probes.attention_view import AttentionView
from clearhead.probes.cross_attention_view import StreamsView
from clearhead.probes.head_patterns import READINGS
from clearhead.probes.probe_result import Finding, ProbeResult
from clearhead.render import text_labels
from clearhead.render.array_codec import EXACT, packed, quantised
from clearhead.render.html import alone, page
from clearhead.render.text_layout import name
from clearhead.render.view_model import document, labelled, whole_page
from clearhead.render.views.attention import BUDGET, LINKS, SMALL, pooled
from clearhead.stats import Interval
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
    looks = dict.fromkeys(READINGS, np.zeros((layers, heads))) | {"entropy": np.full((layers, heads), 0.5)}
    depths = {"raw": weights.mean(1)[:, 0], "rollout": weights.mean(1)[:, 0]}
    names = tuple(f"t{place}" for place in range(n))
    return AttentionView("some/model", names, 0, "yes", weights, depths, looks)


def streamed(queries: int, keys: int, n: int = 6, heads: int = 3) -> StreamsView:
    """A stream that looks at itself, and one that looks at another."""
    crossed = attended(max(queries, keys), 2, heads)
    crossed.tokens, crossed.row = tuple(f"q{place}" for place in range(queries)), None
    crossed.keys = tuple(f"k{place}" for place in range(keys))
    crossed.attention = crossed.attention[:, :, :queries, :keys]
    crossed.by_depth = {"mean of all rows": crossed.attention.mean((1, 2))}
    return StreamsView("some/model", "yes", {"text": attended(n, 2, heads), "text → image": crossed})


def spread(found: AttentionView, layers: int = 12, heads: int = 12) -> AttentionView:
    """One map as if it were that of every head: what a page costs depends on shapes alone, and memory is dear."""
    n = len(found.tokens)
    found.attention = np.broadcast_to(found.attention, (layers, heads, n, n))
    found.by_depth = {kind: np.repeat(rows, layers, 0) for kind, rows in found.by_depth.items()}
    found.looks = {kind: np.broadcast_to(part, (layers, heads)) for kind, part in found.looks.items()}
    return found


class TestInput:
    def test_the_pieces_are_the_text(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        (stream,) = document(explanation)["streams"]
        (line,) = stream["lines"]
        assert "".join(piece[0] for piece in line if len(piece) < 3) == explanation.units.texts[0]
        assert [piece[1] for piece in line if len(piece) > 1] == list(range(len(explanation)))

    def test_words_are_another_reading_of_the_same_scores(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        words = document(explanation)["streams"][0]["words"]
        sums = np.bincount(words["parents"], weights=explanation.scores)
        assert sums == pytest.approx(explanation.words().scores) and words["labels"] == explanation.words().tokens

    def test_methods_on_one_input_stand_together(self, text: dict[str, Explanation], pair: Explanation) -> None:
        both = document([*text.values(), pair])
        assert both["view"] == "page" and [len(part["cards"]) for part in both["parts"]] == [3, 1]
        (agreement,) = both["parts"][0]["agreement"]
        assert np.array(agreement["values"]) == pytest.approx(Comparison(text).agreement)
        assert document(Comparison(text)) == document(text) == document(list(text.values()))

    def test_two_targets_and_their_contrast_are_three_questions(self) -> None:
        one = made(["a", "b"], [1.0, 2.0])
        other = replace(one, target={**one.target, "name": "no"})
        assert list(labelled([one, other, one - other])) == ["Why yes?", "Why no?", "Why yes and not no?"]
        assert list(labelled([one, one])) == ["made-up", "made-up (2)"]
        assert list(labelled([one, replace(other, method="b")])) == ["made-up of yes", "b of no"]
        assert document([one, other])["heading"] == "Why?"

    def test_what_people_marked_is_kept_within_the_units(self) -> None:
        (stream,) = document(made(["a", "b"], [1.0, 2.0]), evidence=[1, 1, 7])["streams"]
        assert stream["evidence"] == [1]

    def test_what_is_marked_or_linked_goes_with_one_input_alone(self) -> None:
        one, other = made(["a", "b"], [1.0, 2.0]), made(["c", "d"], [1.0, 2.0])
        links = [Links("text", "text", np.eye(2))]
        for draw in (document, page):
            with pytest.raises(InputError, match="evidence= is of one input, but 2 were given"):
                draw([one, other], evidence=[1])
            with pytest.raises(InputError, match="links= is of one input, but 2 were given"):
                draw([one, other], links=links)
            assert draw([one, replace(one, method="b")], evidence=[1], links=links)

    def test_layers_have_the_numbers_that_the_model_gives_them(self, text: dict[str, Explanation]) -> None:
        later = replace(text["generic"], provenance={**text["generic"].provenance, "layers": [3, 6]})
        layers = document(later)["cards"][0]["streams"]["text"]["arrays"]["layers"]
        assert layers["rows"] == ["3", "4", "5"]
        assert later.per_layer is not None and numbers(layers) == pytest.approx(later.per_layer, rel=1e-6)

    def test_scores_that_add_up_say_from_where_to_where(self) -> None:
        assert document(replace(made(["a"], [1.0]), base_value=0.5))["cards"][0]["force"] == {
            "base": 0.5,
            "value": 1.5,
            "scale": "logit",
        }
        assert document(made(["a"], [1.0]))["cards"][0]["force"] is None

    def test_an_empty_list_is_refused(self) -> None:
        with pytest.raises(InputError, match="nothing to show"):
            document([])


class TestStreams:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_stream_has_its_units_and_scores(self, kind: str) -> None:
        explanation = every()[kind]
        given = document(explanation)
        json.dumps(given, allow_nan=False)
        inputs, rest = text_labels.streams(explanation)
        assert [(s["stream"], s["input"]) for s in given["streams"]] == [
            *((part.stream, True) for part in inputs),
            *((part.stream, False) for part in rest),
        ]
        again = from_dict(given["cards"][0]["explanation"])
        assert again.streams == explanation.streams and again.steps == explanation.steps
        for stream in given["streams"]:
            part = explanation[stream["stream"]]
            assert stream["labels"] == [text_labels.unit_label(part, place) for place in range(len(part))]
            assert again[part.stream].scores == pytest.approx(part.scores)

    def test_a_row_for_each_step_and_a_number_for_each_unit(self) -> None:
        explanation = every()["continuation"]
        assert isinstance(explanation, Explanation) and explanation.steps is not None and explanation.matrix is not None
        (card,) = document(explanation)["cards"]
        assert [step["title"] for step in card["steps"]] == text_labels.step_titles(explanation)
        matrix = card["streams"][explanation.stream]["arrays"]["matrix"]
        assert matrix["corner"] == "step" and matrix["rows"] == [name(step) for step in explanation.steps]
        assert numbers(matrix) == pytest.approx(explanation.matrix, rel=1e-6)

    def test_what_was_found_is_framed(self) -> None:
        explanation = every()["objects"]
        assert isinstance(explanation, JointExplanation) and explanation.steps is not None
        found = document(explanation)["found"]
        assert {box["step"]: (box["label"], tuple(box["box"])) for box in found} == text_labels.boxes(explanation)
        assert len(found) == len(explanation.steps) and len(document(every()["one object"])["found"]) == 1

    def test_regions_without_a_picture_are_a_list(self) -> None:
        shapes = {
            kind: {s["stream"]: s["shape"] for s in document(every()[kind])["streams"]}
            for kind in ("text and regions", "regions without a picture", "text and picture", "sound")
        }
        assert shapes["text and regions"]["regions"] == "boxes" and shapes["text and picture"]["image"] == "grid"
        assert shapes["regions without a picture"]["regions"] == "list" and shapes["sound"] == {"audio": "time"}

    def test_a_long_sound_has_few_moments(self) -> None:
        long = document(made([], np.ones(3000), units=frames(3000)))
        assert len(long["cards"][0]["streams"]["audio"]["moments"]) <= 400
        steps = document(every()["sound, step by step"])["cards"][0]["steps"]
        assert [step["name"] for step in steps] == list(STEPS)

    def test_every_row_can_be_seen(self) -> None:
        matrix = np.array([[1.0, 2.0], [0.5, -1.0]])
        given = document(made(["a", "b"], [1.0, 2.0], matrix=matrix))["cards"][0]["streams"]["text"]["arrays"]["matrix"]
        assert given["corner"] == "row" and numbers(given).tolist() == matrix.tolist()


class TestPacking:
    def test_large_arrays_are_rounded_to_a_part_of_the_largest(self) -> None:
        values = np.random.default_rng(0).normal(size=(EXACT // 100 + 1, 100))
        values[3, 4] = np.nan
        given = packed(values, full=2.0)
        assert given["type"] == "i1" and given["full"] == 2.0
        assert np.abs(numbers(given) - values)[~np.isnan(values)].max() <= np.nanmax(np.abs(values)) / 127 / 2 + 1e-12
        assert np.isnan(numbers(given)[3, 4])

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
    def test_anything_can_be_packed(self, value: float) -> None:
        given = packed(np.full(EXACT + 1, value), 1.0)
        json.dumps(given, allow_nan=False)
        assert np.isnan(numbers(given)).all() if value != 0 else (numbers(given) == 0).all()


class TestLinks:
    def test_words_and_regions_look_at_one_another(self) -> None:
        lxmert = joint_models.explainer("lxmert")
        given = {"text": TEXT, "regions": joint_models.regions(4)}
        to, back = links(lxmert, **given)
        e = lxmert.explain(**given)
        assert to.weights.shape == back.weights.T.shape == (len(e["text"]), len(e["regions"]))
        tape = lxmert.record(**given, asks="attention")
        for one, ends in ((to, ("text", "regions")), (back, ("regions", "text"))):
            calls = [c for c in tape.calls if (c.query_stream, c.key_stream) == ends]
            assert one.weights[1, 2] == pytest.approx(np.mean([float(c.attention[0, :, 1, 2].mean()) for c in calls]))  # type: ignore[index]
        made = document(e, links=(to, back))["links"]
        assert [(way["from"], way["to"]) for way in made["ways"]] == [("text", "regions"), ("regions", "text")]
        assert len(made["ends"]["regions"]["boxes"]) == 4 and len(made["ends"]["text"]["labels"]) == len(e["text"])
        assert document(e)["links"] is None

    def test_of_one_sequence_each_stream_has_its_own_places(self) -> None:
        vilt, (given, *_) = joint_models.explainer("vilt"), joint_models.inputs("vilt")
        to, back = links(vilt, **given)
        e = vilt.explain(**given)
        words, patches = len(e["text"]), len(e["image"])
        calls = [call.attention[0].mean(0) for call in vilt.record(**given, asks="attention").calls]  # type: ignore[index]
        whole = np.mean([call.detach().numpy() for call in calls], axis=0)
        assert to.weights == pytest.approx(whole[:words, words : words + patches])
        assert back.weights == pytest.approx(whole[words : words + patches, :words])

    def test_there_are_none_where_neither_looks_at_the_other(self) -> None:
        assert links(dual_models.explainer("clip"), text=TEXT, image=picture()) == ()


class TestAttention:
    def test_a_short_input_has_every_weight(self) -> None:
        found = attended(7)
        given = document(found)
        bytes_ = np.frombuffer(b64decode(given["tiles"]["data"]), np.uint8).reshape(given["tiles"]["shape"])
        # A byte is a square root: the error is at most half a step of it.
        assert np.abs(np.sqrt(found.attention) - bytes_ / 255).max() <= 0.5 / 255 + 1e-9
        assert given["size"] == [7, 7] and "links" not in given

    def test_pooling_loses_no_peak(self) -> None:
        maps = np.random.default_rng(0).uniform(size=(2, 10, 10))
        small = pooled(maps, (4, 4))
        starts = [0, 2, 5, 7, 10]
        for row, column in np.ndindex(4, 4):
            block = maps[:, starts[row] : starts[row + 1], starts[column] : starts[column + 1]]
            assert (small[:, row, column] == block.max((1, 2))).all()
        assert pooled(maps, (10, 10)) is maps
        assert (pooled(maps, (10, 2)) == np.stack([maps[..., :5].max(-1), maps[..., 5:].max(-1)], -1)).all()

    def test_a_thousand_tokens_and_every_head_stay_below_three_megabytes(self) -> None:
        found = spread(attended(1000, 1, 1))
        given = document(found)
        assert np.prod(given["size"]) * 144 <= BUDGET and len(given["links"][0][0]["weights"]["data"]) >= LINKS
        assert len(given["graph"]["units"]) == 40 and given["graph"]["of"] == 1000
        assert len(alone(whole_page([given], "Attention")).encode()) < 3_000_000

    def test_maps_that_are_fetched_one_by_one_leave_a_small_document(self) -> None:
        given = document(attended(60, 12, 12), inline=False)
        assert given["size"] == [40, 40] and "links" not in given and len(json.dumps(given)) < 400_000

    @pytest.mark.parametrize(("queries", "keys"), [(5, 9), (300, 20), (3, 900)])
    def test_maps_from_one_stream_to_another_keep_to_their_share(self, queries: int, keys: int) -> None:
        found = streamed(queries, keys, 200, 12)
        given, crossed = document(found, inline=False), found["text → image"]
        bytes_ = [np.prod(own["tiles"]["shape"]) for own in given["maps"]]
        assert [own["name"] for own in given["maps"]] == ["text", "text → image"] and sum(bytes_) <= 1.1 * SMALL
        own = given["maps"][1]
        assert "graph" not in own and own["row"] is None and len(own["keys"]) == keys
        tiles = np.frombuffer(b64decode(own["tiles"]["data"]), np.uint8).reshape(own["tiles"]["shape"])
        assert tiles.shape[2:] == tuple(own["size"])
        assert (tiles.max((2, 3)) == quantised(crossed.attention.max((2, 3)))).all()  # no peak is lost


def test_many_inputs_and_probes_have_documents(text: dict[str, Explanation]) -> None:
    words = aggregate([text["generic"]])
    assert document(words)["rows"] == [list(row) for row in words.rows]
    figure = Finding("accuracy", Interval(0.5, 0.4, 0.6, 10), "how often")
    given = document(ProbeResult("uniform", "m", {"seed": 0}, [{}] * 10, [figure], "So.", {"weight": [[1.0, 2.0]]}))
    assert given["figures"][0]["low"] == 0.4 and numbers(given["maps"]["weight"]).tolist() == [[1.0, 2.0]]
