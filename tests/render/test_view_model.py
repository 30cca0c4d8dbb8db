"""View models: the data that the renderer receives."""

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
from tests.render.conftest import make_explanation
from tests.render.example_results import KINDS, STEPS, TEXT, every, frames, picture


def decode_array(array: dict[str, Any]) -> np.ndarray:
    """Decode an array as the renderer does."""
    raw = b64decode(array["data"])
    if array["dtype"] == "f4":
        return np.frombuffer(raw, "<f4").reshape(array["shape"])
    steps = np.frombuffer(raw, np.int8).astype(float)
    return np.where(steps == -128, np.nan, steps * array["quantisation_step"]).reshape(array["shape"])


def make_attention_view(n: int, layers: int = 2, heads: int = 3, sharp: float = 4.0) -> AttentionView:
    """Make an attention view without a model."""
    rng = np.random.default_rng(0)
    weights = np.exp(sharp * rng.normal(size=(layers, heads, n, n)))
    weights /= weights.sum(-1, keepdims=True)
    statistics = dict.fromkeys(PATTERN_DESCRIPTIONS, np.zeros((layers, heads))) | {
        "entropy": np.full((layers, heads), 0.5)
    }
    depths = {"raw": weights.mean(1)[:, 0], "rollout": weights.mean(1)[:, 0]}
    names = tuple(f"t{index}" for index in range(n))
    return AttentionView("some/model", names, 0, "yes", weights, depths, statistics)


def make_multi_stream_attention_view(queries: int, keys: int, n: int = 6, heads: int = 3) -> MultiStreamAttentionView:
    """Make a self-attention view and a cross-attention view."""
    cross = make_attention_view(max(queries, keys), 2, heads)
    cross.tokens, cross.readout_row = tuple(f"q{index}" for index in range(queries)), None
    cross.key_names = tuple(f"k{index}" for index in range(keys))
    cross.attention = cross.attention[:, :, :queries, :keys]
    cross.scores_by_depth = {"mean of all rows": cross.attention.mean((1, 2))}
    return MultiStreamAttentionView(
        "some/model", "yes", {"text": make_attention_view(n, 2, heads), "text → image": cross}
    )


def repeat_over_heads(view: AttentionView, layers: int = 12, heads: int = 12) -> AttentionView:
    """Repeat one map for every head without copying: the size of a page depends on shapes alone."""
    n = len(view.tokens)
    view.attention = np.broadcast_to(view.attention, (layers, heads, n, n))
    view.scores_by_depth = {name: np.repeat(rows, layers, 0) for name, rows in view.scores_by_depth.items()}
    view.head_statistics = {
        name: np.broadcast_to(statistic, (layers, heads)) for name, statistic in view.head_statistics.items()
    }
    return view


