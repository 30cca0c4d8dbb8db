"""`clearhead.verify`: what holds is said to hold, and whoever breaks a promise is found out by name."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import AttributionMethod, InputError, Method, MethodScores, UnsupportedError, register_method
from clearhead.methods import METHOD_REGISTRY
from clearhead.verification import CheckResult, Verification
from clearhead.verification.checks import UNMEASURABLE_AXIOMS
from tests import models
from tests.adapters import test_decoder as decoders

DECLARED = {"family": "control", "cost": "nothing", "citation": "–", "signed": True, "target": "none"}
Registers = Callable[..., None]


@pytest.fixture
def registered() -> Iterator[Registers]:
    """Registers a method for one test, by what it gives for a batch."""
    names = []

    def add(name: str, finish: Callable[[AttributionMethod], MethodScores], **declared: Any) -> None:
        made = type(name.title(), (AttributionMethod,), {"compute_scores": lambda self, tape: finish(self)})
        register_method(name, **{**DECLARED, **declared})(made)
        names.append(name)

    yield add
    for name in names:
        METHOD_REGISTRY.pop(name)


def broken(found: Verification) -> set[str]:
    return {row.what for row in found.failed}


def line(found: Verification, what: str) -> CheckResult:
    return next(row for row in found.results if row.what == what)


def ones(fold: AttributionMethod) -> torch.Tensor:
    return fold.unit_context.valid_mask[:, None].double()


def test_all_methods_pass_on_a_tiny_bert() -> None:
    ex = models.explainer("bert/classify")
    found = clearhead.verify("all", ex)
    assert found.ok, found.failed
    assert found.methods == [row.name for row in ex.methods() if row.applies]
    everywhere = {"same scores when repeated", "same scores in a batch", "same scores when padded"}
    for method in found.methods:
        own = [row for row in found.results if row.method == method]
        assert everywhere | {"the model is unchanged"} <= {row.what for row in own if row.says == "holds"}
    declared = {axiom for name in found.methods for axiom in METHOD_REGISTRY[name].declaration.axioms}
    left = {row.what: row for row in found.results if row.says == "cannot be asked"}
    whole_maps = left.pop("same scores with tiled and materialised attention")
    assert whole_maps.method == "beyond-intuition-head" and "it needs materialised attention maps" in whole_maps.why
    assert set(left) == set(UNMEASURABLE_AXIOMS) < declared
    assert all(
        row.measured is row.bound is None and "models with known attributions" in row.why for row in left.values()
    )


def test_global_random_state_is_unchanged() -> None:
    ex = models.explainer("bert/classify")
    before = torch.get_rng_state()
    clearhead.verify(["random", Method("smoothgrad", samples=2)], ex)
    assert torch.equal(before, torch.get_rng_state())


def test_measurements_equal_those_of_the_explanation() -> None:
    ex = models.explainer("bert/classify")
    text = models.TEXTS[1]
    found = clearhead.verify("integrated-gradients", ex, text)
    e = ex.explain(text, method="integrated-gradients")
    gap = abs(e.base_value + e.scores.sum() - e.target["value"]) / np.abs(e.scores).max()
    row = line(found, "scores add up to the target's value minus the base value")
    assert row.measured == pytest.approx(gap, abs=1e-9) and row.bound == 0.05 and row.says == "holds"
    finer = ex.explain(text, method=Method("integrated-gradients", steps=100))
    moved = np.abs(finer.scores - e.scores).max() / np.abs(finer.scores).max()
    assert line(found, "scores do not change with twice the steps").measured == pytest.approx(moved, rel=1e-6)
    assert found.ok


def test_padding_and_conservation_do_not_apply_to_images() -> None:
    ex = models.explainer("vit/image")
    found = clearhead.verify(["lrp", "rollout"], ex, models.inputs("vit/image"))
    assert found.ok and found.num_inputs == len(models.inputs("vit/image"))
    left = [row for row in found.results if row.says == "cannot be asked"]
    assert [row.what for row in left] == [
        "relevance is conserved: scores add up to one",
        "same scores when padded",
        "same scores when padded",
    ]
    assert line(found, "scores add up to one").says == "holds"


def test_decoder() -> None:
    found = clearhead.verify(["generic", "input-x-gradient"], decoders.explainer("gpt2"))
    assert found.ok
    contrast = line(found, "scores of a contrast are the difference of the two labels' scores")
    assert contrast.method == "input-x-gradient" and contrast.says == "holds" and contrast.measured < 1e-9
    assert line(found, "same scores when padded").says == "holds"


def test_log_odds_of_a_contrast_are_not_a_difference_of_log_odds() -> None:
    what = "scores of a contrast are the difference of the two labels' scores"
    found = clearhead.verify("input-x-gradient", models.explainer("bert/classify"), scale="log-odds")
    assert found.ok and line(found, what).says == "cannot be asked"
    labels = models.explainer("bert/classify", problem_type="multi_label_classification")
    assert line(clearhead.verify("input-x-gradient", labels, scale="log-odds"), what).says == "holds"


def test_several_streams() -> None:
    found = clearhead.verify("attention", clearhead.load("zoo:shapes-vqa"))
    assert found.ok and line(found, "scores add up to one").says == "cannot be asked"


# Who breaks a promise -------------------------------------------------------------------------------------------------


def test_incomplete_scores_are_detected(registered: Registers) -> None:
    def finish(fold: AttributionMethod) -> MethodScores:
        return MethodScores(ones(fold), base_value=torch.full((len(fold.unit_context.valid_mask),), 100.0))

    registered("unfinished", finish, axioms=("complete", "rows sum to one", "never wrong"))
    found = clearhead.verify("unfinished", models.explainer("bert/classify"))
    assert broken(found) == {"scores add up to the target's value minus the base value", "scores add up to one"}
    assert not found.ok and {row.method for row in found.failed} == {"unfinished"}
    assert line(found, "never wrong").says == "cannot be asked" and "no check measures it" in found.results[-1].why


def test_batch_dependence_is_detected(registered: Registers) -> None:
    registered("crowded", lambda fold: MethodScores(ones(fold) / len(fold.unit_context.valid_mask)))
    registered("stretched", lambda fold: MethodScores(ones(fold) / fold.unit_context.valid_mask.shape[1]))
    found = clearhead.verify(["crowded", "stretched"], models.explainer("bert/classify"))
    both = {"same scores in a batch", "same scores when padded"}
    assert {row.what for row in found.failed if row.method == "crowded"} == both
    assert "same scores when padded" in {row.what for row in found.failed if row.method == "stretched"}


def test_nondeterminism_is_detected(registered: Registers) -> None:
    registered(
        "fickle", lambda fold: MethodScores(ones(fold) * torch.rand(fold.unit_context.valid_mask.shape)[:, None])
    )
    found = clearhead.verify("fickle", models.explainer("bert/classify"))
    assert "same scores when repeated" in broken(found)


def test_false_declarations_are_detected(registered: Registers) -> None:
    registered("dark", lambda fold: MethodScores(-ones(fold)), signed=False)
    registered("bent", lambda fold: MethodScores(ones(fold)), target="any", linear_in_target=True)
    registered("nothing", lambda fold: MethodScores(ones(fold) * float("nan")))
    found = clearhead.verify(["dark", "bent", "nothing"], models.explainer("bert/classify"))
    named = {row.method: row for row in found.failed}
    assert named["dark"].what == "no score is negative" and named["dark"].measured == 1
    assert named["bent"].what == "scores of a contrast are the difference of the two labels' scores"
    assert named["bent"].measured == pytest.approx(1)  # one less one is nothing, and it said one
    assert named["nothing"].measured == float("inf")
    assert [row["measured"] for row in found.to_dict()["rows"] if row["method"] == "nothing"][1] is None


def add_a_gradient(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.zeros_like(parameter)


TRESPASSES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda model: next(model.parameters()).data.view(-1)[:1].add_(1),
    "gradients": add_a_gradient,
    "requires_grad": lambda model: next(model.parameters()).requires_grad_(False),
    "mode": lambda model: model.train(),
    "attention implementation": lambda model: setattr(model.config, "_attn_implementation_internal", "eager"),
    "hooks": lambda model: model.register_forward_hook(lambda *given: None),
}


@pytest.mark.parametrize("changed", TRESPASSES)
def test_changes_of_the_model_are_detected(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify")
    explain = ex.explain

    def clumsy(*given: Any, **how: Any) -> Any:
        found = explain(*given, **how)
        monkeypatch.setattr(ex, "explain", explain)
        TRESPASSES[changed](ex.adapter.model)
        return found

    monkeypatch.setattr(ex, "explain", clumsy)
    row = line(clearhead.verify("position", ex), "the model is unchanged")
    assert (row.says, row.measured, row.why) == ("does not hold", 1, changed)


# The border -----------------------------------------------------------------------------------------------------------


def test_all_means_the_methods_that_apply() -> None:
    ex = models.explainer("swin/image")
    applies = {line.name for line in ex.methods() if line.applies}
    quick = {"saliency", "input-x-gradient"}
    assert quick < applies < set(METHOD_REGISTRY)
    seen: list[str] = []

    def first(asked: list[Any]) -> list[Any]:
        seen.extend(dict.fromkeys(case.method.name for case, _ in asked))
        return [pair for pair in asked if pair[0].method.name in quick]

    found = clearhead.verify("all", ex, progress=first)
    assert set(seen) == applies and set(found.methods) == quick and found.ok
    with pytest.raises(UnsupportedError, match="generic cannot explain"):
        clearhead.verify("generic", ex)


def test_invalid_arguments_are_refused() -> None:
    ex = models.explainer("bert/classify")
    with pytest.raises(InputError, match="did you mean 'generic'"):
        clearhead.verify("genric", ex)
    with pytest.raises(InputError, match="no method was given"):
        clearhead.verify([], ex)
    with pytest.raises(InputError, match="verify takes no profile="):
        clearhead.verify("generic", ex, profile="captum")


def test_violations_by_options_are_explained() -> None:
    found = clearhead.verify(Method("lrp", rules="orig"), models.explainer("bert/classify"))
    row = line(found, "relevance is conserved: scores add up to one")
    assert row.says == "does not hold" and row.why.startswith("with these options; the property is declared for")
    assert row.measured > row.bound and found.failed == [row] and not found.ok


def test_display() -> None:
    rows = (
        CheckResult("generic", "same scores when repeated", "holds", 0.0, 0.0),
        CheckResult("<b>", "a", "does not hold", 2.0, 0.1),
    )
    found = Verification("a model", 1, rows)
    from rich.console import Console

    with (console := Console(width=100)).capture() as shown:
        console.print(found)
    assert "a model, on one input: 2 properties: 1 hold, 1 does not" in shown.get()
    html = found._repr_html_()
    assert "same scores when repeated" in html and "<b>" not in html
    assert found.to_dict()["ok"] is False and found.to_dict()["rows"][0]["says"] == "holds"
