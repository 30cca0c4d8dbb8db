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
from tests.render.conftest import made

SAME: list[tuple[str, Any, dict[str, Any]]] = [
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


@pytest.mark.parametrize(("subject", "raw", "options"), SAME)
def test_the_snippet_gives_the_same_again(
    subject: str, raw: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = models.explainer(subject)
    first = ex.explain(raw, **options)
    given = replace(first, provenance={**first.provenance, "model": "some/model"})
    monkeypatch.setattr(clearhead, "load", lambda name, dtype: ex if dtype == "float64" else None, raising=False)
    names: dict[str, Any] = {}
    exec(reproduction.format_python_snippet(given), names)
    assert names["e"].tokens == first.tokens
    assert np.allclose(names["e"].scores, first.scores) and names["e"].target == first.target
    assert (names["e"].per_head is None) == (first.per_head is None)


def test_the_snippet_merges_words_again() -> None:
    explanation = models.explainer("bert/classify").explain("I like the movie.").words()
    assert reproduction.format_python_snippet(explanation).endswith(".words()")
    assert "clearhead.load((model, processor))" in reproduction.format_python_snippet(explanation)


def test_the_command_line_understands_the_command() -> None:
    explanation = models.explainer("bert/classify").explain(
        ("-I like; $the `movie`", "it's"), target=clearhead.Contrast("LABEL_1", "LABEL_2"), method="random", seed=3
    )
    line = reproduction.format_cli_command(
        replace(explanation, provenance={**explanation.provenance, "model": "some/model"})
    )
    assert line is not None
    words = shlex.split(line)
    assert words[:2] == ["clearhead", "explain"]
    verb = get_command(app).commands["explain"]  # type: ignore[attr-defined]
    read = verb.make_context("explain", words[2:]).params
    assert read["inputs"] == ["-I like; $the `movie`"] and read["pair"] == "it's"
    assert (read["model"], read["methods"], read["seed"]) == ("some/model", ["random"], 3)
    assert (read["target"], read["against"]) == ("LABEL_1", "LABEL_2")


def test_there_is_no_command_for_what_it_cannot_say() -> None:
    named = made(["a"], [1.0])
    assert reproduction.format_cli_command(named) is None  # numbers in, no text
    own: Explanation = models.explainer("bert/classify").explain("So boring!")
    assert reproduction.format_cli_command(own) is None  # a model that came as an object


def test_the_command_says_how_the_input_was_read_and_the_model_loaded() -> None:
    ex = models.explainer("bert/mask")
    e = ex.explain("I [MASK] the [MASK]. " * 5, target=clearhead.Contrast("the", "is", mask_index=1), max_length=9)
    told = {**e.provenance, "model": "some/model", "loading": {"readout": 2}}
    line = reproduction.format_cli_command(replace(e, provenance=told))
    assert line is not None
    for words in ("--mask 1", "--target the --against is", "--max-length 9", "--dtype float64", "--readout 2"):
        assert words in line
    assert "clearhead.load('some/model', readout=2, dtype='float64')" in reproduction.format_python_snippet(
        replace(e, provenance=told)
    )
    words = reproduction.format_python_snippet(replace(e, provenance=told).words())
    assert "max_length=9" in words and words.endswith(".words()")


def named(explanation: AnyExplanation) -> AnyExplanation:
    """As if the model had come by name."""
    parts = {
        stream: replace(part, provenance={**part.provenance, "model": "some/model"})
        for stream, part in explanation.by_stream.items()
    }
    return MultiStreamExplanation(parts) if len(parts) > 1 else next(iter(parts.values()))


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


PAIR = {"text": "I like the movie.", "image": "picture.png"}
TEXT = {"inputs": "I like the movie."}
SEEN = {"inputs": "picture.png"}
ASKED = {"inputs": models.PAIR}
#: A model, what it is asked, and what of it stands in the command.
STREAMS: list[tuple[Callable[[], clearhead.Explainer], dict[str, Any], str]] = [
    (clip, PAIR, "--text=I like the movie.' --image=picture.png"),
    (clip, {**PAIR, "scale": "logit"}, "--scale logit"),
    (clip, {**PAIR, "profile": "mm_clip"}, "--profile mm_clip"),
    (clip, {**PAIR, "target": Contrast(None, "a book")}, "--against 'a book'"),
    (decoder, TEXT, "--methods generic --dtype float64 -- 'I like the movie.'"),
    (decoder, {**TEXT, "target": "the"}, "--target the"),
    (decoder, {**TEXT, "target": Contrast("the", "it")}, "--target the --against it"),
    (decoder, {**TEXT, "answer": " It is boring"}, "--answer ' It is boring'"),
    (decoder, {**TEXT, "target": GeneratedToken(), "max_new_tokens": 3}, "--max-new-tokens 3"),
    (decoder, {**TEXT, "answer": " It is", "target": GeneratedToken(1, "the", "it")}, "'step 1 = the' --against it"),
    (bart, {**TEXT, "max_new_tokens": 4}, "--target 'every step'"),
    (bart, {**TEXT, "answer": "She hates it", "target": GeneratedToken(1)}, "--target 'step 1 = "),
    (detector, SEEN, "-- picture.png"),
    (detector, {**SEEN, "target": DetectionQuery(2, "star")}, "--target 'query 2 = star'"),
    (detector, {**SEEN, "target": DetectionQuery(2, "star", "square")}, "--against square"),
    (tagger, TEXT, "--target 'every token'"),
    (tagger, {**TEXT, "target": TokenLabel(3, "LABEL_1", "LABEL_2")}, "'token 3 = LABEL_1' --against LABEL_2"),
    (reader, ASKED, "'--pair=She hates the book' -- 'I like the movie.'"),
    (reader, {**ASKED, "target": AnswerSpan("end")}, "--target 'answer end"),
]


@pytest.mark.parametrize(("make", "given", "typed"), STREAMS)
def test_several_streams_and_steps_can_be_had_again(
    make: Callable[[], clearhead.Explainer],
    given: dict[str, Any],
    typed: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduction, "IMAGE_PLACEHOLDER", "picture.png")
    Image.fromarray(example_results.picture()).save("picture.png")
    ex = make()
    first = ex.explain(**given)
    monkeypatch.setattr(clearhead, "load", lambda name, dtype: ex if dtype == "float64" else None, raising=False)
    names: dict[str, Any] = {}
    exec(reproduction.format_python_snippet(named(first)), names)
    again = names["e"]
    assert again.streams == first.streams and again.steps == first.steps and again.target == first.target
    for stream, part in first.by_stream.items():
        np.testing.assert_allclose(again[stream].scores, part.scores)

    line = reproduction.format_cli_command(named(first))
    assert line is not None and typed in line
    words = shlex.split(line)
    read = get_command(app).commands["explain"].make_context("explain", words[2:]).params  # type: ignore[attr-defined]
    assert read["model"] == "some/model"


def test_there_is_no_command_for_what_cannot_be_typed() -> None:
    ids = decoder().explain(TEXT["inputs"], answer=(5, 6, 7))
    assert reproduction.format_cli_command(
        named(ids)
    ) is None and "answer=(5, 6, 7)" in reproduction.format_python_snippet(named(ids))
    regions = example_results.every()["text and regions"]
    assert reproduction.format_cli_command(named(regions)) is None
    assert "regions=(features, boxes)" in reproduction.format_python_snippet(regions)