class TestInput:
    def test_text_pieces_concatenate_to_the_text(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        (stream,) = build_view_model(explanation)["streams"]
        (line,) = stream["lines"]
        assert "".join(piece[0] for piece in line if len(piece) < 3) == explanation.units.texts[0]
        assert [piece[1] for piece in line if len(piece) > 1] == list(range(len(explanation)))

    def test_word_scores_are_sums_of_token_scores(self, text: dict[str, Explanation]) -> None:
        explanation = text["generic"]
        words = build_view_model(explanation)["streams"][0]["word_level"]
        sums = np.bincount(words["parents"], weights=explanation.scores)
        assert sums == pytest.approx(explanation.words().scores) and words["labels"] == explanation.words().tokens

    def test_methods_on_one_input_are_grouped(self, text: dict[str, Explanation], pair: Explanation) -> None:
        view_model = build_view_model([*text.values(), pair])
        assert view_model["view"] == "page"
        assert [len(input_view["cards"]) for input_view in view_model["children"]] == [3, 1]
        (agreement,) = view_model["children"][0]["agreement"]
        assert np.array(agreement["values"]) == pytest.approx(Comparison(text).agreement)
        assert build_view_model(Comparison(text)) == build_view_model(text) == build_view_model(list(text.values()))

    def test_labels_distinguish_targets_contrasts_and_methods(self) -> None:
        yes = make_explanation(["a", "b"], [1.0, 2.0])
        no = replace(yes, target={**yes.target, "name": "no"})
        assert list(make_unique_labels([yes, no, yes - no])) == ["Why yes?", "Why no?", "Why yes and not no?"]
        assert list(make_unique_labels([yes, yes])) == ["made-up", "made-up (2)"]
        assert list(make_unique_labels([yes, replace(no, method="b")])) == ["made-up of yes", "b of no"]
        assert build_view_model([yes, no])["heading"] == "Why?"

    def test_evidence_is_deduplicated_and_limited_to_the_units(self) -> None:
        (stream,) = build_view_model(make_explanation(["a", "b"], [1.0, 2.0]), evidence=[1, 1, 7])["streams"]
        assert stream["evidence"] == [1]

    def test_evidence_and_links_with_several_inputs_raise(self) -> None:
        first, second = make_explanation(["a", "b"], [1.0, 2.0]), make_explanation(["c", "d"], [1.0, 2.0])
        links = [AttentionLinks("text", "text", np.eye(2))]
        for build in (build_view_model, render_explanations_page):
            with pytest.raises(InputError, match="evidence= belongs to one input, but 2 inputs were given"):
                build([first, second], evidence=[1])
            with pytest.raises(InputError, match="links= belongs to one input, but 2 inputs were given"):
                build([first, second], links=links)
            assert build([first, replace(first, method="b")], evidence=[1], links=links)

    def test_layer_rows_have_the_layer_numbers_of_the_model(self, text: dict[str, Explanation]) -> None:
        explanation = replace(text["generic"], provenance={**text["generic"].provenance, "layers": [3, 6]})
        layers = build_view_model(explanation)["cards"][0]["streams"]["text"]["arrays"]["per_layer"]
        assert layers["row_names"] == ["3", "4", "5"]
        assert explanation.per_layer is not None and decode_array(layers) == pytest.approx(
            explanation.per_layer, rel=1e-6
        )

    def test_force_plot_spans_base_value_to_target_value(self) -> None:
        assert build_view_model(replace(make_explanation(["a"], [1.0]), base_value=0.5))["cards"][0]["force_plot"] == {
            "base_value": 0.5,
            "value": 1.5,
            "scale": "logit",
        }
        assert build_view_model(make_explanation(["a"], [1.0]))["cards"][0]["force_plot"] is None

    def test_empty_list_raises(self) -> None:
        with pytest.raises(InputError, match="nothing to show"):
            build_view_model([])


class TestStreams:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_stream_has_its_units_and_scores(self, kind: str) -> None:
        explanation = every()[kind]
        view_model = build_view_model(explanation)
        json.dumps(view_model, allow_nan=False)
        inputs, others = text_labels.split_input_streams(explanation)
        assert [(s["stream"], s["is_input"]) for s in view_model["streams"]] == [
            *((part.stream, True) for part in inputs),
            *((part.stream, False) for part in others),
        ]
        reloaded = from_dict(view_model["cards"][0]["explanation"])
        assert reloaded.streams == explanation.streams and reloaded.steps == explanation.steps
        for stream in view_model["streams"]:
            part = explanation[stream["stream"]]
            assert stream["labels"] == [text_labels.format_unit_label(part, index) for index in range(len(part))]
            assert reloaded[part.stream].scores == pytest.approx(part.scores)

    def test_matrix_has_one_row_per_step(self) -> None:
        explanation = every()["continuation"]
        assert isinstance(explanation, Explanation) and explanation.steps is not None and explanation.matrix is not None
        (card,) = build_view_model(explanation)["cards"]
        assert [step["title"] for step in card["steps"]] == text_labels.format_step_titles(explanation)
        matrix = card["streams"][explanation.stream]["arrays"]["matrix"]
        assert matrix["row_axis"] == "step" and matrix["row_names"] == [
            escape_invisible(step) for step in explanation.steps
        ]
        assert decode_array(matrix) == pytest.approx(explanation.matrix, rel=1e-6)

    def test_detected_objects_have_boxes(self) -> None:
        explanation = every()["objects"]
        assert isinstance(explanation, MultiStreamExplanation) and explanation.steps is not None
        boxes = build_view_model(explanation)["detections"]
        assert {box["step"]: (box["label"], tuple(box["box"])) for box in boxes} == text_labels.find_detected_boxes(
            explanation
        )
        assert len(boxes) == len(explanation.steps) and len(build_view_model(every()["one object"])["detections"]) == 1

    def test_regions_without_an_image_are_a_list(self) -> None:
        shapes = {
            kind: {s["stream"]: s["layout"] for s in build_view_model(every()[kind])["streams"]}
            for kind in ("text and regions", "regions without a picture", "text and picture", "sound")
        }
        assert shapes["text and regions"]["regions"] == "boxes" and shapes["text and picture"]["image"] == "grid"
        assert shapes["regions without a picture"]["regions"] == "list" and shapes["sound"] == {"audio": "time"}

    def test_long_audio_has_at_most_400_segments(self) -> None:
        long = build_view_model(make_explanation([], np.ones(3000), units=frames(3000)))
        assert len(long["cards"][0]["streams"]["audio"]["audio_segments"]) <= 400
        steps = build_view_model(every()["sound, step by step"])["cards"][0]["steps"]
        assert [step["name"] for step in steps] == list(STEPS)

    def test_matrix_without_steps_has_one_row_per_unit(self) -> None:
        matrix = np.array([[1.0, 2.0], [0.5, -1.0]])
        (card,) = build_view_model(make_explanation(["a", "b"], [1.0, 2.0], matrix=matrix))["cards"]
        encoded = card["streams"]["text"]["arrays"]["matrix"]
        assert encoded["row_axis"] == "row" and decode_array(encoded).tolist() == matrix.tolist()


class TestPacking:
    def test_large_arrays_are_quantised_relative_to_the_maximum(self) -> None:
        values = np.random.default_rng(0).normal(size=(MAX_EXACT_ELEMENTS // 100 + 1, 100))
        values[3, 4] = np.nan
        encoded = encode_array(values, vmax=2.0)
        assert encoded["dtype"] == "i1" and encoded["vmax"] == 2.0
        assert (
            np.abs(decode_array(encoded) - values)[~np.isnan(values)].max()
            <= np.nanmax(np.abs(values)) / 127 / 2 + 1e-12
        )
        assert np.isnan(decode_array(encoded)[3, 4])

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
    def test_non_finite_and_zero_arrays_are_encoded(self, value: float) -> None:
        encoded = encode_array(np.full(MAX_EXACT_ELEMENTS + 1, value), 1.0)
        json.dumps(encoded, allow_nan=False)
        assert np.isnan(decode_array(encoded)).all() if value != 0 else (decode_array(encoded) == 0).all()


class TestLinks:
    def test_cross_modal_links_equal_mean_attention(self) -> None:
        lxmert = joint_models.explainer("lxmert")
        inputs = {"text": TEXT, "regions": joint_models.regions(4)}
        text_to_regions, regions_to_text = compute_attention_links(lxmert, **inputs)
        e = lxmert.explain(**inputs, method="generic")
        assert text_to_regions.weights.shape == regions_to_text.weights.T.shape == (len(e["text"]), len(e["regions"]))
        tape = lxmert.record(**inputs, requires="attention")
        for links, streams in ((text_to_regions, ("text", "regions")), (regions_to_text, ("regions", "text"))):
            calls = [call for call in tape.calls if (call.query_stream, call.key_stream) == streams]
            means = [float(call.attention[0, :, 1, 2].mean()) for call in calls]  # type: ignore[index]
            assert links.weights[1, 2] == pytest.approx(np.mean(means))
        links_view = build_view_model(e, links=(text_to_regions, regions_to_text))["links"]
        assert [(direction["from"], direction["to"]) for direction in links_view["directions"]] == [
            ("text", "regions"),
            ("regions", "text"),
        ]
        assert len(links_view["streams"]["regions"]["boxes"]) == 4
        assert len(links_view["streams"]["text"]["labels"]) == len(e["text"])
        assert build_view_model(e)["links"] is None

    def test_links_of_a_joint_sequence_are_blocks_of_its_attention(self) -> None:
        vilt, (inputs, *_) = joint_models.explainer("vilt"), joint_models.inputs("vilt")
        text_to_image, image_to_text = compute_attention_links(vilt, **inputs)
        e = vilt.explain(**inputs, method="generic")
        words, patches = len(e["text"]), len(e["image"])
        calls = [call.attention[0].mean(0) for call in vilt.record(**inputs, requires="attention").calls]  # type: ignore[index]
        attention = np.mean([call.detach().numpy() for call in calls], axis=0)
        assert text_to_image.weights == pytest.approx(attention[:words, words : words + patches])
        assert image_to_text.weights == pytest.approx(attention[words : words + patches, :words])

    def test_dual_encoder_has_no_links(self) -> None:
        assert compute_attention_links(dual_models.explainer("clip"), text=TEXT, image=picture()) == ()


class TestAttention:
    def test_short_input_contains_every_attention_weight(self) -> None:
        attention_view = make_attention_view(7)
        view_model = build_view_model(attention_view)
        bytes_ = np.frombuffer(b64decode(view_model["maps"]["data"]), np.uint8).reshape(view_model["maps"]["shape"])
        # Bytes hold square roots: the error is at most half a quantisation step.
        assert np.abs(np.sqrt(attention_view.attention) - bytes_ / 255).max() <= 0.5 / 255 + 1e-9
        assert view_model["map_size"] == [7, 7] and "head_links" not in view_model

    def test_max_pooling_preserves_peaks(self) -> None:
        maps = np.random.default_rng(0).uniform(size=(2, 10, 10))
        pooled = max_pool_maps(maps, (4, 4))
        starts = [0, 2, 5, 7, 10]
        for row, column in np.ndindex(4, 4):
            block = maps[:, starts[row] : starts[row + 1], starts[column] : starts[column + 1]]
            assert (pooled[:, row, column] == block.max((1, 2))).all()
        assert max_pool_maps(maps, (10, 10)) is maps
        assert (max_pool_maps(maps, (10, 2)) == np.stack([maps[..., :5].max(-1), maps[..., 5:].max(-1)], -1)).all()

    def test_attention_page_of_1000_tokens_is_below_3_megabytes(self) -> None:
        attention_view = repeat_over_heads(make_attention_view(1000, 1, 1))
        view_model = build_view_model(attention_view)
        assert (
            np.prod(view_model["map_size"]) * 144 <= MAX_INLINE_MAP_BYTES
            and len(view_model["head_links"][0][0]["weights"]["data"]) >= MAX_LINKS_PER_HEAD
        )
        assert len(view_model["layer_graph"]["units"]) == 40 and view_model["layer_graph"]["num_units"] == 1000
        assert len(render_standalone_page(build_page_view_model([view_model], "Attention")).encode()) < 3_000_000

    def test_document_without_inline_maps_is_small(self) -> None:
        view_model = build_view_model(make_attention_view(60, 12, 12), inline=False)
        assert (
            view_model["map_size"] == [40, 40]
            and "head_links" not in view_model
            and len(json.dumps(view_model)) < 400_000
        )

    @pytest.mark.parametrize(("queries", "keys"), [(5, 9), (300, 20), (3, 900)])
    def test_cross_stream_previews_respect_the_size_limit(self, queries: int, keys: int) -> None:
        attention_view = make_multi_stream_attention_view(queries, keys, 200, 12)
        view_model, cross = build_view_model(attention_view, inline=False), attention_view["text → image"]
        bytes_ = [np.prod(preview["maps"]["shape"]) for preview in view_model["maps"]]
        assert [preview["name"] for preview in view_model["maps"]] == ["text", "text → image"] and sum(
            bytes_
        ) <= 1.1 * MAX_PREVIEW_MAP_BYTES
        preview = view_model["maps"][1]
        assert "layer_graph" not in preview and preview["readout_row"] is None and len(preview["key_tokens"]) == keys
        maps = np.frombuffer(b64decode(preview["maps"]["data"]), np.uint8).reshape(preview["maps"]["shape"])
        assert maps.shape[2:] == tuple(preview["map_size"])
        assert (maps.max((2, 3)) == quantise_sqrt(cross.attention.max((2, 3)))).all()  # no peak is lost


def test_aggregates_and_probe_results_have_view_models(text: dict[str, Explanation]) -> None:
    aggregated = aggregate([text["generic"]])
    assert build_view_model(aggregated)["rows"] == [list(row) for row in aggregated.rows]
    figure = ProbeEstimate("accuracy", ConfidenceInterval(0.5, 0.4, 0.6, 10), "how often")
    view_model = build_view_model(
        ProbeResult("uniform", "m", {"seed": 0}, [{}] * 10, [figure], "So.", {"weight": [[1.0, 2.0]]})
    )
    assert view_model["estimates"][0]["low"] == 0.4
    assert decode_array(view_model["maps"]["weight"]).tolist() == [[1.0, 2.0]]
