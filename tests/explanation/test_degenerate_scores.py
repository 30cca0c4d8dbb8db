"""Warnings about degenerate scores: each check on both sides of its threshold, and on models made to be degenerate."""

import io
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

import clearhead
from clearhead import Explanation, InputError, Method, MultiStreamExplanation
from clearhead.explanation import degenerate_scores
from clearhead.explanation.comparison import Comparison, check_disagreement
from clearhead.render.html import render_explanations_page
from clearhead.render.noscript import render_static_html
from clearhead.render.view_model import build_view_model
from clearhead.units import Units, build_numbered_units, build_patch_units
from tests import joint_models
from tests.models import TEXTS, explainer, inputs

SCHEMA = json.loads((files("clearhead.explanation") / "explanation.schema.json").read_text("utf-8"))


def make_text_units(names: str, special: tuple[int, ...] = ()) -> Units:
    words = names.split(" ")
    return build_numbered_units(len(words), "text", words, [i in special for i in range(len(words))])


BERT_UNITS = make_text_units("[CLS] a fine film [SEP]", (0, 4))
DECODER_UNITS = make_text_units("The capital of France is")


def make_explanation(scores: Any, units: Units = DECODER_UNITS, **provenance: Any) -> Explanation:
    target = {"kind": "label", "name": "yes", "index": 0, "scale": "logit", "value": 2.0}
    certificate = {"dtype": "float32", "warnings": []}
    provenance = {"method": "generic", "family": "relevance", "signed": False, "input": "x", **provenance}
    return Explanation(units, np.array(scores, float), provenance["method"], target, {}, certificate, provenance)


def find_in(e: Explanation) -> list[str]:
    return degenerate_scores.find_degenerate_scores(e.scores, e.units, e.target, e.certificate, e.provenance)


@pytest.mark.parametrize(("share", "warns"), [(0.89, False), (0.91, True)])
def test_almost_all_scores_on_special_tokens(share: float, warns: bool) -> None:
    """The share counts absolute values: opposite scores of two special tokens do not cancel."""
    content = (1 - share) / 6
    scores = np.array([share / 2, content, -2 * content, 3 * content, -share / 2])
    warning = degenerate_scores.check_special_units(scores, BERT_UNITS)
    assert (warning is not None) == warns
    if warning:
        assert "91 % of the absolute scores are on special tokens, [CLS] and [SEP]" in warning
        assert "e.top()" in warning and "method='ensemble' or 'deeplift'" in warning


def test_class_token_of_an_image_but_no_patch_is_a_sink() -> None:
    units = build_patch_units((2, 2), ["[CLS]"])
    assert "[CLS]" in find_in(make_explanation([9.7, 0.1, 0.2, 0, 0], units))[0]
    assert not find_in(make_explanation([0.1, 9.7, 0.2, 0, 0], units))
    assert not find_in(make_explanation([9.7, 0.1, 0.2, 0], build_patch_units((2, 2))))


@pytest.mark.parametrize(
    ("share", "next_share", "warns"),
    [(0.39, 0.16, False), (0.41, 0.16, True), (0.41, 0.21, False), (0.5, 0.24, True), (0.5, 0.26, False)],
)
def test_first_token_takes_most(share: float, next_share: float, warns: bool) -> None:
    """Both its share and its distance from the next token count: two words may share an output."""
    rest = 1 - share - next_share
    scores = np.array([-share, 0.4 * rest, next_share, 0.3 * rest, 0.3 * rest])
    warning = degenerate_scores.check_first_unit(scores, DECODER_UNITS, "deeplift")
    assert (warning is not None) == warns
    if warning:
        assert f"the first token, “The”, has {100 * share:.0f} %" in warning
        assert "try method='ensemble' or 'attn-lrp'" in warning, "not the method itself"


