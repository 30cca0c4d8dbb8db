"""Explanation: fields, merging, subtraction, and round trips through files and JSON."""

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import clearhead
from clearhead import Contrast, Explanation, InputError, Method
from clearhead.explanation.explanation import EXPLANATION_VERSION, explanation_from_arrays
from clearhead.units import build_numbered_units
from tests.models import MASKED_TEXTS, PAIR, TEXTS, explainer, inputs, text_model

SCHEMA = json.loads((files("clearhead.explanation") / "explanation.schema.json").read_text("utf-8"))


def make_explanation(scores: Any, **fields: Any) -> Explanation:
    scores = np.asarray(scores, dtype=float)
    names = [f"t{i}" for i in range(len(scores))]
    target = {"kind": "label", "name": "x", "scale": "logit", "value": 1.0}
    return Explanation(build_numbered_units(len(scores), "text", names), scores, "m", target, {}, **fields)


#: The keys of `results()`.
SHAPES = (
    "text",
    "pair",
    "words",
    "matrix",
    "sentences",
    "callable",
    "difference",
    "regression",
    "multi",
    "masked",
    "ids",
    "image",
    "heads",
    "dropped",
)


@cache
def results() -> dict[str, Explanation]:
    """One explanation of each kind."""
    text, image = explainer("bert/classify", torch.float32), explainer("vit/image", torch.float32)
    image_input = inputs("vit/image")[0]
    masked = explainer("roberta/mask")
    explanations = {
        "text": text.explain(TEXTS[1], Method("generic", layers=(-2, None)), per="head"),
        "pair": text.explain(PAIR, "attcat", target=2, scale="probability"),
        "words": text.explain(PAIR, "input-x-gradient").words(),
        "matrix": text.explain(TEXTS[0], "rollout", rows="all"),
        "sentences": text.explain(TEXTS[0], "rollout", rows="all").sentences(),
        "callable": text.explain(TEXTS[0], target=lambda output: output.logits[:, 0], method="generic"),
        "difference": text.explain(TEXTS[0], target=0, method="generic")
        - text.explain(TEXTS[0], target=1, method="generic"),
        "regression": explainer("bert/classify", num_labels=1).explain(TEXTS[0], method="generic"),
        "multi": explainer("bert/classify", problem_type="multi_label_classification").explain(
            TEXTS[0], scale="log-odds", method="generic"
        ),
        "masked": masked.explain(MASKED_TEXTS[0].format(mask="<mask>"), method="generic"),
        "ids": clearhead.load(text.adapter.model).explain({"input_ids": torch.tensor([[5, 6, 7]])}, method="generic"),
        "image": image.explain(image_input, "saliency", target=Contrast(1, 0)),
        "heads": image.explain(image_input, "generic", per="head"),
    }
    explanations["dropped"] = replace(
        explanations["text"], scores=np.where(np.arange(len(explanations["text"])) == 1, np.nan, 1.0)
    )
    assert tuple(explanations) == SHAPES
    return explanations


@pytest.mark.parametrize("name", SHAPES)
def test_json_round_trip_is_exact_and_valid(name: str) -> None:
    e = results()[name]
    text = json.dumps(e.to_dict(), allow_nan=False)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    assert clearhead.from_dict(json.loads(text)) == replace(e, image=None)
    assert np.array_equal(clearhead.from_dict(json.loads(text)).scores, e.scores, equal_nan=True)


@pytest.mark.parametrize("name", SHAPES)
def test_file_round_trip(name: str, tmp_path: Path) -> None:
    e = results()[name]
    opened = clearhead.load_explanation(e.save(tmp_path / "e.safetensors"))
    assert opened == e and opened.units == e.units
    for field in ("scores", "matrix", "per_layer", "per_head", "image"):
        saved, loaded = getattr(e, field), getattr(opened, field)
        assert (saved is None) == (loaded is None), field
        assert saved is None or (saved.dtype == loaded.dtype and np.array_equal(saved, loaded, equal_nan=True))


