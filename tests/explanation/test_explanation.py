"""The result: what it holds, how it adds up, and that it survives a file and JSON."""

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


def made(scores: Any, **more: Any) -> Explanation:
    scores = np.asarray(scores, dtype=float)
    names = [f"t{i}" for i in range(len(scores))]
    target = {"kind": "label", "name": "x", "scale": "logit", "value": 1.0}
    return Explanation(build_numbered_units(len(scores), "text", names), scores, "m", target, {}, **more)


#: The names of what `results` gives.
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
    """One of every shape that a result can have."""
    text, image = explainer("bert/classify", torch.float32), explainer("vit/image", torch.float32)
    picture = inputs("vit/image")[0]
    masked = explainer("roberta/mask")
    every = {
        "text": text.explain(TEXTS[1], Method("generic", layers=(-2, None)), per="head"),
        "pair": text.explain(PAIR, "attcat", target=2, scale="probability"),
        "words": text.explain(PAIR, "input-x-gradient").words(),
        "matrix": text.explain(TEXTS[0], "rollout", rows="all"),
        "sentences": text.explain(TEXTS[0], "rollout", rows="all").sentences(),
        "callable": text.explain(TEXTS[0], target=lambda output: output.logits[:, 0]),
        "difference": text.explain(TEXTS[0], target=0) - text.explain(TEXTS[0], target=1),
        "regression": explainer("bert/classify", num_labels=1).explain(TEXTS[0]),
        "multi": explainer("bert/classify", problem_type="multi_label_classification").explain(
            TEXTS[0], scale="log-odds"
        ),
        "masked": masked.explain(MASKED_TEXTS[0].format(mask="<mask>")),
        "ids": clearhead.load(text.adapter.model).explain({"input_ids": torch.tensor([[5, 6, 7]])}),
        "image": image.explain(picture, "saliency", target=Contrast(1, 0)),
        "heads": image.explain(picture, "generic", per="head"),
    }
    every["dropped"] = replace(every["text"], scores=np.where(np.arange(len(every["text"])) == 1, np.nan, 1.0))
    assert tuple(every) == SHAPES
    return every


@pytest.mark.parametrize("name", SHAPES)
def test_json_round_trip_follows_the_schema(name: str) -> None:
    e = results()[name]
    text = json.dumps(e.to_dict(), allow_nan=False)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    assert clearhead.from_dict(json.loads(text)) == replace(e, image=None)
    assert np.array_equal(clearhead.from_dict(json.loads(text)).scores, e.scores, equal_nan=True)


@pytest.mark.parametrize("name", SHAPES)
def test_file_round_trip(name: str, tmp_path: Path) -> None:
    e = results()[name]
    back = clearhead.load_explanation(e.save(tmp_path / "e.safetensors"))
    assert back == e and back.units == e.units
    for part in ("scores", "matrix", "per_layer", "per_head", "image"):
        mine, theirs = getattr(e, part), getattr(back, part)
        assert (mine is None) == (theirs is None), part
        assert mine is None or (mine.dtype == theirs.dtype and np.array_equal(mine, theirs, equal_nan=True))


def test_schema_describes_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["version"]["const"] == EXPLANATION_VERSION

    def described(part: Any, path: str) -> None:
        for key, value in part.get("properties", {}).items():
            assert value.get("description") or SCHEMA["$defs"][value["$ref"].rpartition("/")[2]].get("description"), (
                path + key
            )
            described(value, f"{path}{key}.")

    described(SCHEMA, "")
    for name, part in SCHEMA["$defs"].items():
        described(part, f"{name}.")
    e = results()["heads"].to_dict()  # what a result really holds is described, in the open objects, too
    for part in ("certificate", "provenance"):
        assert set(e[part]) <= set(SCHEMA["$defs"][part]["properties"])
    assert set(results()["text"].to_dict()["provenance"]) <= set(SCHEMA["$defs"]["provenance"]["properties"])