def test_first_token_warning_needs_a_text_that_begins_without_special_token() -> None:
    scores = np.array([8.0, 1, 0.5, 0.3, 0.2])
    assert degenerate_scores.check_first_unit(scores, DECODER_UNITS)
    assert not degenerate_scores.check_first_unit(scores, BERT_UNITS)
    assert not degenerate_scores.check_first_unit(scores[:3], make_text_units("So very boring")), "three units"
    assert not degenerate_scores.check_first_unit(np.roll(scores, 1), DECODER_UNITS), "another token may decide"


@pytest.mark.parametrize("method", ["value-zeroing", "rollout"])
def test_products_over_layers_are_read_from_the_last_layer(method: str) -> None:
    scores = np.array([1, 3e-9, 1e-13, 1e-17, 2e-21])
    warning = degenerate_scores.check_first_unit(scores, DECODER_UNITS, method)
    assert warning is not None and "over 99 %" in warning and "layers=(-1, None)" in warning
    with_start = make_text_units("<s> The capital of France", (0,))
    warning = degenerate_scores.check_special_units(scores, with_start, method)
    assert warning is not None and "layers=(-1, None)" in warning


@pytest.mark.parametrize(
    ("name", "share", "warns"),
    [(".", 0.79, False), (".", 0.81, True), ("\n", 0.81, True), ("Ċ", 0.81, True), ("Paris", 0.99, False)],
)
def test_punctuation_as_attention_sink(name: str, share: float, warns: bool) -> None:
    units = build_numbered_units(4, "text", ["The", "end", name, "ok"])
    rest = (1 - share) / 3
    assert bool(find_in(make_explanation([rest, 0.9 * rest, share, 1.1 * rest], units))) == warns


@pytest.mark.parametrize(
    ("dtype", "spread", "warns"),
    [
        ("float32", 9e-7, True),
        ("float32", 1e-6, False),
        ("float64", 1e-15, True),
        ("float64", 1e-14, False),
        ("bfloat16", 0.05, True),
        ("bfloat16", 0.08, False),
    ],
)
def test_flat_scores_by_dtype(dtype: str, spread: float, warns: bool) -> None:
    """The special tokens, which have other scores by construction, do not count."""
    scores = np.array([5.0, 1, 1 - spread, 1, 7])
    warning = degenerate_scores.check_flat_scores(scores, BERT_UNITS, dtype)
    assert (warning is not None) == warns
    if warning:
        assert "equal within rounding" in warning and "the largest is 1" in warning


def test_zero_scores_suggest_another_scale_target_or_method() -> None:
    zeros = np.zeros(5)
    assert "scale='logit'" in str(degenerate_scores.check_flat_scores(zeros, BERT_UNITS, "float32", "probability"))
    assert "another target=" in str(degenerate_scores.check_flat_scores(zeros, BERT_UNITS, "float32", "logit"))
    untargeted = str(degenerate_scores.check_flat_scores(zeros, BERT_UNITS, "float32", "logit", "rollout"))
    assert "rollout does not use the target" in untargeted and "another target" not in untargeted


def test_equal_tokens_may_have_equal_scores() -> None:
    scores = np.ones(4)
    assert degenerate_scores.check_flat_scores(scores, make_text_units("no no no yes"), "float32")
    assert not degenerate_scores.check_flat_scores(scores, make_text_units("no no no no"), "float32")
    assert not degenerate_scores.check_flat_scores(scores[:1], make_text_units("no"), "float32")


@pytest.mark.parametrize(("largest", "warns"), [(3e-8, False), (1e-8, True), (0.0, False)])
def test_scores_below_the_rounding_error_of_the_target(largest: float, warns: bool) -> None:
    warning = degenerate_scores.check_vanishing_scores(np.array([largest, -largest / 2]), -2.0, "probability")
    assert (warning is not None) == warns
    assert not warns or "scale='logit'" in str(warning)


