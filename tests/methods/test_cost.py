"""The cost of a method: the passes that are counted, the sentence, and what happens with invalid costs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from clearhead import Cost, InputError, Method
from clearhead.methods import METHOD_REGISTRY, AttributionMethod, register_method
from tests.golden.models import get_explainer
from tests.golden.scores import BUDGETS, METHODS
from tests.golden.storage import GOLDEN_FOLDER, load_json

TEXT = "She hates the book because it isn't good"
#: Options with another number of passes.
OPTIONS = [
    Method("beyond-intuition-head", steps=2, feedback="smoothed"),
    Method("beyond-intuition-head", steps=3, feedback="none"),
    Method("beyond-intuition-token", steps=3, feedback="gradient"),
    Method("deeplift-shap", baselines=("pad", "mean")),
    Method("generic", lrp=True),
    Method("gradient-shap", samples=4, baselines=("pad", "mean")),
    Method("integrated-gradients", steps=1),
    Method("integrated-gradients", steps=20),
    Method("integrated-gradients", steps=7),  # both quadratures have the middle of the path
    Method("integrated-gradients", steps=4, rule="riemann-trapezoid"),
    Method("layer-conductance", steps=3, rule="riemann-middle"),
    Method("layer-conductance", steps=3, rule="riemann-middle", captum=True),
    Method("lime", evaluations=30),
    Method("shap", evaluations=200),
    Method("smoothgrad", samples=2),
    Method("tam", steps=1),
]


@dataclass
class LayerPasses:
    """Inputs that ran through the last layer of a model, and gradients that arrived at its output."""

    forward: int = 0
    backward: int = 0


@contextmanager
def count_layer_passes(model: nn.Module) -> Iterator[LayerPasses]:
    """Count inputs at the end of the last layer: value zeroing runs layers again without the rest of the model."""
    counts = LayerPasses()

    def count_backward(gradient: Tensor) -> None:
        counts.backward += len(gradient)

    def count_forward(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        counts.forward += len(output)
        if output.requires_grad:
            output.register_hook(count_backward)

    handle = model.bert.encoder.layer[-1].output.register_forward_hook(count_forward)
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("method", [*(Method(name, **BUDGETS.get(name, {})) for name in METHODS), *OPTIONS], ids=str)
def test_declared_cost_equals_counted_passes(method: Method) -> None:
    explainer = get_explainer("bert-classifier")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small budgets
        explainer.explain(TEXT, method)  # the first time, the model is tested
        with count_layer_passes(explainer.adapter.model) as counts:
            explanation = explainer.explain(TEXT, method)
    num_units = len(explanation.tokens)
    if method.name == "occlusion":  # special tokens are never masked
        num_units = len(explanation.units.content_indices())
    num_inputs = method.cost.count_inputs(num_units)
    assert counts.backward == method.cost.backward
    assert counts.forward == num_inputs or (method.cost.is_upper_bound and 0.9 * num_inputs < counts.forward)
    assert counts.forward <= num_inputs


@pytest.mark.parametrize("name", METHODS)
def test_declared_cost_equals_golden_counts(name: str) -> None:
    """Golden counts are of whole passes of the model, calls of `autograd.grad`, and an input of 15 units."""
    counts = load_json(GOLDEN_FOLDER, "passes")[f"one text, {name}"]
    cost = Method(name, **BUDGETS.get(name, {})).cost
    assert (counts["backward"] > 0) == (cost.backward > 0)
    if name == "value-zeroing":  # runs single layers again
        assert counts["samples"] == 1
    elif cost.is_upper_bound:
        assert counts["samples"] <= cost.forward
    else:
        assert counts["samples"] == cost.count_inputs(num_units=15)


@pytest.mark.parametrize("name", sorted(METHOD_REGISTRY))
def test_declared_cost_is_that_of_the_default_options(name: str) -> None:
    declared = METHOD_REGISTRY[name].declaration.cost
    defaults = {option: getattr(METHOD_REGISTRY[name], option) for option in Method.option_names(name)}
    explicit = Method(name, **{option: value for option, value in defaults.items() if value is not None}).cost
    assert Method(name).cost == declared
    assert (explicit.forward, explicit.backward, explicit.per_unit) == (
        declared.forward,
        declared.backward,
        declared.per_unit,
    )


def test_method_without_its_own_rule_has_the_declared_cost() -> None:
    assert Method("saliency", reduce="abs").cost == METHOD_REGISTRY["saliency"].declaration.cost


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        (Cost(forward=1), "one forward"),
        (Cost(forward=3, backward=2), "three forward and two backward"),
        (Cost(forward=4, backward=3), "4 forward and 3 backward passes"),
        (Cost(forward=21, backward=21), "21 forward and backward passes"),
        (Cost(forward=101, is_upper_bound=True, note="batched"), "at most 101 forward passes, batched"),
        (Cost(forward=2, per_unit=1), "two forward plus one for each unit"),
        (Cost(forward=10, per_unit=5), "10 forward passes plus 5 for each unit"),
        (Cost(forward=1, needs_max_flow=True), "one forward, then a max-flow problem for each unit, row and layer"),
    ],
    ids=str,
)
def test_cost_prints_as_a_sentence(cost: Cost, sentence: str) -> None:
    assert str(cost) == sentence


def test_passes_are_counted_in_forward_equivalents() -> None:
    assert Cost(forward=2, backward=1).count_passes(num_units=10) == 4
    assert Cost(forward=2, per_unit=1).count_passes(num_units=10) == 12
    assert Cost(forward=1, needs_max_flow=True).count_passes(num_units=10) == 101
    assert Cost(forward=1, needs_max_flow=True).count_inputs(num_units=10) == 1


@pytest.mark.parametrize("numbers", [{"forward": 0}, {"forward": 1.5}, {"forward": 1, "backward": -1}], ids=str)
def test_invalid_number_of_passes_is_rejected(numbers: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not a number of passes: use an integer of at least"):
        Cost(**numbers)


def test_cost_in_words_is_rejected() -> None:
    with pytest.raises(InputError, match=r"wordy: cost='one forward' is not valid: use .*clearhead\.Cost\(forward=1"):

        @register_method("wordy", family="control", cost="one forward", citation="–", signed=False, target="none")
        class Wordy(AttributionMethod):
            """Registered with a sentence as its cost."""

    assert "wordy" not in METHOD_REGISTRY


def test_methods_of_an_explainer_have_typed_costs() -> None:
    table = get_explainer("bert-classifier").methods()
    costs = {row.name: row.cost for row in table}
    assert costs["generic"] == Cost(forward=1, backward=1)
    assert {row["method"]: row["cost"] for row in table.table_rows} == {name: str(cost) for name, cost in costs.items()}