def test_schema_describes_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["version"]["const"] == EXPLANATION_VERSION

    def assert_described(schema: Any, path: str) -> None:
        for key, value in schema.get("properties", {}).items():
            assert value.get("description") or SCHEMA["$defs"][value["$ref"].rpartition("/")[2]].get("description"), (
                path + key
            )
            assert_described(value, f"{path}{key}.")

    assert_described(SCHEMA, "")
    for name, schema in SCHEMA["$defs"].items():
        assert_described(schema, f"{name}.")
    e = results()["heads"].to_dict()  # the keys of the open objects are described, too
    for section in ("certificate", "provenance"):
        assert set(e[section]) <= set(SCHEMA["$defs"][section]["properties"])
    assert set(results()["text"].to_dict()["provenance"]) <= set(SCHEMA["$defs"]["provenance"]["properties"])


def test_invalid_json_raises() -> None:
    good = results()["text"].to_dict()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "scores": ["a"]}, SCHEMA)
    with pytest.raises(InputError, match="newer version of clearhead"):
        clearhead.from_dict({**good, "version": EXPLANATION_VERSION + 1})
    with pytest.raises(InputError, match=r"older version of clearhead \(file format 1; this version reads format 2\)"):
        clearhead.from_dict({**good, "version": 1})
    with pytest.raises(InputError, match="its format is clearhead/joint-explanation; this version of clearhead reads"):
        clearhead.from_dict({"schema": "clearhead/joint-explanation", "version": 1, "parts": {"text": good}})
    for wrong in ({}, {**good, "schema": "other"}, {**good, "version": "1"}, {**good, "scores": ["a"]}):
        with pytest.raises(InputError, match="not an explanation saved by clearhead"):
            clearhead.from_dict(wrong)
    for wrong in (
        {**good, "scores": [1.0]},
        {**good, "units": {}},
        {key: good[key] for key in good if key != "method"},
    ):
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict(wrong)


def test_other_files_raise(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"a": np.zeros(1)}, tmp_path / "other")
    for name, message in [("none", "no file"), ("text", "not an explanation"), ("other", "not an explanation")]:
        with pytest.raises(InputError, match=message):
            clearhead.load_explanation(tmp_path / name)
    with pytest.raises(InputError, match="newer version of clearhead"):
        explanation_from_arrays({**results()["text"].to_dict(), "version": 9}, {})


def test_explanation_fields_are_consistent() -> None:
    e = results()["text"]
    assert e.stream == "text" and e.tokens == list(e.units.names) and len(e) == len(e.scores) and e["text"] is e
    assert e.base_value is None
    top = e.prediction["top"]
    assert len(top) == 3 and [line["probability"] for line in top] == sorted(
        (t["probability"] for t in top), reverse=True
    )
    assert sum(line["probability"] for line in top) == pytest.approx(1)
    assert e.prediction["label"] == top[0]["label"] and e.prediction["probability"] == top[0]["probability"]
    logits = np.array([line["logit"] for line in top])
    assert np.exp(logits)[0] / np.exp(logits).sum() == pytest.approx(top[0]["probability"])
    assert e.certificate["capture_error"] < 1e-5 and e.certificate["dtype"] == "float32" and e.certificate["seed"] == 0
    assert set(e.certificate["versions"]) == {"clearhead", "torch", "transformers", "python"}
    assert e.certificate["readout"] == "first" and e.certificate["readout_checked"]
    assert e.provenance["method"] == "generic" and list(e.provenance["options"]["layers"]) == [-2, None]
    assert len(explainer("bert/classify", num_labels=9).explain(TEXTS[0], method="generic").prediction["top"]) == 5
    multi = [line["probability"] for line in results()["multi"].prediction["top"]]
    assert sum(multi) != pytest.approx(1)
    assert "probability" not in results()["regression"].prediction and "value" in results()["regression"].prediction
    with pytest.raises(InputError, match="unknown stream 'image'"):
        e["image"]
    assert "9 tokens" in repr(make_explanation(range(9))) and "17 patches" in repr(results()["image"])


