"""Every registered method carries what it must, and has what it says it has – no more, no less."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import clearhead
from clearhead import cli
from clearhead.methods import METHOD_REGISTRY, catalogue
from tests.methods import replica_comparison

METHODS = sorted(METHOD_REGISTRY)
REAL = [name for name in METHODS if METHOD_REGISTRY[name].declaration.family != "control"]
#: What is asked for, such that a method that heeds it must give something else than by default.
OTHERWISE = {"layers": {"layers": (0, 1)}, "heads": {"heads": [1]}, "rows": {"rows": "all"}}


@pytest.mark.parametrize("method", REAL)
def test_carries_formula_citation_and_cost(method: str) -> None:
    cls = METHOD_REGISTRY[method]
    docstring = sys.modules[cls.__module__].__doc__
    assert docstring and re.search(r"\n\n *\S+ = \S.*\n", docstring), (
        "a formula, a paragraph by itself, in the docstring"
    )
    assert re.search(r"\(\d{4}\), .+", cls.declaration.citation), "a citation: authors (year), title, where"
    assert re.match(r"(one|two|\d+) (forward|backward)", cls.declaration.cost)
    assert cls.__module__ == f"clearhead.methods.{method.replace('-', '_')}", "one file a method, named after it"


@pytest.mark.parametrize("method", REAL)
def test_has_a_replica_and_a_test_file(method: str) -> None:
    assert callable(replica_comparison.replica_of(method).scores)
    assert (Path(__file__).parent / f"test_{method.replace('-', '_')}.py").is_file()


def test_replicas_use_no_code_of_clearhead() -> None:
    for file in (Path(__file__).parents[1] / "replicas").glob("*.py"):
        assert not re.search(r"^\s*(import|from) clearhead", file.read_text(encoding="utf-8"), re.MULTILINE), file.name


@pytest.mark.parametrize("option", OTHERWISE)
@pytest.mark.parametrize("method", METHODS)
def test_has_what_it_declares(method: str, option: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    how = OTHERWISE[option]
    if option not in METHOD_REGISTRY[method].declaration.supports:
        having = ", ".join(sorted(name for name in METHODS if option in METHOD_REGISTRY[name].declaration.supports))
        for ask in (lambda: ex.explain(text, method, **how), lambda: clearhead.Method(method, **how)):
            with pytest.raises(clearhead.InputError, match=re.escape(f"{method} has no {option}=")) as refusal:
                ask()
            assert having in str(refusal.value)
        return
    usual, other = ex.explain(text, method), ex.explain(text, method, **how)
    if option == "rows":
        assert usual.matrix is None
        assert other.matrix.shape == (len(other), len(other))
        assert replica_comparison.gap(other.matrix[0], usual.scores) < 1e-12
        assert replica_comparison.gap(other.matrix[1], usual.scores) > 1e-3
        return
    assert replica_comparison.gap(other.scores, usual.scores) > 1e-3
    if option == "layers":
        assert len(usual.per_layer) > len(other.per_layer) or method in (
            "attention",
            "attention-gradcam",
            "attention-gradient",
            "partial-lrp",
        )
        assert len(other.per_layer) == 1


@pytest.mark.parametrize("method", METHODS)
def test_gives_the_parts_it_declares(method: str) -> None:
    declaration = METHOD_REGISTRY[method].declaration
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    e = ex.explain(text, method, per="head" if declaration.has_head_contributions else None)
    assert (e.per_layer is not None) == (declaration.layer_scores is not None) == ("layers" in declaration.supports)
    if declaration.layer_scores == "depths":
        np.testing.assert_array_equal(e.per_layer[-1], e.scores)
    if declaration.layer_scores == "contributions":
        assert replica_comparison.gap(e.per_layer.sum(0), e.scores) < 1e-12
        assert (e.per_head is not None) == declaration.has_head_contributions
        if e.per_head is not None:
            assert replica_comparison.gap(e.per_head.sum(1), e.per_layer) < 1e-12


def _less_of_one(output: Any) -> Tensor:
    return output.logits[:, 0] - 2 * output.logits[:, 1]


@pytest.mark.parametrize("method", METHODS)
def test_sign_and_target_are_as_declared(method: str) -> None:
    declaration = METHOD_REGISTRY[method].declaration
    ex, texts = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES
    of = [np.concatenate([e.scores for e in ex.explain(texts, method, target=label)]) for label in (0, 1)]
    # no plain contrast: its relevance would start with a sum of zero, which some rules keep
    both = np.concatenate([e.scores for e in ex.explain(texts, method, target=_less_of_one)])
    assert (np.concatenate([*of, both]).min() < 0) == declaration.signed
    assert (replica_comparison.gap(*of) > 1e-3) == (declaration.target == "any")
    linear = declaration.target == "any" and replica_comparison.gap(both, of[0] - 2 * of[1]) < 1e-11
    # with few evaluations SHAP opens the groups that count most, which is another choice for another target
    assert linear == declaration.linear_in_target or method == "shap"


def test_the_table_lists_every_method() -> None:
    lines = replica_comparison.explainer("bert/classify").methods()
    assert [line.name for line in lines] == METHODS
    assert all(line.applies for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": (5, 9)}, r"leaves none of the 3 layers"),
        ({"layers": (2, 1)}, r"leaves none of the 3 layers"),
        ({"layers": 5}, r"layers=5 is not a half-open range"),
        ({"layers": (0, 3, 2)}, r"layers=\(0, 3, 2\) is not a half-open range"),
        ({"layers": range(0, 3, 2)}, r"is not a half-open range"),
        ({"heads": [4]}, r"the model has 4 heads"),
        ({"heads": []}, r"the model has 4 heads"),
        ({"heads": 3}, r"heads=3 is not a list of heads"),
        ({"heads": [1.5]}, r"is not a list of heads"),
        ({"rows": "some"}, r"rows='some' is not known"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict, said: str) -> None:
    """Whether they stand beside the method or inside it."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    with pytest.raises(clearhead.InputError, match=said):
        ex.explain(text, "generic", **options)
    with pytest.raises(clearhead.InputError, match=said):
        ex.explain(text, clearhead.Method("generic", **options))


