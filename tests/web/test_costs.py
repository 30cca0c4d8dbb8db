"""The order of methods comes from what they declare."""

from clearhead.methods import REGISTRY
from clearhead.web.costs import in_order, passes_of, samples_of


def test_every_declared_cost_can_be_read() -> None:
    costs = {name: passes_of(name) for name in REGISTRY}
    assert min(costs.values()) == 1.0
    assert costs["attention"] < costs["generic"] < costs["deeplift"] < costs["integrated-gradients"] < costs["lime"]
    assert costs["kernel-shap"] == 2048.0 and costs["shap"] == 500.0
    assert costs["flow"] > costs["integrated-gradients"]  # a max-flow problem for each unit, row and layer
    assert samples_of("integrated-gradients") == 76 and samples_of("lime") == 1000


def test_what_one_pass_gives_comes_first_and_together() -> None:
    groups = in_order(sorted(REGISTRY))
    assert {"generic", "rollout", "grad-sam", "attcat", "saliency"} <= set(groups[0])
    assert all(len(group) == 1 for group in groups[1:])
    assert [passes_of(group[-1]) for group in groups] == sorted(passes_of(group[-1]) for group in groups)
    assert sorted(name for group in groups for name in group) == sorted(REGISTRY)


def test_a_method_asked_for_twice_is_run_once() -> None:
    assert in_order(["generic", "generic"]) == [["generic"]]