def test_top_keeps_order_of_ties_and_skips_special_units() -> None:
    e = make_explanation([1, 3, 2, 3, 2, float("nan")])
    assert [name for name, _ in e.top()] == ["t1", "t3", "t2", "t4", "t0"]
    marked = replace(e, units=replace(e.units, special=(False, True, False, False, False, False)))
    assert [name for name, _ in marked.top(2)] == ["t3", "t2"]
    assert [name for name, _ in marked.top(2, include_special=True)] == ["t1", "t3"]


def test_nan_scores_do_not_spread_to_other_words() -> None:
    """If a profile drops special tokens (NaN), the other words, sentences and regions keep their scores."""
    text = "[MASK] hates the book. It isn't good"
    e = explainer("bert/mask").explain(text, "attcat", profile="gender_mlm")
    kept = np.where(np.isnan(e.scores), 0, e.scores)
    assert np.isnan(e.scores).sum() == 2
    for merged in (e.words(), e.sentences(), e.words(absolute=True)):
        assert [np.isnan(score) for score in merged.scores] == list(merged.units.special)
        total = np.abs(kept).sum() if merged.provenance.get("absolute") else kept.sum()
        assert np.nansum(merged.scores) == pytest.approx(total)
    assert not np.isnan(e.words().per_layer[:, 1:-1]).any()
    rows = explainer("bert/mask").explain(text, "attention", profile="gender_mlm", rows="all").words()
    assert not np.isnan(rows.matrix[:, 1:-1]).any() and np.isnan(rows.matrix[:, 0]).all()
    assert len(clearhead.aggregate([e]).rows) == len(set(e.words().units.names[1:-1]))
    image = explainer("vit/image").explain(inputs("vit/image")[0], "generic", profile="mm_vit")
    regions = image.regions((2, 2))
    assert np.isnan(regions.scores[0]) and np.nansum(regions.scores) == pytest.approx(np.nansum(image.scores))


def test_word_scores_are_sums_and_matrix_rows_are_means() -> None:
    ex = explainer("bert/classify")
    e = ex.explain(TEXTS[1], "attention", rows="all", per="head")
    words = e.words()
    assert len(words) < len(e) and words.scores.sum() == pytest.approx(e.scores.sum())
    assert words.matrix is not None and words.matrix.shape == (len(words), len(words))
    assert words.matrix.sum(1) == pytest.approx(np.ones(len(words)))  # rows of attention still sum to one
    assert words.matrix[0] == pytest.approx(words.scores)  # the read-out is the first row in both
    assert words.words().units == words.units
    contributions = ex.explain(TEXTS[1], "generic", per="head").words()
    assert contributions.per_layer is not None and contributions.per_head is not None
    assert contributions.per_layer.sum(0) == pytest.approx(contributions.scores)
    assert contributions.per_head.sum((0, 1)) == pytest.approx(contributions.scores)


@pytest.mark.parametrize("scale", ["logit", "probability"])
@pytest.mark.parametrize("method", ["input-x-gradient", "attcat", "cat"])
def test_difference_is_a_contrast_for_linear_methods(method: str, scale: str) -> None:
    ex = explainer("bert/classify")
    a, b = (ex.explain(TEXTS[0], method, target=label, scale=scale) for label in (0, 2))
    both = ex.explain(TEXTS[0], method, target=Contrast(0, 2), scale=scale)
    assert (a - b).scores == pytest.approx(both.scores, abs=1e-9)
    assert (a - b).target == {
        "kind": "contrast",
        "name": "LABEL_0 − LABEL_2",
        "scale": scale,
        "value": pytest.approx(both.target["value"]),
    }