@pytest.mark.parametrize(
    ("figures", "warns"),
    [
        ({"completeness_gap": 0.09}, False),
        ({"completeness_gap": 0.11}, True),
        ({"completeness_gap": 0.9, "standard_error": 0.4}, False),
        ({"completeness_gap": 1.1, "standard_error": 0.4}, True),
        ({"completeness_gap": 3.0, "misfit": 0.4}, False),
        ({"deeplift-shap_completeness_gap": 0.09}, False),
        ({"deeplift-shap_completeness_gap": 0.11, "other_completeness_gap": 0.0}, True),
        ({"misfit": 0.6}, True),
        ({"rounding_share": 0.4}, False),
        ({"rounding_share": 0.6}, True),
        ({"step_doubling_error": 9.0}, False),
    ],
    ids=str,
)
def test_measured_problems(figures: dict[str, float], warns: bool) -> None:
    assert bool(degenerate_scores.find_measured_problems(figures, "lime")) == warns


def test_completeness_warning_has_figures_and_the_option_that_helps() -> None:
    figures = {"completeness_gap": 0.5}
    warning = degenerate_scores.check_completeness(figures, "integrated-gradients", 1.9, 0.8)
    assert warning is not None and "their expected sum, 1.9, by 0.4" in warning and warning.endswith("increase steps=.")
    assert "by 50 % of the largest score" in str(degenerate_scores.check_completeness(figures, "deeplift"))
    assert "dtype='float64'" in str(degenerate_scores.check_completeness(figures, "deeplift"))


def test_component_warning_names_the_component_with_the_largest_gap() -> None:
    figures = {"first_completeness_gap": 0.2, "second_completeness_gap": 0.5, "third_completeness_gap": 0.3}
    (warning,) = degenerate_scores.find_measured_problems(figures, "ensemble")
    assert "component second" in warning and "by 50 %" in warning


def test_controls_learned_queries_and_missing_scores_have_no_warnings() -> None:
    assert find_in(make_explanation([9, 1, 0, 0, 0]))
    assert not find_in(make_explanation([9, 1, 0, 0, 0], method="position", family="control"))
    assert not find_in(make_explanation([9, 1, 0, 0, 0], make_text_units("a b c d e", (0, 1, 2, 3, 4))))
    assert not find_in(make_explanation([np.nan] * 5))
    assert find_in(make_explanation([9, np.nan, 1, 0.5, 0]))


def test_long_unit_names_are_shortened() -> None:
    units = build_numbered_units(4, "text", ["x" * 500, "a", "b", "c"])
    (warning,) = find_in(make_explanation([9, 1, 0.5, 0.2], units))
    assert "x" * 23 + "…" in warning and "x" * 24 not in warning


# Models that are made to be degenerate.


def make_llama(num_layers: int) -> clearhead.Explainer:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        initializer_range=0.1,
    )
    return clearhead.load(transformers.LlamaForCausalLM(config).eval())


LLAMA_INPUT = {"input_ids": torch.tensor([[5, 9, 12, 40, 7, 8, 9, 3]])}


def test_value_zeroing_of_a_deep_decoder_ends_at_the_first_token() -> None:
    e = make_llama(30).explain(LLAMA_INPUT, "value-zeroing", target=3)
    assert e.scores[0] > 0.999 and e.scores[5:].max() < 1e-21
    assert len(e.warnings) == 1 and "layers=(-1, None)" in e.warnings[0]
    last = make_llama(30).explain(LLAMA_INPUT, "value-zeroing", target=3, layers=(-1, None))
    assert not last.warnings, "the advice helps"


def scale_attention_output(factor: float) -> clearhead.Explainer:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.BertForSequenceClassification(config).eval()
    for layer in model.bert.encoder.layer:
        layer.attention.output.dense.weight.data *= factor
    return clearhead.load(model)


