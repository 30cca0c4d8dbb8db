"""Multi-stream explanations: streams, serialisation, comparison and aggregation."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from referencing import Registry, Resource

import clearhead
from clearhead import Explanation, InputError, MultiStreamExplanation
from tests import dual_models, joint_models
from tests.render.example_results import KINDS, TEXT, bart, decoder, every, picture

SCHEMAS = {
    file: json.loads((files("clearhead.explanation") / f"{file}.schema.json").read_text("utf-8"))
    for file in ("explanation", "multi_stream_explanation")
}


def clip() -> clearhead.Explainer:
    return dual_models.explainer("clip")


def multi_stream(kind: str) -> MultiStreamExplanation:
    explanation = every()[kind]
    assert isinstance(explanation, MultiStreamExplanation)
    return explanation


def validator(kind: str) -> jsonschema.Draft202012Validator:
    registry: Any = Registry().with_resource(
        "urn:clearhead:explanation:2", Resource.from_contents(SCHEMAS["explanation"])
    )
    return jsonschema.Draft202012Validator(SCHEMAS[kind], registry=registry)


class TestSerialisation:
    @pytest.mark.parametrize("kind", KINDS)
    def test_json_round_trip_is_exact_and_valid(self, kind: str) -> None:
        explanation = every()[kind]
        form = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
        is_joint = isinstance(explanation, MultiStreamExplanation)
        validator("multi_stream_explanation" if is_joint else "explanation").validate(form)
        restored = clearhead.from_dict(form)
        assert type(restored) is type(explanation) and restored.streams == explanation.streams
        for stream, part in explanation.by_stream.items():
            assert restored[stream].to_dict() == part.to_dict()

    @pytest.mark.parametrize("kind", KINDS)
    def test_file_round_trip(self, kind: str, tmp_path: Path) -> None:
        explanation = every()[kind]
        restored = clearhead.load_explanation(explanation.save(tmp_path / "e.safetensors"))
        assert restored == explanation and repr(restored) == repr(explanation)
        assert [file.name for file in tmp_path.iterdir()] == ["e.safetensors"]

    def test_schema_describes_every_field(self) -> None:
        for schema in SCHEMAS.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        assert all(part.get("description") for part in SCHEMAS["multi_stream_explanation"]["properties"].values())

    def test_invalid_json_raises(self) -> None:
        good = multi_stream("text and picture").to_dict()
        text, image = good["by_stream"]["text"], good["by_stream"]["image"]
        with pytest.raises(InputError, match="newer version of clearhead"):
            clearhead.from_dict({**good, "version": 3})
        with pytest.raises(InputError, match="older version of clearhead"):
            clearhead.from_dict({**good, "version": 1})
        for wrong in ({"version": "1"}, {"by_stream": []}, {"by_stream": {}}):
            with pytest.raises(InputError, match="not an explanation saved by clearhead"):
                clearhead.from_dict({**good, **wrong})
        with pytest.raises(InputError, match="'text' has the units of 'image'"):
            clearhead.from_dict({**good, "by_stream": {"text": image, "image": text}})
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict({**good, "by_stream": {"text": {**text, "scores": [1.0]}, "image": image}})
        with pytest.raises(jsonschema.ValidationError):
            validator("multi_stream_explanation").validate(
                {**good, "by_stream": {"text": {**text, "scores": 1}, "image": image}}
            )

    @pytest.mark.parametrize(
        "wrong",
        [
            {"steps": "x"},
            {"steps": [1, 2, 3, 4, 5]},
            {"steps": [{}]},
            {"box": [1, 2]},
            {"box": "abcd"},
            {"steps": [{"value": "much"}] * 5},
        ],
    )
    def test_damaged_steps_raise(self, wrong: dict[str, Any]) -> None:
        form = multi_stream("objects")["image"].to_dict()
        assert len(form["steps"]) == 5
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict({**form, "target": {**form["target"], **wrong}})

    def test_single_and_multi_stream_files_are_distinguished(self, tmp_path: Path) -> None:
        both = multi_stream("text and picture")
        form = both.to_dict()["by_stream"]["text"]
        assert isinstance(clearhead.from_dict(form), Explanation)
        with pytest.raises(InputError, match="not an explanation saved by clearhead"):
            clearhead.from_dict({**form, "schema": "clearhead/multi-stream-explanation"})


class TestStreams:
    def test_streams_are_accessed_by_name(self) -> None:
        both = multi_stream("text and picture")
        assert both.streams == ("text", "image") and [part.stream for part in both] == ["text", "image"]
        assert both["image"].image is both.image and both.by_stream["text"] is both["text"]
        with pytest.raises(InputError, match="unknown stream 'audio'"):
            both["audio"]
        for name in ("scores", "units", "matrix", "heat_map"):
            with pytest.raises(InputError, match=rf"use e\['text'\]\.{name} or e\['image'\]\.{name}"):
                getattr(both, name)
        single = every()["sound"]
        assert list(single.by_stream) == ["audio"] and single.by_stream["audio"] is single

    def test_only_texts_are_merged_into_words_and_sentences(self) -> None:
        both = multi_stream("text and picture")
        assert both.words()["text"].units.kind == "word" and both.words()["image"] is both["image"]
        assert both.sentences()["text"].units.kind == "sentence" and len(both.sentences()["text"].top(9)) == 1
        with pytest.raises(InputError, match="frames cannot be merged into words"):
            every()["sound"].words()

    def test_step_selects_all_streams(self) -> None:
        objects = multi_stream("objects")
        third = objects.step(2)
        assert third.steps is None and third.target == objects.target["steps"][2]
        for stream, part in objects.by_stream.items():
            assert part.matrix is not None
            np.testing.assert_array_equal(third[stream].scores, part.matrix[2])
            np.testing.assert_allclose(part.matrix.sum(0), part.scores)

    def test_subtraction_is_per_stream(self) -> None:
        ex = clip()
        first, second = (
            ex.explain(text=TEXT, image=picture(), scale=scale, method="generic") for scale in ("cosine", "logit")
        )
        difference = first - second
        assert isinstance(difference, MultiStreamExplanation) and difference.streams == first.streams
        np.testing.assert_allclose(difference["text"].scores, first["text"].scores - second["text"].scores)
        with pytest.raises(TypeError):
            first - first["text"]


class TestComparisonAndAggregation:
    def test_agreement_is_per_stream(self) -> None:
        methods = ["generic", "rollout"]
        comparison = clearhead.compare(clip(), methods=methods, text=TEXT, image=picture())
        assert list(comparison.agreements) == ["text", "image"]
        with pytest.raises(InputError, match=r"agreements\['text'\] or agreements\['image'\]"):
            comparison.agreement  # noqa: B018
        form = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
        assert np.shape(form["agreement"]["values"]["image"]) == (2, 2)
        single = clearhead.Comparison({name: comparison[name]["text"] for name in methods})
        assert single.agreement == pytest.approx(comparison.agreements["text"])
        detector = {"a": every()["objects"], "b": every()["objects"]}
        assert list(clearhead.Comparison(detector).agreements) == ["image"]  # object queries are not input units
        with pytest.raises(InputError, match="takes one input, but several were given"):
            clearhead.compare(clip(), methods=methods, text=[TEXT, "So boring!"], image=picture())

    def test_aggregation_counts_units_of_all_streams(self) -> None:
        both = multi_stream("text and picture")
        words = clearhead.aggregate([both, both], by="word")
        assert {name: count for name, _, count in words.rows}["movie"] == 2
        kept = [part.scores[part.units.content_indices()].sum() for part in both]
        assert clearhead.aggregate(both, by="label").rows[0][1] == pytest.approx(sum(kept))
        positions = {name for name, _, _ in clearhead.aggregate([both], by="position").rows}
        assert {"text 1", "image 1"} <= positions and "1" not in positions
        with pytest.raises(InputError, match="patches cannot be merged into words"):
            clearhead.aggregate([every()["one object"]], by="word")

    def test_data_frame_names_streams(self) -> None:
        both = multi_stream("text and picture")
        frame = clearhead.to_frame([both, every()["continuation"]])
        assert len(frame) == len(both) + len(every()["continuation"])
        assert frame.groupby("stream").size().to_dict().keys() == {"text", "image"}


class TestReadingOptions:
    def test_continuation_is_part_of_provenance(self) -> None:
        for make in (decoder, bart):
            ex = clearhead.load(make())
            assert ex.explain(TEXT, answer=" It is", method="generic").provenance["input_options"] == {
                "answer": " It is"
            }
            ids = ex.explain([TEXT, TEXT], answer=[(5, 6), " It is"], method="generic")
            assert ids[0].provenance["input_options"] == {"answer": [5, 6]}
            assert isinstance(ids[1].provenance["input_options"]["answer"], list)
            generated = ex.explain(TEXT, target=clearhead.GeneratedToken(), max_new_tokens=2, method="generic")
            assert generated.provenance["input_options"] == {"max_new_tokens": 2}

    @pytest.mark.parametrize(
        "target", [clearhead.GeneratedToken(0), clearhead.DetectionQuery(1), clearhead.TokenLabel(2)]
    )
    def test_position_target_of_single_output_raises(self, target: Any) -> None:
        ex = joint_models.explainer("lxmert")
        with pytest.raises(InputError, match="makes one prediction per input"):
            ex.explain(text=TEXT, regions=joint_models.regions(3), target=target, method="generic")
