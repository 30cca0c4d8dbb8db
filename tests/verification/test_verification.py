"""`clearhead.verify` reports the properties that hold, and detects methods that violate their declaration."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import AttributionMethod, Cost, InputError, Method, MethodScores, UnsupportedError, register_method
from clearhead.methods import METHOD_REGISTRY
from clearhead.verification import CheckResult, Verification
from clearhead.verification.checks import UNMEASURABLE_AXIOMS
from tests import models
from tests.adapters import test_decoder as decoders

DECLARED = {"family": "control", "cost": Cost(forward=1), "citation": "–", "signed": True, "target": "none"}
RegisterFunction = Callable[..., None]


@pytest.fixture
def register() -> Iterator[RegisterFunction]:
    """Return a function that registers a method for one test, given its `compute_scores`."""
    names = []

    def add(name: str, finish: Callable[[AttributionMethod], MethodScores], **declaration: Any) -> None:
        method_class = type(name.title(), (AttributionMethod,), {"compute_scores": lambda self, tape: finish(self)})
        register_method(name, **{**DECLARED, **declaration})(method_class)
        names.append(name)

    yield add
    for name in names:
        METHOD_REGISTRY.pop(name)


def list_failed_properties(verification: Verification) -> set[str]:
    return {row.property for row in verification.failed}


def find_result(verification: Verification, what: str) -> CheckResult:
    return next(row for row in verification.results if row.property == what)


def make_ones(method: AttributionMethod) -> torch.Tensor:
    return method.unit_context.valid_mask[:, None].double()


def test_all_methods_pass_on_a_tiny_bert() -> None:
    ex = models.explainer("bert/classify")
    verification = clearhead.verify("all", ex)
    assert verification.ok, verification.failed
    assert verification.methods == [row.name for row in ex.methods() if row.applies]
    common_properties = {"same scores when repeated", "same scores in a batch", "same scores when padded"}
    for method in verification.methods:
        rows = [row for row in verification.results if row.method == method]
        assert common_properties | {"the model is unchanged"} <= {
            row.property for row in rows if row.status == "passed"
        }
    declared = {axiom for name in verification.methods for axiom in METHOD_REGISTRY[name].declaration.axioms}
    unmeasured = {row.property: row for row in verification.results if row.status == "not_applicable"}
    tiling = unmeasured.pop("same scores with tiled and materialised attention")
    assert tiling.method == "beyond-intuition-head" and "it needs materialised attention maps" in tiling.reason
    assert set(unmeasured) == set(UNMEASURABLE_AXIOMS) < declared
    assert all(
        row.measured is row.bound is None and "models with known attributions" in row.reason
        for row in unmeasured.values()
    )


def test_global_random_state_is_unchanged() -> None:
    ex = models.explainer("bert/classify")
    before = torch.get_rng_state()
    clearhead.verify(["random", Method("smoothgrad", samples=2)], ex)
    assert torch.equal(before, torch.get_rng_state())


def test_measurements_equal_those_of_the_explanation() -> None:
    ex = models.explainer("bert/classify")
    text = models.TEXTS[1]
    verification = clearhead.verify("integrated-gradients", ex, text)
    e = ex.explain(text, method="integrated-gradients")
    gap = abs(e.base_value + e.scores.sum() - e.target["value"]) / np.abs(e.scores).max()
    row = find_result(verification, "scores add up to the target's value minus the base value")
    assert row.measured == pytest.approx(gap, abs=1e-9) and row.bound == 0.05 and row.status == "passed"
    finer = ex.explain(text, method=Method("integrated-gradients", steps=100))
    moved = np.abs(finer.scores - e.scores).max() / np.abs(finer.scores).max()
    assert find_result(verification, "scores do not change with twice the steps").measured == pytest.approx(
        moved, rel=1e-6
    )
    assert verification.ok


def test_padding_and_conservation_do_not_apply_to_images() -> None:
    ex = models.explainer("vit/image")
    verification = clearhead.verify(["lrp", "rollout"], ex, models.inputs("vit/image"))
    assert verification.ok and verification.num_inputs == len(models.inputs("vit/image"))
    unmeasured = [row for row in verification.results if row.status == "not_applicable"]
    assert [row.property for row in unmeasured] == [
        "relevance is conserved: scores add up to one",
        "same scores when padded",
        "same scores when padded",
    ]
    assert find_result(verification, "scores add up to one").status == "passed"


def test_decoder_passes_contrast_and_padding_checks() -> None:
    verification = clearhead.verify(["generic", "input-x-gradient"], decoders.explainer("gpt2"))
    assert verification.ok
    contrast = find_result(verification, "scores of a contrast are the difference of the two labels' scores")
    assert contrast.method == "input-x-gradient" and contrast.status == "passed" and contrast.measured < 1e-9
    assert find_result(verification, "same scores when padded").status == "passed"


def test_contrast_of_log_odds_is_checked_only_for_multi_label_models() -> None:
    what = "scores of a contrast are the difference of the two labels' scores"
    verification = clearhead.verify("input-x-gradient", models.explainer("bert/classify"), scale="log-odds")
    assert verification.ok and find_result(verification, what).status == "not_applicable"
    multi_label = models.explainer("bert/classify", problem_type="multi_label_classification")
    assert find_result(clearhead.verify("input-x-gradient", multi_label, scale="log-odds"), what).status == "passed"


def test_multi_stream_model_passes() -> None:
    verification = clearhead.verify("attention", clearhead.load("zoo:shapes-vqa"))
    assert verification.ok and find_result(verification, "scores add up to one").status == "not_applicable"


# Violations -----------------------------------------------------------------------------------------------------------


def test_incomplete_scores_are_detected(register: RegisterFunction) -> None:
    def finish(method: AttributionMethod) -> MethodScores:
        return MethodScores(make_ones(method), base_value=torch.full((len(method.unit_context.valid_mask),), 100.0))

    register("unfinished", finish, axioms=("complete", "rows sum to one", "never wrong"))
    verification = clearhead.verify("unfinished", models.explainer("bert/classify"))
    assert list_failed_properties(verification) == {
        "scores add up to the target's value minus the base value",
        "scores add up to one",
    }
    assert not verification.ok and {row.method for row in verification.failed} == {"unfinished"}
    assert (
        find_result(verification, "never wrong").status == "not_applicable"
        and "no check measures it" in verification.results[-1].reason
    )


def test_batch_dependence_is_detected(register: RegisterFunction) -> None:
    register("crowded", lambda method: MethodScores(make_ones(method) / len(method.unit_context.valid_mask)))
    register("stretched", lambda method: MethodScores(make_ones(method) / method.unit_context.valid_mask.shape[1]))
    verification = clearhead.verify(["crowded", "stretched"], models.explainer("bert/classify"))
    expected = {"same scores in a batch", "same scores when padded"}
    assert {row.property for row in verification.failed if row.method == "crowded"} == expected
    assert "same scores when padded" in {row.property for row in verification.failed if row.method == "stretched"}


def test_nondeterminism_is_detected(register: RegisterFunction) -> None:
    register(
        "fickle",
        lambda method: MethodScores(make_ones(method) * torch.rand(method.unit_context.valid_mask.shape)[:, None]),
    )
    verification = clearhead.verify("fickle", models.explainer("bert/classify"))
    assert "same scores when repeated" in list_failed_properties(verification)


def test_false_declarations_are_detected(register: RegisterFunction) -> None:
    register("dark", lambda method: MethodScores(-make_ones(method)), signed=False)
    register("bent", lambda method: MethodScores(make_ones(method)), target="any", linear_in_target=True)
    register("nothing", lambda method: MethodScores(make_ones(method) * float("nan")))
    verification = clearhead.verify(["dark", "bent", "nothing"], models.explainer("bert/classify"))
    named = {row.method: row for row in verification.failed}
    assert named["dark"].property == "no score is negative" and named["dark"].measured == 1
    assert named["bent"].property == "scores of a contrast are the difference of the two labels' scores"
    # the difference of ones is zero, but the score of the contrast is one
    assert named["bent"].measured == pytest.approx(1)
    assert named["nothing"].measured == float("inf")
    assert [row["measured"] for row in verification.to_dict()["results"] if row["method"] == "nothing"][1] is None


def add_gradient(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.zeros_like(parameter)


MODEL_CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda model: next(model.parameters()).data.view(-1)[:1].add_(1),
    "gradients": add_gradient,
    "requires_grad": lambda model: next(model.parameters()).requires_grad_(False),
    "mode": lambda model: model.train(),
    "attention implementation": lambda model: setattr(model.config, "_attn_implementation_internal", "eager"),
    "hooks": lambda model: model.register_forward_hook(lambda *given: None),
}


@pytest.mark.parametrize("changed", MODEL_CHANGES)
def test_changes_of_the_model_are_detected(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify")
    explain = ex.explain

    def explain_and_change(*args: Any, **kwargs: Any) -> Any:
        result = explain(*args, **kwargs)
        monkeypatch.setattr(ex, "explain", explain)
        MODEL_CHANGES[changed](ex.adapter.model)
        return result

    monkeypatch.setattr(ex, "explain", explain_and_change)
    row = find_result(clearhead.verify("position", ex), "the model is unchanged")
    assert (row.status, row.measured, row.reason) == ("failed", 1, changed)


# Arguments ------------------------------------------------------------------------------------------------------------


def test_all_selects_the_applicable_methods() -> None:
    ex = models.explainer("swin/image")
    applies = {row.name for row in ex.methods() if row.applies}
    quick = {"saliency", "input-x-gradient"}
    assert quick < applies < set(METHOD_REGISTRY)
    names: list[str] = []

    def select_quick(checks: list[Any]) -> list[Any]:
        names.extend(dict.fromkeys(case.method.name for case, _ in checks))
        return [pair for pair in checks if pair[0].method.name in quick]

    verification = clearhead.verify("all", ex, progress=select_quick)
    assert set(names) == applies and set(verification.methods) == quick and verification.ok
    with pytest.raises(UnsupportedError, match="generic cannot explain"):
        clearhead.verify("generic", ex)


def test_invalid_arguments_are_rejected() -> None:
    ex = models.explainer("bert/classify")
    with pytest.raises(InputError, match="did you mean 'generic'"):
        clearhead.verify("genric", ex)
    with pytest.raises(InputError, match="no method was given"):
        clearhead.verify([], ex)
    with pytest.raises(InputError, match="verify takes no profile="):
        clearhead.verify("generic", ex, profile="captum")


def test_violations_by_options_are_explained() -> None:
    verification = clearhead.verify(Method("lrp", rules="orig"), models.explainer("bert/classify"))
    row = find_result(verification, "relevance is conserved: scores add up to one")
    assert row.status == "failed" and row.reason.startswith("with these options; the property is declared for")
    assert row.measured > row.bound and verification.failed == [row] and not verification.ok


def test_verification_renders_as_text_html_and_dict() -> None:
    rows = (
        CheckResult("generic", "same scores when repeated", "passed", 0.0, 0.0),
        CheckResult("<b>", "a", "failed", 2.0, 0.1),
    )
    verification = Verification("a model", 1, rows)
    from rich.console import Console

    with (console := Console(width=100)).capture() as captured:
        console.print(verification)
    assert "a model, on one input: 2 checks: 1 passed, 1 failed" in captured.get()
    html = verification._repr_html_()
    assert "same scores when repeated" in html and "<b>" not in html
    assert verification.to_dict()["ok"] is False and verification.to_dict()["results"][0]["status"] == "passed"