@pytest.mark.parametrize(
    ("factor", "rounding_share", "excerpt"),
    [(1e-3, 0, None), (1e-6, 1, "no more than rounding errors"), (0, 0, "all scores are zero")],
)
def test_value_zeroing_of_a_model_that_hardly_uses_its_values(
    factor: float, rounding_share: float, excerpt: str | None
) -> None:
    """With 1e-3, the scores are those of 1: they are divided by their sums. With 1e-6, rounding errors are."""
    e = scale_attention_output(factor).explain(LLAMA_INPUT, "value-zeroing", target=1)
    reference = scale_attention_output(1).explain(LLAMA_INPUT, "value-zeroing", target=1)
    assert e.certificate["checks"]["rounding_share"] == pytest.approx(rounding_share)
    assert np.allclose(e.scores, reference.scores, atol=0.01) == (excerpt is None)
    assert [excerpt in warning for warning in e.warnings] == ([] if excerpt is None else [True])


def test_model_that_ignores_its_input() -> None:
    ex = scale_attention_output(1)
    ex.adapter.model.classifier.weight.data *= 0
    for method in ("input-x-gradient", "integrated-gradients", "saliency"):
        e = ex.explain(LLAMA_INPUT, method, target=1)
        assert not e.scores.any() and "all scores are zero" in e.warnings[0], method
    assert ex.explain(LLAMA_INPUT, "random", target=1).warnings == []


def test_too_few_steps_miss_the_sum() -> None:
    ex = explainer("bert/classify")
    few = ex.explain(TEXTS[0], Method("integrated-gradients", steps=1))
    many = ex.explain(TEXTS[0], Method("integrated-gradients", steps=100))
    assert few.certificate["checks"]["completeness_gap"] > degenerate_scores.MAX_COMPLETENESS_GAP
    assert not any("completeness gap" in warning for warning in many.warnings)
    (warning,) = [warning for warning in few.warnings if "completeness gap" in warning]
    expected = few.target["value"] - few.base_value
    assert f"their expected sum, {expected:.3g}, by {abs(expected - few.scores.sum()):.3g}" in warning


# Where warnings are kept and shown.


@pytest.fixture
def degenerate() -> Explanation:
    """An explanation by a tiny model whose certificate has a warning about its pass."""
    e = explainer("bert/classify").explain(TEXTS[0], Method("integrated-gradients", steps=1))
    assert e.warnings
    return e


def test_warnings_are_saved_reopened_and_described_by_the_schema(degenerate: Explanation, tmp_path: Path) -> None:
    opened = clearhead.load_explanation(degenerate.save(tmp_path / "e.safetensors"))
    assert opened == degenerate and opened.warnings == degenerate.warnings == degenerate.certificate["warnings"]
    form = json.loads(json.dumps(degenerate.to_dict()))
    jsonschema.Draft202012Validator(SCHEMA).validate(form)
    assert clearhead.from_dict(form).warnings == degenerate.warnings
    for wrong in ("text", [1]):
        form["certificate"]["warnings"] = wrong
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(form)
        with pytest.raises(InputError, match="damaged: its certificate has the warnings"):
            clearhead.from_dict(form)


def test_results_of_earlier_versions_have_no_warnings(degenerate: Explanation) -> None:
    form = degenerate.to_dict()
    del form["certificate"]["warnings"]
    opened = clearhead.from_dict(form)
    assert opened.warnings == [] and "warnings" not in opened.words().certificate
    assert "warning" not in str(opened)


def test_larger_units_steps_and_differences_are_checked_themselves() -> None:
    """Warnings about scores are those of the scores at hand; warnings about the pass stay."""
    sink = make_explanation([9.0, 1, 0.5, 0.3, 0.2])
    scores = np.array([[9.0, 1, 0.5, 0.3, 0.2], [0.1, 1, 2, 3, 9]])
    about_pass = "the pass was odd: run it again."
    steps = replace(
        sink,
        scores=scores.sum(0),
        matrix=scores,
        steps=("a", "b"),
        certificate={"dtype": "float32", "warnings": [about_pass]},
    )
    assert find_in(steps) == []
    first, second = steps.step(0), steps.step(1)
    assert "first token" in first.warnings[0] and first.warnings[1] == about_pass and len(first.warnings) == 2
    assert second.warnings == [about_pass]
    checked = replace(sink, certificate={"dtype": "float32", "warnings": find_in(sink)})
    assert len(checked.warnings) == 1
    other = make_explanation([9.0, 0, 0, 0, 0])
    other = replace(other, certificate={"dtype": "float32", "warnings": [*find_in(other), about_pass]})
    assert (checked - other).warnings == [about_pass]
    assert "first word" in checked.words().warnings[0] and len(checked.words().warnings) == 1