def test_difference_of_log_odds_is_not_a_contrast() -> None:
    ex = explainer("bert/classify")
    a, b, contrast = (
        ex.explain(TEXTS[0], "input-x-gradient", target=target, scale="log-odds") for target in (0, 2, Contrast(0, 2))
    )
    difference = a - b
    assert difference.target["kind"] == "score_difference" and difference.target["scale"] == "log-odds"
    assert difference.target["value"] == a.target["value"] - b.target["value"]
    assert abs(difference.target["value"] - contrast.target["value"]) > 1e-3


def test_difference_of_nonlinear_methods_is_marked() -> None:
    ex = explainer("bert/classify")

    def kind(a: Explanation, b: Explanation) -> str:
        return (a - b).target["kind"]

    logit = ex.explain(TEXTS[0], "input-x-gradient", target=0)
    assert (
        kind(ex.explain(TEXTS[0], target=0, method="generic"), ex.explain(TEXTS[0], target=1, method="generic"))
        == "score_difference"
    )
    assert kind(logit, ex.explain(TEXTS[0], "attcat", target=1)) == "score_difference"
    p = ex.explain(TEXTS[0], "input-x-gradient", target=1, scale="probability")
    assert kind(logit, p) == "score_difference" and (logit - p).target["scale"] is None
    norm = Method("input-x-gradient", reduce="l2")
    assert kind(*(ex.explain(TEXTS[0], norm, target=i) for i in (0, 1))) == "score_difference"
    assert (logit - logit).signed and (logit - logit).method == "input-x-gradient"
    assert (logit - p).provenance["minus"]["method"] == "input-x-gradient"
    rows = [ex.explain(TEXTS[0], "generic", rows="all", target=i) for i in (0, 1)]
    assert (rows[0] - rows[1]).matrix == pytest.approx(rows[0].matrix - rows[1].matrix)


def test_base_values_are_subtracted() -> None:
    assert (make_explanation([1, 2], base_value=0.0) - make_explanation([0, 1], base_value=0.5)).base_value == -0.5
    assert (make_explanation([1, 2], base_value=1.0) - make_explanation([0, 1])).base_value is None
    assert isinstance(
        (make_explanation([1.0], base_value=1.0) - make_explanation([1.0], base_value=0.0)).base_value, float
    )


def test_subtraction_requires_the_same_input() -> None:
    text, image = explainer("bert/classify"), explainer("vit/image")
    with pytest.raises(InputError, match="same input"):
        text.explain(TEXTS[0], method="generic") - text.explain(TEXTS[1], method="generic")
    first, second = image.explain(inputs("vit/image")[:2], method="generic")
    assert first.units == second.units
    with pytest.raises(InputError, match="same input"):
        first - second
    with pytest.raises(TypeError):
        first - 1


def test_equality_compares_scores_with_nan_and_images() -> None:
    assert (
        make_explanation([1, float("nan")]) == make_explanation([1, float("nan")])
        and make_explanation([1, 2]) != make_explanation([1, 3])
        and make_explanation([1]) != 1
    )
    pictures = [replace(make_explanation([1]), image=np.full((2, 2, 3), i, dtype=np.uint8)) for i in (0, 1)]
    assert pictures[0] != pictures[1] and pictures[0] != make_explanation([1])


def test_to_json_value_returns_plain_types() -> None:
    e = make_explanation(
        [1.0], certificate={"error": float("inf"), "count": np.int64(3), "dtype": torch.float32, "flag": np.True_}
    )
    assert e.to_dict()["certificate"] == {"error": None, "count": 3, "dtype": "torch.float32", "flag": True}


def test_heat_map_has_grid_shape_and_raises_without_grid() -> None:
    e = results()["heads"]
    assert e.heat_map().shape == e.units.grid
    assert e.heat_map()[1, 2] == e.scores[e.tokens.index("1,2")]
    with pytest.raises(InputError, match="not on a grid"):
        make_explanation([1]).heat_map()