def test_a_range_is_a_range_of_layers() -> None:
    """`layers=range(0, 3)` means three layers, beside the method and inside it."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    whole = ex.explain(text, "generic").scores
    np.testing.assert_array_equal(ex.explain(text, "generic", layers=range(3)).scores, whole)
    np.testing.assert_array_equal(ex.explain(text, clearhead.Method("generic", layers=range(0, 3))).scores, whole)


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [("saliency", "reduce", "mean"), ("input-x-gradient", "reduce", "max"), ("attcat", "weights", "column")],
)
def test_bad_values_of_own_options_are_refused(method: str, option: str, value: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    with pytest.raises(clearhead.InputError, match=f"unknown {option} '{value}'.* Accepted"):
        ex.explain(text, clearhead.Method(method, **{option: value}))


def test_methods_that_others_claim_patents_on_say_so_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table of methods, in the documentation and on the command line."""
    claimed = {"lrp", "partial-lrp", "transformer-attribution", "attn-lrp"}
    lines = {line.name: line.note for line in replica_comparison.explainer("bert/classify").methods()}
    assert {name for name, note in lines.items() if "patent" in note} == claimed
    for name in claimed:
        assert lines[name] in catalogue.format_method_section(METHOD_REGISTRY[name])
    cli.app(["methods"], standalone_mode=False)
    said = " ".join(capsys.readouterr().out.split())
    assert " ".join(lines["lrp"].split()) in said
    assert ", ".join(sorted(claimed)) + ": Others claim patents" in said


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("integrated-gradients", {"baseline": 3}),
        ("smoothgrad", {"noise": "x"}),
        ("smoothgrad", {"noise": float("nan")}),
        ("smoothgrad", {"noise": -1}),
        ("smoothgrad", {"samples": 2.5}),
        ("lime", {"ridge": "a"}),
        ("deeplift-shap", {"baselines": 3}),
        ("gradient-shap", {"examples": ["a text", 3]}),
    ],
)
def test_options_are_held_to_their_types(name: str, options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(clearhead.InputError, match=f"^{option}=.* is not possible: give "):
        clearhead.Method(name, **options)


def test_options_of_the_right_types() -> None:
    assert clearhead.Method("smoothgrad", noise=1).get_option("noise") == 1
    assert clearhead.Method("lime", width=None).get_option("width", "absent") is None
    assert clearhead.Method("gradient-shap", baselines=["zero", "mean"]).get_option("baselines") == ("zero", "mean")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("smoothgrad", {"samples": 0}, "samples=0 is not possible"),
        ("gradient-shap", {"samples": 0}, "samples=0 is not possible"),
        ("deeplift-shap", {"samples": 0}, "samples=0 is not possible"),
        ("layer-conductance", {"steps": 0}, "steps=0 is not possible"),
        ("integrated-gradients", {"baseline": "nothing"}, "baseline='nothing' is not known"),
        ("integrated-gradients", {"step": 5}, "Accepted: baseline, captum, reduce, rule, steps$"),
        ("attcat", {"weight": "row"}, "Accepted: absolute, heads, layers, weights$"),
    ],
    ids=str,
)
def test_what_is_refused_is_what_was_given(name: str, options: dict, said: str) -> None:
    """The message names the caller's own option and number, and accepts what the method has."""
    with pytest.raises(clearhead.InputError, match=said):
        replica_comparison.explainer("bert/classify").explain(
            replica_comparison.SENTENCES[0], clearhead.Method(name, **options)
        )


def test_what_is_no_method_is_refused() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for wrong in (3, None, [3]):
        with pytest.raises(clearhead.InputError, match="unknown method"):
            ex.explain(replica_comparison.SENTENCES[0], wrong)