def test_warnings_of_several_streams_name_the_stream() -> None:
    e = joint_models.explainer("lxmert").explain(**joint_models.inputs("lxmert")[0], method="generic")
    streams = list(e.streams)
    by_stream = {
        stream: replace(e[stream], certificate={**e[stream].certificate, "warnings": [f"odd {stream}.", "both."]})
        for stream in streams
    }
    joint = MultiStreamExplanation(by_stream)
    assert joint.warnings == [*(f"{stream}: odd {stream}." for stream in streams), "both."]
    assert joint.certificate["warnings"] == joint.warnings
    assert clearhead.from_dict(joint.to_dict()) == joint
    assert str(joint).count("warning: ") == len(joint.warnings)


def render_in_terminal(result: Any) -> str:
    console = Console(file=io.StringIO(), width=1000, color_system=None)
    console.print(result)
    return console.file.getvalue()


def test_every_rendering_shows_the_warning(degenerate: Explanation) -> None:
    (warning,) = degenerate.warnings
    assert warning in str(degenerate) and "1 warning" in repr(degenerate)
    assert warning in render_in_terminal(degenerate)
    view = build_view_model(degenerate)
    assert view["cards"][0]["warnings"] == [warning]
    assert dict(view["cards"][0]["certificate"])["warnings"] == warning
    assert warning.split("(")[0] in render_static_html(view)
    assert degenerate.html().count(warning.split("(")[0]) >= 2, "in the data of the script, and without scripts"
    assert warning.split("(")[0] in degenerate._repr_html_()


@pytest.mark.parametrize("kind", ["bars", "table", "text"])
def test_figures_show_the_warning_under_the_plot(degenerate: Explanation, kind: Any) -> None:
    from matplotlib.figure import Figure

    (warning,) = degenerate.warnings
    figure = degenerate.plot(kind).get_figure(root=True)
    plain = replace(degenerate, certificate={}).plot(kind).get_figure(root=True)
    assert warning in " ".join(figure.get_supxlabel().split("\n"))
    assert figure.get_figheight() > plain.get_figheight() and not plain.get_supxlabel()
    figure.draw_without_rendering()
    box = figure._supxlabel.get_window_extent()
    assert box.x1 <= figure.bbox.x1 and box.y0 >= 0, "not cut off"
    axes = Figure(figsize=(8, 4)).subplots()
    degenerate.plot(kind, ax=axes)
    texts = [axes.get_xlabel(), *(text.get_text() for text in axes.texts)]
    assert any(warning in " ".join(text.split("\n")) for text in texts), "also in the axes of a user"


def test_hostile_names_are_escaped_where_warnings_are_shown() -> None:
    units = build_numbered_units(4, "text", ["<b>\x1b[31m\u202e", "a", "b", "c"])
    e = make_explanation([9, 1, 0.5, 0.2], units)
    e = replace(e, certificate={"dtype": "float32", "warnings": find_in(e)})
    assert e.warnings
    shown = render_in_terminal(e) + render_explanations_page(e)
    assert "\x1b" not in shown and "\u202e" not in shown and "<b>" not in render_static_html(build_view_model(e))


# Methods that disagree.


def compare_scores(first: Any, second: Any, **more: Any) -> Comparison:
    units = build_numbered_units(len(first), "text")
    return Comparison(
        {
            "generic": make_explanation(first, units),
            "rollout": make_explanation(second, units, **{"method": "rollout", **more}),
        }
    )