def test_documentation_example_is_valid() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation.md"
    example = json.loads(page.read_text("utf-8").split("```json\n")[1].split("```")[0])
    jsonschema.validate(example, SCHEMA)
    assert clearhead.from_dict(example).top(1) == [("boring", 0.31)]


def _with_value(form: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced."""
    form = json.loads(json.dumps(form))
    *parents, last = path.split(".")
    node: Any = form
    for key in parents:
        node = node[int(key) if isinstance(node, list) else key]
    node[last] = value
    return form


DAMAGES: list[tuple[str, str, Any]] = [
    ("text", "target", None),
    ("text", "target.value", "much"),
    ("text", "prediction", []),
    ("text", "prediction.top", {}),
    ("text", "prediction.top", [1]),
    ("text", "prediction.top", [{}]),
    ("text", "certificate", None),
    ("text", "certificate.truncated_tokens", "3"),
    ("text", "provenance", 3),
    ("text", "method", None),
    ("text", "base_value", "x"),
    ("text", "units", None),
    ("text", "units.names", "abc"),
    ("text", "units.names", 3),
    ("text", "units.special", [True]),
    ("text", "units.special", None),
    ("text", "units.offsets", [[0, 1]]),
    ("text", "units.segments", [7] * 12),
    ("text", "units.texts", "abc"),
    ("text", "scores", None),
    ("text", "scores", [[1.0]]),
    ("text", "per_layer", [[1.0]]),
    ("text", "per_layer", [1.0]),
    ("text", "per_head", [[1.0]]),
    ("matrix", "matrix", [[1.0, 2.0]]),
    ("image", "units.grid", [4, 5]),
    ("image", "units.grid", 4),
    ("image", "units.boxes", [None]),
]


@pytest.mark.parametrize(("name", "path", "value"), DAMAGES)
def test_damaged_data_raises_one_line_error(name: str, path: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        clearhead.from_dict(_with_value(results()[name].to_dict(), path, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [[], None, "text", 3, [1], {"schema": []}])
def test_from_dict_of_other_data_raises(wrong: Any) -> None:
    with pytest.raises(InputError, match="not an explanation saved by clearhead"):
        clearhead.from_dict(wrong)


@pytest.mark.parametrize("metadata", ["[]", "3", "null", '"x"', "{}", "{"])
def test_file_metadata_must_be_a_mapping(metadata: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"scores": np.zeros(2)}, tmp_path / "odd", metadata={"clearhead": metadata})
    with pytest.raises(InputError, match="odd'"):
        clearhead.load_explanation(tmp_path / "odd")


def test_models_of_one_class_are_distinguished_by_logits() -> None:
    """Models passed as objects are named by class, so a difference between two of them is not a contrast."""
    ex = explainer("bert/classify")
    other_explainer = clearhead.load(text_model("bert", initializer_range=0.2))
    first, second = (e.explain(TEXTS[0], "input-x-gradient", target=0) for e in (ex, other_explainer))
    assert first.provenance["model"] == second.provenance["model"]
    assert (first - second).target["kind"] == "score_difference"
    batched, *_ = ex.explain(TEXTS, "input-x-gradient", target=1)  # in a batch, where the last bits may differ
    assert (first - batched).target["kind"] == "contrast"


def test_difference_of_models_without_logits_is_not_a_contrast() -> None:
    encoder = clearhead.load(text_model("bert", "Model"))
    a, b = (
        encoder.explain(TEXTS[0], "input-x-gradient", target=lambda output, i=i: output.last_hidden_state[:, 0, i])
        for i in (0, 1)
    )
    assert (a - b).target["kind"] == "score_difference"
    named = [replace(e, provenance={**e.provenance, "model": "some/encoder"}) for e in (a, b)]
    assert (named[0] - named[1]).target["kind"] == "contrast"
