import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

import clearhead
from clearhead import (
    AnswerSpan,
    Contrast,
    DetectionQuery,
    Explanation,
    GeneratedToken,
    MultiStreamExplanation,
    TokenLabel,
)
from clearhead.cli import app
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render import reproduction
from tests import dual_models, models
from tests.render import example_results
from tests.render.conftest import make_explanation

SINGLE_STREAM_CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("bert/classify", 'She said "it\'s" good\nso\t{x}', {}),
    ("bert/classify", models.PAIR, {"target": "LABEL_1"}),
    (
        "bert/classify",
        "I like the movie.",
        {"target": clearhead.Contrast("LABEL_2", "LABEL_0"), "scale": "probability"},
    ),
    ("bert/classify", "I like the movie. " * 9, {"max_length": 10, "method": "random", "seed": 5}),
    ("bert/classify", "I like the movie.", {"method": clearhead.Method("generic", layers=(-2, None)), "per": "head"}),
    ("bert/classify", "I like the movie. " * 9, {"max_length": 10, "truncation_side": "left"}),
    ("bert/classify", "I like the movie. " * 9, {}),
    ("bert/mask", "I like the [MASK].", {"target": clearhead.MaskedToken("##ing")}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.MaskedToken("##ing", mask_index=1)}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.MaskedToken(mask_index=1)}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.Contrast("the", "is", mask_index=1)}),
]


