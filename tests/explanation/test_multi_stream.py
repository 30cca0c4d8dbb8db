"""The explanation of an input of several streams: its parts, its forms, and what is made of many of them."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from referencing import Registry, Resource

import clearhead
from clearhead import Explanation, InputError, JointExplanation
from tests import dual_models, joint_models
from tests.render.example_results import KINDS, TEXT, bart, decoder, every, picture

SCHEMAS = {
    file: json.loads((files("clearhead.explanation") / f"{file}.schema.json").read_text("utf-8"))
    for file in ("explanation", "multi_stream_explanation")
}


def clip() -> clearhead.Explainer:
    return dual_models.explainer("clip")


def joint(kind: str) -> JointExplanation:
    explanation = every()[kind]
    assert isinstance(explanation, JointExplanation)
    return explanation


def validator(kind: str) -> jsonschema.Draft202012Validator:
    registry: Any = Registry().with_resource(
        "urn:clearhead:explanation:1", Resource.from_contents(SCHEMAS["explanation"])
    )
    return jsonschema.Draft202012Validator(SCHEMAS[kind], registry=registry)


class TestForms:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_json_form_follows_the_schema_and_comes_back(self, kind: str) -> None:
        explanation = every()[kind]
        form = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
        is_joint = isinstance(explanation, JointExplanation)
        validator("multi_stream_explanation" if is_joint else "explanation").validate(form)
        again = clearhead.from_dict(form)
        assert type(again) is type(explanation) and again.streams == explanation.streams
        for stream, part in explanation.parts.items():
            assert again[stream].to_dict() == part.to_dict()

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_file_comes_back(self, kind: str, tmp_path: Path) -> None:
        explanation = every()[kind]
        again = clearhead.open_explanation(explanation.save(tmp_path / "e.safetensors"))
        assert again == explanation and repr(again) == repr(explanation)
        assert [file.name for file in tmp_path.iterdir()] == ["e.safetensors"]

    def test_every_field_of_the_joint_form_is_described(self) -> None:
        for schema in SCHEMAS.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        assert all(part.get("description") for part in SCHEMAS["multi_stream_explanation"]["properties"].values())

    def test_a_wrong_form_is_noticed(self) -> None:
        good = joint("text and picture").to_dict()
        text, image = good["parts"]["text"], good["parts"]["image"]
        with pytest.raises(InputError, match="newer clearhead"):
            clearhead.from_dict({**good, "version": 2})
        for wrong in ({"version": "1"}, {"parts": []}, {"parts": {}}):
            with pytest.raises(InputError, match="not an explanation that clearhead wrote"):
                clearhead.from_dict({**good, **wrong})
        with pytest.raises(InputError, match="'text' has the units of 'image'"):
            clearhead.from_dict({**good, "parts": {"text": image, "image": text}})
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict({**good, "parts": {"text": {**text, "scores": [1.0]}, "image": image}})
        with pytest.raises(jsonschema.ValidationError):
            validator("multi_stream_explanation").validate(
                {**good, "parts": {"text": {**text, "scores": 1}, "image": image}}
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
    def test_damaged_steps_are_noticed(self, wrong: dict[str, Any]) -> None:
        form = joint("objects")["image"].to_dict()
        assert len(form["steps"]) == 5
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict({**form, "target": {**form["target"], **wrong}})

    def test_a_file_of_one_stream_and_of_several_do_not_mix(self, tmp_path: Path) -> None:
        both = joint("text and picture")
        form = both.to_dict()["parts"]["text"]
        assert isinstance(clearhead.from_dict(form), Explanation)
        with pytest.raises(InputError, match="not an explanation that clearhead wrote"):
            clearhead.from_dict({**form, "schema": "clearhead/joint-explanation"})


class TestParts:
    def test_streams_by_name(self) -> None:
        both = joint("text and picture")
        assert both.streams == ("text", "image") and [part.stream for part in both] == ["text", "image"]
        assert both["image"].picture is both.picture and both.parts["text"] is both["text"]
        with pytest.raises(InputError, match="unknown stream 'audio'"):
            both["audio"]
        for name in ("scores", "units", "matrix", "heat_map"):
            with pytest.raises(InputError, match=rf"say e\['text'\]\.{name} or e\['image'\]\.{name}"):
                getattr(both, name)
        one = every()["sound"]
        assert list(one.parts) == ["audio"] and one.parts["audio"] is one

    def test_words_and_sentences_of_the_texts_alone(self) -> None:
        both = joint("text and picture")
        assert both.words()["text"].units.kind == "word" and both.words()["image"] is both["image"]
        assert both.sentences()["text"].units.kind == "sentence" and len(both.sentences()["text"].top(9)) == 1
        with pytest.raises(InputError, match="frames, not words"):
            every()["sound"].words()

    def test_one_of_several_steps(self) -> None:
        objects = joint("objects")
        third = objects.step(2)
        assert third.steps is None and third.target == objects.target["steps"][2]
        for stream, part in objects.parts.items():
            assert part.matrix is not None
            np.testing.assert_array_equal(third[stream].scores, part.matrix[2])
            np.testing.assert_allclose(part.matrix.sum(0), part.scores)

    def test_a_difference_is_taken_stream_by_stream(self) -> None:
        ex = clip()
        one, other = (ex.explain(text=TEXT, image=picture(), scale=scale) for scale in ("cosine", "logit"))
        gap = one - other
        assert isinstance(gap, JointExplanation) and gap.streams == one.streams
        np.testing.assert_allclose(gap["text"].scores, one["text"].scores - other["text"].scores)
        with pytest.raises(TypeError):
            one - one["text"]


class TestMany:
    def test_agreement_stream_by_stream(self) -> None:
        methods = ["generic", "rollout"]
        found = clearhead.compare(clip(), methods=methods, text=TEXT, image=picture())
        assert list(found.agreements) == ["text", "image"]
        with pytest.raises(InputError, match=r"agreements\['text'\] or agreements\['image'\]"):
            found.agreement  # noqa: B018
        form = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert np.shape(form["agreement"]["values"]["image"]) == (2, 2)
        alone = clearhead.Comparison({name: found[name]["text"] for name in methods})
        assert alone.agreement == pytest.approx(found.agreements["text"])
        detector = {"a": every()["objects"], "b": every()["objects"]}
        assert list(clearhead.Comparison(detector).agreements) == ["image"]  # queries are no input
        with pytest.raises(InputError, match="hold several"):
            clearhead.compare(clip(), methods=methods, text=[TEXT, "So boring!"], image=picture())

    def test_aggregation(self) -> None:
        both = joint("text and picture")
        words = clearhead.aggregate([both, both], by="word")
        assert {name: count for name, _, count in words.rows}["movie"] == 2
        kept = [part.scores[part.units.drop_special()].sum() for part in both]
        assert clearhead.aggregate(both, by="label").rows[0][1] == pytest.approx(sum(kept))
        places = {name for name, _, _ in clearhead.aggregate([both], by="position").rows}
        assert {"text 1", "image 1"} <= places and "1" not in places
        with pytest.raises(InputError, match="patches, not words"):
            clearhead.aggregate([every()["one object"]], by="word")

    def test_a_data_frame(self) -> None:
        both = joint("text and picture")
        frame = clearhead.to_frame([both, every()["continuation"]])
        assert len(frame) == len(both) + len(every()["continuation"])
        assert frame.groupby("stream").size().to_dict().keys() == {"text", "image"}


class TestReading:
    def test_a_given_answer_is_part_of_where_a_result_comes_from(self) -> None:
        for make in (decoder, bart):
            ex = clearhead.load(make())
            assert ex.explain(TEXT, answer=" It is").provenance["reading"] == {"answer": " It is"}
            ids = ex.explain([TEXT, TEXT], answer=[(5, 6), " It is"])
            assert ids[0].provenance["reading"] == {"answer": [5, 6]}
            assert isinstance(ids[1].provenance["reading"]["answer"], list)
            said = ex.explain(TEXT, target=clearhead.Generated(), max_new_tokens=2)
            assert said.provenance["reading"] == {"max_new_tokens": 2}

    @pytest.mark.parametrize("target", [clearhead.Generated(0), clearhead.Query(1), clearhead.TokenLabel(2)])
    def test_a_place_of_an_answer_that_has_none_is_refused(self, target: Any) -> None:
        ex = joint_models.explainer("lxmert")
        with pytest.raises(InputError, match="gives one answer as a whole"):
            ex.explain(text=TEXT, regions=joint_models.regions(3), target=target)