def test_invalid_json_is_refused() -> None:
    good = results()["text"].to_dict()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "scores": ["a"]}, SCHEMA)
    with pytest.raises(InputError, match="newer clearhead"):
        clearhead.from_dict({**good, "version": EXPLANATION_VERSION + 1})
    for wrong in ({}, {**good, "schema": "other"}, {**good, "version": "1"}, {**good, "scores": ["a"]}):
        with pytest.raises(InputError, match="not an explanation that clearhead wrote"):
            clearhead.from_dict(wrong)
    for wrong in (
        {**good, "scores": [1.0]},
        {**good, "units": {}},
        {key: good[key] for key in good if key != "method"},
    ):
        with pytest.raises(InputError, match="damaged"):
            clearhead.from_dict(wrong)


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"a": np.zeros(1)}, tmp_path / "other")
    for name, message in [("none", "no file"), ("text", "not an explanation"), ("other", "not an explanation")]:
        with pytest.raises(InputError, match=message):
            clearhead.load_explanation(tmp_path / name)
    with pytest.raises(InputError, match="newer clearhead"):
        explanation_from_arrays({**results()["text"].to_dict(), "version": 9}, {})


def test_fields_of_an_explanation() -> None:
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
    assert len(explainer("bert/classify", num_labels=9).explain(TEXTS[0]).prediction["top"]) == 5
    multi = [line["probability"] for line in results()["multi"].prediction["top"]]
    assert sum(multi) != pytest.approx(1)
    assert "probability" not in results()["regression"].prediction and "value" in results()["regression"].prediction
    with pytest.raises(InputError, match="unknown stream 'image'"):
        e["image"]
    assert "9 tokens" in repr(made(range(9))) and "17 patches" in repr(results()["image"])


def test_top_keeps_order_of_ties_and_skips_special_units() -> None:
    e = made([1, 3, 2, 3, 2, float("nan")])
    assert [name for name, _ in e.top()] == ["t1", "t3", "t2", "t4", "t0"]
    marked = replace(e, units=replace(e.units, special=(False, True, False, False, False, False)))
    assert [name for name, _ in marked.top(2)] == ["t3", "t2"]
    assert [name for name, _ in marked.top(2, include_special=True)] == ["t1", "t3"]


def test_nan_scores_do_not_spread_to_other_words() -> None:
    """A profile that drops special tokens (NaN) leaves the words, sentences and regions of the others their scores."""
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
    picture = explainer("vit/image").explain(inputs("vit/image")[0], "generic", profile="mm_vit")
    regions = picture.regions((2, 2))
    assert np.isnan(regions.scores[0]) and np.nansum(regions.scores) == pytest.approx(np.nansum(picture.scores))


def test_word_scores_are_sums_and_matrix_rows_are_means() -> None:
    ex = explainer("bert/classify")
    e = ex.explain(TEXTS[1], "attention", rows="all", per="head")
    words = e.words()
    assert len(words) < len(e) and words.scores.sum() == pytest.approx(e.scores.sum())
    assert words.matrix is not None and words.matrix.shape == (len(words), len(words))
    assert words.matrix.sum(1) == pytest.approx(np.ones(len(words)))  # rows of attention still sum to one
    assert words.matrix[0] == pytest.approx(words.scores)  # the read-out is the first row, before and after
    assert words.words().units == words.units
    share = ex.explain(TEXTS[1], "generic", per="head").words()
    assert share.per_layer is not None and share.per_head is not None
    assert share.per_layer.sum(0) == pytest.approx(share.scores)
    assert share.per_head.sum((0, 1)) == pytest.approx(share.scores)


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
    assert difference.target["kind"] == "difference of scores" and difference.target["scale"] == "log-odds"
    assert difference.target["value"] == a.target["value"] - b.target["value"]
    assert abs(difference.target["value"] - contrast.target["value"]) > 1e-3


def test_difference_of_nonlinear_methods_is_marked() -> None:
    ex = explainer("bert/classify")

    def kind(a: Explanation, b: Explanation) -> str:
        return (a - b).target["kind"]

    one = ex.explain(TEXTS[0], "input-x-gradient", target=0)
    assert kind(ex.explain(TEXTS[0], target=0), ex.explain(TEXTS[0], target=1)) == "difference of scores"
    assert kind(one, ex.explain(TEXTS[0], "attcat", target=1)) == "difference of scores"
    p = ex.explain(TEXTS[0], "input-x-gradient", target=1, scale="probability")
    assert kind(one, p) == "difference of scores" and (one - p).target["scale"] is None
    norm = Method("input-x-gradient", reduce="l2")
    assert kind(*(ex.explain(TEXTS[0], norm, target=i) for i in (0, 1))) == "difference of scores"
    assert (one - one).signed and (one - one).method == "input-x-gradient"
    assert (one - p).provenance["minus"]["method"] == "input-x-gradient"
    rows = [ex.explain(TEXTS[0], "generic", rows="all", target=i) for i in (0, 1)]
    assert (rows[0] - rows[1]).matrix == pytest.approx(rows[0].matrix - rows[1].matrix)