@pytest.mark.parametrize(("count", "warns"), [(4, False), (5, True)])
def test_opposite_orders_are_a_warning_where_chance_is_excluded(count: int, warns: bool) -> None:
    """The exact p-value of the reverse order is 1 / n!: 1/24 for four units, 1/120 for five."""
    comparison = compare_scores(np.arange(count), -np.arange(count))
    assert bool(comparison.warnings) == warns
    if warns:
        (warning,) = comparison.warnings
        assert warning.startswith("generic and rollout rank the tokens in opposite orders, more than chance explains")
        assert "τ-b −1.00, p = 0.008, n = 5" in warning and "method='occlusion'" in warning


def test_more_pairs_need_stronger_evidence() -> None:
    comparison = compare_scores(np.arange(5), -np.arange(5))
    first, second = comparison["generic"], comparison["rollout"]
    assert check_disagreement(first, second, ("a", "b"), num_pairs=1)
    assert not check_disagreement(first, second, ("a", "b"), num_pairs=2)


def test_unrelated_orders_are_rarely_called_a_disagreement() -> None:
    """Four methods with random orders: at most 1 % of comparisons warn, as declared."""
    generator = np.random.default_rng(0)
    num_warned = 0
    for _ in range(300):
        units = build_numbered_units(12, "text")
        methods = {f"m{i}": make_explanation(generator.normal(size=12), units) for i in range(4)}
        num_warned += bool(Comparison(methods).warnings)
    assert num_warned <= 8, "0.01 × 300 = 3, and five more with a probability below 1 %"


def test_weak_correlation_of_many_units_is_no_warning() -> None:
    generator = np.random.default_rng(0)
    shared = generator.normal(size=2000)
    weak = compare_scores(shared, generator.normal(size=2000) - 0.2 * shared)
    strong = compare_scores(shared, generator.normal(size=2000) - shared)
    assert -0.2 < weak.agreement[0, 1] < -0.05 and not weak.warnings
    assert strong.agreement[0, 1] < -0.2 and strong.warnings


def test_controls_other_targets_and_constant_scores_do_not_disagree() -> None:
    first, second = np.arange(8.0), -np.arange(8.0)
    assert compare_scores(first, second).warnings
    assert not compare_scores(first, second, family="control").warnings
    assert not compare_scores(first, np.ones(8)).warnings
    comparison = compare_scores(first, second)
    other = replace(comparison["rollout"], target={**comparison["rollout"].target, "name": "no"})
    assert not Comparison({"generic": comparison["generic"], "rollout": other}).warnings


def test_missing_signs_and_an_occlusion_change_the_advice() -> None:
    first, second = np.arange(8.0), -np.arange(8.0)
    assert "generic has no signs" in compare_scores(first, second, signed=True).warnings[0]
    assert "no signs" not in compare_scores(first, second).warnings[0]
    assert "method='kernel-shap'" in compare_scores(first, second, method="occlusion").warnings[0]


def test_comparisons_show_warnings_of_methods_and_of_pairs(degenerate: Explanation) -> None:
    reverse = replace(degenerate, scores=-degenerate.scores, method="reverse", certificate={})
    comparison = Comparison({"integrated-gradients(steps=1)": degenerate, "reverse": reverse})
    (disagreement,) = comparison.warnings
    terminal = render_in_terminal(comparison)
    assert disagreement in terminal and f"integrated-gradients(steps=1): {degenerate.warnings[0]}" in terminal
    view = build_view_model(comparison)
    assert view["disagreements"] == [disagreement]
    assert disagreement.split("(Kendall")[0] in render_static_html(view)
    assert comparison.to_dict()["warnings"] == [disagreement]


def test_regions_of_an_image_are_checked_themselves() -> None:
    """Patches that are equal in pairs make equal regions."""
    e = explainer("vit/image").explain(inputs("vit/image")[0], "attention")
    content = e.units.content_indices()
    scores = np.zeros(len(e))
    scores[content] = np.arange(len(content)) % e.units.grid[1] + 1.0
    e = replace(e, scores=scores, matrix=None, per_layer=None)
    assert e.warnings == find_in(e) == []
    assert "all scores are equal within rounding" in e.regions((2, 1)).warnings[0]