@pytest.mark.parametrize(("subject", "raw", "options"), SINGLE_STREAM_CASES)
def test_python_snippet_reproduces_the_explanation(
    subject: str, raw: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = models.explainer(subject)
    first = ex.explain(raw, **options)
    explanation = replace(first, provenance={**first.provenance, "model": "some/model"})
    monkeypatch.setattr(clearhead, "load", lambda name, dtype: ex if dtype == "float64" else None, raising=False)
    names: dict[str, Any] = {}
    exec(reproduction.format_python_snippet(explanation), names)
    assert names["e"].tokens == first.tokens
    assert np.allclose(names["e"].scores, first.scores) and names["e"].target == first.target
    assert (names["e"].per_head is None) == (first.per_head is None)


def test_python_snippet_reproduces_word_merging() -> None:
    explanation = models.explainer("bert/classify").explain("I like the movie.", method="generic").words()
    assert reproduction.format_python_snippet(explanation).endswith(".words()")
    assert "clearhead.load((model, processor))" in reproduction.format_python_snippet(explanation)


def test_cli_command_is_parsed_to_the_same_options() -> None:
    explanation = models.explainer("bert/classify").explain(
        ("-I like; $the `movie`", "it's"), target=clearhead.Contrast("LABEL_1", "LABEL_2"), method="random", seed=3
    )
    line = reproduction.format_cli_command(
        replace(explanation, provenance={**explanation.provenance, "model": "some/model"})
    )
    assert line is not None
    words = shlex.split(line)
    assert words[:2] == ["clearhead", "explain"]
    command = get_command(app).commands["explain"]  # type: ignore[attr-defined]
    parsed = command.make_context("explain", words[2:]).params
    assert parsed["inputs"] == ["-I like; $the `movie`"] and parsed["pair"] == "it's"
    assert (parsed["model"], parsed["methods"], parsed["seed"]) == ("some/model", ["random"], 3)
    assert (parsed["target"], parsed["against"]) == ("LABEL_1", "LABEL_2")


def test_no_cli_command_for_numeric_input_or_model_object() -> None:
    numeric = make_explanation(["a"], [1.0])
    assert reproduction.format_cli_command(numeric) is None  # no text and no model name
    unnamed: Explanation = models.explainer("bert/classify").explain("So boring!", method="generic")
    assert reproduction.format_cli_command(unnamed) is None  # the model was given as an object


def test_command_and_snippet_have_input_and_loading_options() -> None:
    ex = models.explainer("bert/mask")
    e = ex.explain(
        "I [MASK] the [MASK]. " * 5,
        target=clearhead.Contrast("the", "is", mask_index=1),
        max_length=9,
        method="generic",
    )
    provenance = {**e.provenance, "model": "some/model", "load_options": {"readout": 2}}
    line = reproduction.format_cli_command(replace(e, provenance=provenance))
    assert line is not None
    for option in ("--mask 1", "--target the --against is", "--max-length 9", "--dtype float64", "--readout 2"):
        assert option in line
    assert "clearhead.load('some/model', readout=2, dtype='float64')" in reproduction.format_python_snippet(
        replace(e, provenance=provenance)
    )
    snippet = reproduction.format_python_snippet(replace(e, provenance=provenance).words())
    assert "max_length=9" in snippet and snippet.endswith(".words()")


def with_model_name(explanation: AnyExplanation) -> AnyExplanation:
    """Set a model name in the provenance."""
    by_stream = {
        stream: replace(stream_explanation, provenance={**stream_explanation.provenance, "model": "some/model"})
        for stream, stream_explanation in explanation.by_stream.items()
    }
    return MultiStreamExplanation(by_stream) if len(by_stream) > 1 else next(iter(by_stream.values()))


def clip() -> clearhead.Explainer:
    return dual_models.explainer("clip")


def decoder() -> clearhead.Explainer:
    return clearhead.load(example_results.decoder())


def bart() -> clearhead.Explainer:
    return clearhead.load(example_results.bart())


def detector() -> clearhead.Explainer:
    ex = clearhead.load(example_results.detector())
    ex.adapter.threshold = 0.3  # type: ignore[attr-defined]
    return ex


def tagger() -> clearhead.Explainer:
    return clearhead.load(models.text_model("bert", "ForTokenClassification"))


def reader() -> clearhead.Explainer:
    return clearhead.load(models.text_model("bert", "ForQuestionAnswering", num_labels=2))


IMAGE_TEXT_INPUT = {"text": "I like the movie.", "image": "picture.png"}
TEXT_INPUT = {"inputs": "I like the movie."}
IMAGE_INPUT = {"inputs": "picture.png"}
QUESTION_INPUT = {"inputs": models.PAIR}
#: Explainer, arguments, and the expected options of the command.
MULTI_STREAM_CASES: list[tuple[Callable[[], clearhead.Explainer], dict[str, Any], str]] = [
    (clip, IMAGE_TEXT_INPUT, "--text=I like the movie.' --image=picture.png"),
    (clip, {**IMAGE_TEXT_INPUT, "scale": "logit"}, "--scale logit"),
    (clip, {**IMAGE_TEXT_INPUT, "profile": "mm_clip"}, "--profile mm_clip"),
    (clip, {**IMAGE_TEXT_INPUT, "target": Contrast(None, "a book")}, "--against 'a book'"),
    (decoder, TEXT_INPUT, "--methods generic --dtype float64 -- 'I like the movie.'"),
    (decoder, {**TEXT_INPUT, "target": "the"}, "--target the"),
    (decoder, {**TEXT_INPUT, "target": Contrast("the", "it")}, "--target the --against it"),
    (decoder, {**TEXT_INPUT, "answer": " It is boring"}, "--answer ' It is boring'"),
    (decoder, {**TEXT_INPUT, "target": GeneratedToken(), "max_new_tokens": 3}, "--max-new-tokens 3"),
    (
        decoder,
        {**TEXT_INPUT, "answer": " It is", "target": GeneratedToken(1, "the", "it")},
        "'step 1 = the' --against it",
    ),
    (bart, {**TEXT_INPUT, "max_new_tokens": 4}, "--target 'every step'"),
    (bart, {**TEXT_INPUT, "answer": "She hates it", "target": GeneratedToken(1)}, "--target 'step 1 = "),
    (detector, IMAGE_INPUT, "-- picture.png"),
    (detector, {**IMAGE_INPUT, "target": DetectionQuery(2, "star")}, "--target 'query 2 = star'"),
    (detector, {**IMAGE_INPUT, "target": DetectionQuery(2, "star", "square")}, "--against square"),
    (tagger, TEXT_INPUT, "--target 'every token'"),
    (tagger, {**TEXT_INPUT, "target": TokenLabel(3, "LABEL_1", "LABEL_2")}, "'token 3 = LABEL_1' --against LABEL_2"),
    (reader, QUESTION_INPUT, "'--pair=She hates the book' -- 'I like the movie.'"),
    (reader, {**QUESTION_INPUT, "target": AnswerSpan("end")}, "--target 'answer end"),
]


@pytest.mark.parametrize(("make_explainer", "arguments", "expected_options"), MULTI_STREAM_CASES)
def test_snippet_and_command_reproduce_streams_and_steps(
    make_explainer: Callable[[], clearhead.Explainer],
    arguments: dict[str, Any],
    expected_options: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduction, "IMAGE_PLACEHOLDER", "picture.png")
    Image.fromarray(example_results.picture()).save("picture.png")
    ex = make_explainer()
    first = ex.explain(**arguments, method="generic")
    monkeypatch.setattr(clearhead, "load", lambda name, dtype: ex if dtype == "float64" else None, raising=False)
    names: dict[str, Any] = {}
    exec(reproduction.format_python_snippet(with_model_name(first)), names)
    reproduced = names["e"]
    assert reproduced.streams == first.streams and reproduced.steps == first.steps and reproduced.target == first.target
    for stream, explanation in first.by_stream.items():
        np.testing.assert_allclose(reproduced[stream].scores, explanation.scores)

    line = reproduction.format_cli_command(with_model_name(first))
    assert line is not None and expected_options in line
    words = shlex.split(line)
    parsed = get_command(app).commands["explain"].make_context("explain", words[2:]).params  # type: ignore[attr-defined]
    assert parsed["model"] == "some/model"


def test_no_cli_command_for_token_ids_or_region_features() -> None:
    ids = decoder().explain(TEXT_INPUT["inputs"], answer=(5, 6, 7), method="generic")
    assert reproduction.format_cli_command(
        with_model_name(ids)
    ) is None and "answer=(5, 6, 7)" in reproduction.format_python_snippet(with_model_name(ids))
    regions = example_results.every()["text and regions"]
    assert reproduction.format_cli_command(with_model_name(regions)) is None
    assert "regions=(features, boxes)" in reproduction.format_python_snippet(regions)
