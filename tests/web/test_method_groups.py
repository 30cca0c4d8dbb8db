"""Grouping and order of methods by their declared cost."""

from clearhead.methods import METHOD_REGISTRY
from clearhead.web.method_groups import estimate_num_inputs, estimate_passes, group_by_cost


def test_methods_are_ordered_by_declared_cost() -> None:
    costs = {name: estimate_passes(name) for name in METHOD_REGISTRY}
    assert min(costs.values()) == 1
    assert costs["attention"] < costs["generic"] < costs["deeplift"] < costs["integrated-gradients"] < costs["lime"]
    assert costs["kernel-shap"] == 2049 and costs["shap"] == 501
    assert costs["flow"] > costs["integrated-gradients"]  # a max-flow problem for each unit, row and layer
    assert estimate_num_inputs("integrated-gradients") == 77 and estimate_num_inputs("lime") == 1001


def test_single_pass_methods_are_grouped_first() -> None:
    groups = group_by_cost(sorted(METHOD_REGISTRY))
    assert {"generic", "rollout", "grad-sam", "attcat", "saliency"} <= set(groups[0])
    assert all(len(group) == 1 for group in groups[1:])
    assert [estimate_passes(group[-1]) for group in groups] == sorted(estimate_passes(group[-1]) for group in groups)
    assert sorted(name for group in groups for name in group) == sorted(METHOD_REGISTRY)


def test_duplicate_method_is_grouped_once() -> None:
    assert group_by_cost(["generic", "generic"]) == [["generic"]]