def test_base_values_are_subtracted() -> None:
    assert (made([1, 2], base_value=0.0) - made([0, 1], base_value=0.5)).base_value == -0.5
    assert (made([1, 2], base_value=1.0) - made([0, 1])).base_value is None
    assert isinstance((made([1.0], base_value=1.0) - made([1.0], base_value=0.0)).base_value, float)


def test_subtraction_requires_the_same_input() -> None:
    text, image = explainer("bert/classify"), explainer("vit/image")
    with pytest.raises(InputError, match="same input"):
        text.explain(TEXTS[0]) - text.explain(TEXTS[1])
    one, other = image.explain(inputs("vit/image")[:2])
    assert one.units == other.units
    with pytest.raises(InputError, match="same input"):
        one - other
    with pytest.raises(TypeError):
        one - 1


def test_equality() -> None:
    assert made([1, float("nan")]) == made([1, float("nan")]) and made([1, 2]) != made([1, 3]) and made([1]) != 1
    pictures = [replace(made([1]), image=np.full((2, 2, 3), i, dtype=np.uint8)) for i in (0, 1)]
    assert pictures[0] != pictures[1] and pictures[0] != made([1])


def test_to_json_value_returns_plain_types() -> None:
    e = made([1.0], certificate={"error": float("inf"), "count": np.int64(3), "dtype": torch.float32, "flag": np.True_})
    assert e.to_dict()["certificate"] == {"error": None, "count": 3, "dtype": "torch.float32", "flag": True}


def test_heat_map_of_an_image() -> None:
    e = results()["heads"]
    assert e.heat_map().shape == e.units.grid
    assert e.heat_map()[1, 2] == e.scores[e.tokens.index("1,2")]
    with pytest.raises(InputError, match="no grid"):
        made([1]).heat_map()


def test_the_example_in_the_documentation_follows_the_schema() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation.md"
    example = json.loads(page.read_text("utf-8").split("```json\n")[1].split("```")[0])
    jsonschema.validate(example, SCHEMA)
    assert clearhead.from_dict(example).top(1) == [("boring", 0.31)]


def _damaged(form: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one thing in it changed."""
    form = json.loads(json.dumps(form))
    *way, last = path.split(".")
    part: Any = form
    for key in way:
        part = part[int(key) if isinstance(part, list) else key]
    part[last] = value
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
def test_damaged_data_is_refused(name: str, path: str, value: Any) -> None:
    with pytest.raises(InputError) as said:
        clearhead.from_dict(_damaged(results()[name].to_dict(), path, value))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("wrong", [[], None, "text", 3, [1], {"schema": []}])
def test_data_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="not an explanation that clearhead wrote"):
        clearhead.from_dict(wrong)


@pytest.mark.parametrize("metadata", ["[]", "3", "null", '"x"', "{}", "{"])
def test_file_metadata_must_be_a_mapping(metadata: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"scores": np.zeros(2)}, tmp_path / "odd", metadata={"clearhead": metadata})
    with pytest.raises(InputError, match="odd'"):
        clearhead.load_explanation(tmp_path / "odd")


def test_models_of_one_class_are_distinguished_by_logits() -> None:
    """Models given as objects go by their class: their difference is no contrast of two targets of one model."""
    ex = explainer("bert/classify")
    other = clearhead.load(text_model("bert", initializer_range=0.2))
    one, two = (e.explain(TEXTS[0], "input-x-gradient", target=0) for e in (ex, other))
    assert one.provenance["model"] == two.provenance["model"]
    assert (one - two).target["kind"] == "difference of scores"
    alone, *_ = ex.explain(TEXTS, "input-x-gradient", target=1)  # in a batch, so that the last bits may differ
    assert (one - alone).target["kind"] == "contrast"


def test_models_without_classes_are_not_distinguished() -> None:
    encoder = clearhead.load(text_model("bert", "Model"))
    a, b = (
        encoder.explain(TEXTS[0], "input-x-gradient", target=lambda output, i=i: output.last_hidden_state[:, 0, i])
        for i in (0, 1)
    )
    assert (a - b).target["kind"] == "difference of scores"
    named = [replace(e, provenance={**e.provenance, "model": "some/encoder"}) for e in (a, b)]
    assert (named[0] - named[1]).target["kind"] == "contrast"
