import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import clearhead
from clearhead import Explanation
from clearhead.show import recipe
from tests import models
from tests.show.conftest import made

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
    ("bert/mask", "I like the [MASK].", {"target": clearhead.MaskedWord("##ing")}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.MaskedWord("##ing", mask=1)}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.MaskedWord(mask=1)}),
    ("bert/mask", "I [MASK] the [MASK].", {"target": clearhead.Contrast("the", "is", mask=1)}),
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
    exec(recipe.snippet(given), names)
    assert names["e"].tokens == first.tokens
    assert np.allclose(names["e"].scores, first.scores) and names["e"].target == first.target
    assert (names["e"].per_head is None) == (first.per_head is None)


def test_the_snippet_merges_words_again() -> None:
    explanation = models.explainer("bert/classify").explain("I like the movie.").words()
    assert recipe.snippet(explanation).endswith(".words()")
    assert "clearhead.load((model, processor))" in recipe.snippet(explanation)


def test_the_command_line_understands_the_command() -> None:
    from typer.main import get_command

    from clearhead.cli import app

    explanation = models.explainer("bert/classify").explain(
        ("-I like; $the `movie`", "it's"), target=clearhead.Contrast("LABEL_1", "LABEL_2"), method="random", seed=3
    )
    line = recipe.command(replace(explanation, provenance={**explanation.provenance, "model": "some/model"}))
    assert line is not None
    words = shlex.split(line)
    assert words[:2] == ["clearhead", "explain"]
    verb = get_command(app).commands["explain"]  # type: ignore[attr-defined]
    read = verb.make_context("explain", words[2:]).params
    assert read["inputs"] == ["-I like; $the `movie`"] and read["pair"] == "it's"
    assert (read["model"], read["method"], read["seed"]) == ("some/model", ["random"], 3)
    assert (read["target"], read["against"]) == ("LABEL_1", "LABEL_2")


def test_there_is_no_command_for_what_it_cannot_say() -> None:
    named = made(["a"], [1.0])
    assert recipe.command(named) is None  # numbers in, no text
    own: Explanation = models.explainer("bert/classify").explain("So boring!")
    assert recipe.command(own) is None  # a model that came as an object


def test_the_command_says_how_the_input_was_read_and_the_model_loaded() -> None:
    ex = models.explainer("bert/mask")
    e = ex.explain("I [MASK] the [MASK]. " * 5, target=clearhead.Contrast("the", "is", mask=1), max_length=9)
    told = {**e.provenance, "model": "some/model", "loading": {"readout": 2}}
    line = recipe.command(replace(e, provenance=told))
    assert line is not None
    for words in ("--mask 1", "--target the --against is", "--max-length 9", "--dtype float64", "--readout 2"):
        assert words in line
    assert "clearhead.load('some/model', readout=2, dtype='float64')" in recipe.snippet(replace(e, provenance=told))
    words = recipe.snippet(replace(e, provenance=told).words())
    assert "max_length=9" in words and words.endswith(".words()")
