"""Every registered method is documented, has a reference implementation, and matches its declaration."""

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
ATTRIBUTION_METHODS = [name for name in METHODS if METHOD_REGISTRY[name].declaration.family != "control"]
#: Options that must change the scores of every method that supports them.
CHANGED_OPTIONS = {"layers": {"layers": (0, 1)}, "heads": {"heads": [1]}, "rows": {"rows": "all"}}


@pytest.mark.parametrize("method", ATTRIBUTION_METHODS)
def test_method_documents_formula_and_citation(method: str) -> None:
    cls = METHOD_REGISTRY[method]
    docstring = sys.modules[cls.__module__].__doc__
    assert docstring and re.search(r"\n\n *\S+ = \S.*\n", docstring), (
        "the docstring needs a formula in a paragraph of its own"
    )
    assert re.search(r"\(\d{4}\), .+", cls.declaration.citation), "a citation needs authors (year), title, venue"
    assert cls.__module__ == f"clearhead.methods.{method.replace('-', '_')}", (
        "each method needs a file that is named after it"
    )


@pytest.mark.parametrize("method", ATTRIBUTION_METHODS)
def test_method_has_a_reference_implementation_and_a_test_file(method: str) -> None:
    assert callable(replica_comparison.replica_of(method).scores)
    assert (Path(__file__).parent / f"test_{method.replace('-', '_')}.py").is_file()


def test_reference_implementations_do_not_import_clearhead() -> None:
    for file in (Path(__file__).parents[1] / "replicas").glob("*.py"):
        assert not re.search(r"^\s*(import|from) clearhead", file.read_text(encoding="utf-8"), re.MULTILINE), file.name


@pytest.mark.parametrize("option", CHANGED_OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_declared_options_are_supported_and_others_are_rejected(method: str, option: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    options = CHANGED_OPTIONS[option]
    if option not in METHOD_REGISTRY[method].declaration.supports:
        supporting_methods = ", ".join(
            sorted(name for name in METHODS if option in METHOD_REGISTRY[name].declaration.supports)
        )
        for call in (lambda: ex.explain(text, method, **options), lambda: clearhead.Method(method, **options)):
            with pytest.raises(clearhead.InputError, match=re.escape(f"{method} does not accept {option}=")) as error:
                call()
            assert supporting_methods in str(error.value)
        return
    default, changed = ex.explain(text, method), ex.explain(text, method, **options)
    if option == "rows":
        assert default.matrix is None
        assert changed.matrix.shape == (len(changed), len(changed))
        assert replica_comparison.gap(changed.matrix[0], default.scores) < 1e-12
        assert replica_comparison.gap(changed.matrix[1], default.scores) > 1e-3
        return
    assert replica_comparison.gap(changed.scores, default.scores) > 1e-3
    if option == "layers":
        assert len(default.per_layer) > len(changed.per_layer) or method in (
            "attention",
            "attention-gradcam",
            "attention-gradient",
            "partial-lrp",
        )
        assert len(changed.per_layer) == 1


@pytest.mark.parametrize("method", METHODS)
def test_per_layer_and_per_head_match_the_declaration(method: str) -> None:
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


def _weighted_contrast(output: Any) -> Tensor:
    return output.logits[:, 0] - 2 * output.logits[:, 1]


@pytest.mark.parametrize("method", METHODS)
def test_sign_target_and_linearity_match_the_declaration(method: str) -> None:
    declaration = METHOD_REGISTRY[method].declaration
    ex, texts = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES
    by_label = [np.concatenate([e.scores for e in ex.explain(texts, method, target=label)]) for label in (0, 1)]
    # not a plain contrast: its relevance would start with a sum of zero, which some rules conserve
    of_contrast = np.concatenate([e.scores for e in ex.explain(texts, method, target=_weighted_contrast)])
    assert (np.concatenate([*by_label, of_contrast]).min() < 0) == declaration.signed
    assert (replica_comparison.gap(*by_label) > 1e-3) == (declaration.target == "any")
    is_linear = (
        declaration.target == "any" and replica_comparison.gap(of_contrast, by_label[0] - 2 * by_label[1]) < 1e-11
    )
    # with few evaluations SHAP opens the groups of the largest values, which depend on the target
    assert is_linear == declaration.linear_in_target or method == "shap"


def test_methods_table_lists_the_recommended_method_first_and_controls_last() -> None:
    rows = replica_comparison.explainer("bert/classify").methods()
    others = [name for name in ATTRIBUTION_METHODS if name != "ensemble"]
    assert [row.name for row in rows] == ["ensemble", *others, "position", "random"]
    assert [row.name for row in rows if row.is_recommended] == ["ensemble"]
    assert all(row.applies for row in rows)
    assert "yes, recommended" in repr(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (5, 9)}, r"selects none of the 3 layers"),
        ({"layers": (2, 1)}, r"selects none of the 3 layers"),
        ({"layers": 5}, r"layers=5 is not a half-open range"),
        ({"layers": (0, 3, 2)}, r"layers=\(0, 3, 2\) is not a half-open range"),
        ({"layers": range(0, 3, 2)}, r"is not a half-open range"),
        ({"heads": [4]}, r"the model has 4 heads"),
        ({"heads": []}, r"the model has 4 heads"),
        ({"heads": 3}, r"heads=3 is not a list of heads"),
        ({"heads": [1.5]}, r"is not a list of heads"),
        ({"rows": "some"}, r"rows='some' is not valid"),
    ],
    ids=str,
)
def test_invalid_layers_heads_and_rows_are_rejected(options: dict, message: str) -> None:
    """As arguments of `explain` and as options of the method."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    with pytest.raises(clearhead.InputError, match=message):
        ex.explain(text, "generic", **options)
    with pytest.raises(clearhead.InputError, match=message):
        ex.explain(text, clearhead.Method("generic", **options))


def test_range_object_selects_layers() -> None:
    """`layers=range(0, 3)` selects three layers, as an argument of `explain` and as an option of the method."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    scores = ex.explain(text, "generic").scores
    np.testing.assert_array_equal(ex.explain(text, "generic", layers=range(3)).scores, scores)
    np.testing.assert_array_equal(ex.explain(text, clearhead.Method("generic", layers=range(0, 3))).scores, scores)


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [("saliency", "reduce", "mean"), ("input-x-gradient", "reduce", "max"), ("attcat", "weights", "column")],
)
def test_unknown_values_of_method_options_are_rejected(method: str, option: str, value: str) -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    with pytest.raises(clearhead.InputError, match=f"unknown {option} '{value}'.* Accepted"):
        ex.explain(text, clearhead.Method(method, **{option: value}))


def test_patent_notes_appear_in_table_documentation_and_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`ex.methods()`, the documentation and the command line show the note."""
    patented = {"lrp", "partial-lrp", "transformer-attribution", "attn-lrp", "cp-lrp", "pa-lrp"}
    notes = {row.name: row.note for row in replica_comparison.explainer("bert/classify").methods()}
    assert {name for name, note in notes.items() if "patent" in note} == patented
    for name in patented:
        assert notes[name] in catalogue.format_method_section(METHOD_REGISTRY[name])
    cli.app(["methods"], standalone_mode=False)
    output = " ".join(capsys.readouterr().out.split())
    assert " ".join(notes["lrp"].split()) in output
    assert ", ".join(sorted(patented)) + ": Others claim patents" in output


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
def test_method_options_of_wrong_types_are_rejected(name: str, options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(clearhead.InputError, match=f"^{option}=.* is not valid: use "):
        clearhead.Method(name, **options)


def test_method_options_of_accepted_types_are_converted() -> None:
    assert clearhead.Method("smoothgrad", noise=1).get_option("noise") == 1
    assert clearhead.Method("lime", width=None).get_option("width", "absent") is None
    assert clearhead.Method("gradient-shap", baselines=["zero", "mean"]).get_option("baselines") == ("zero", "mean")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smoothgrad", {"samples": 0}, "samples=0 is not valid"),
        ("gradient-shap", {"samples": 0}, "samples=0 is not valid"),
        ("deeplift-shap", {"samples": 0}, "samples=0 is not valid"),
        ("layer-conductance", {"steps": 0}, "steps=0 is not valid"),
        ("integrated-gradients", {"baseline": "nothing"}, "baseline='nothing' is not recognised"),
        ("integrated-gradients", {"step": 5}, "Accepted: baseline, captum, reduce, rule, steps$"),
        ("attcat", {"weight": "row"}, "Accepted: absolute, heads, layers, weights$"),
    ],
    ids=str,
)
def test_error_message_names_the_given_option_and_value(name: str, options: dict, message: str) -> None:
    """The message names the given option and value, and lists the accepted ones."""
    with pytest.raises(clearhead.InputError, match=message):
        replica_comparison.explainer("bert/classify").explain(
            replica_comparison.SENTENCES[0], clearhead.Method(name, **options)
        )


def test_objects_that_are_no_method_are_rejected() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for wrong in (3, [None], [3]):
        with pytest.raises(clearhead.InputError, match="unknown method"):
            ex.explain(replica_comparison.SENTENCES[0], wrong)


@pytest.mark.parametrize("method", METHODS)
def test_method_says_what_it_measures_and_when_it_misleads(method: str) -> None:
    declaration = METHOD_REGISTRY[method].declaration
    assert declaration.measures and declaration.misleads
    assert not declaration.measures.endswith(".") and not declaration.misleads.endswith(".")
    assert declaration.guidance in catalogue.format_method_section(METHOD_REGISTRY[method])
