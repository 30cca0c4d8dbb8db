"""Order and grouping of methods by their declared cost: what runs first, and what shares a pass."""

from clearhead.methods import Method, PassType

#: Number of units that an input is assumed to have, for methods that need a pass for each.
ASSUMED_NUM_UNITS = 32


def estimate_passes(method_name: str) -> int:
    """Estimate the cost of a method, in forward passes.

    >>> names = ["attention", "generic", "integrated-gradients", "lime"]
    >>> sorted(names, key=estimate_passes) == names
    True
    """
    return Method(method_name).cost.count_passes(ASSUMED_NUM_UNITS)


def estimate_num_inputs(method_name: str) -> int:
    """Estimate the number of inputs that run through the model, by which progress is measured."""
    return Method(method_name).cost.count_inputs(ASSUMED_NUM_UNITS)


def can_share_pass(method_name: str) -> bool:
    """Check whether one recorded pass is all that a method needs: it costs the same for one such method and for many.

    >>> [can_share_pass(name) for name in ("generic", "flow", "smoothgrad")]
    [True, False, False]
    """
    method = Method(method_name)
    return method.pass_type is PassType.TAPE and not method.cost.needs_max_flow


def group_by_cost(method_names: list[str]) -> list[list[str]]:
    """Group the methods that share one recorded pass; every other method is a group of its own. Cheapest first.

    >>> group_by_cost(["lime", "generic", "integrated-gradients", "rollout"])
    [['rollout', 'generic'], ['integrated-gradients'], ['lime']]
    """
    ordered = sorted(dict.fromkeys(method_names), key=lambda name: (estimate_passes(name), name))
    sharing = [name for name in ordered if can_share_pass(name)]
    groups = [sharing] if sharing else []
    groups += [[name] for name in ordered if name not in sharing]
    return sorted(groups, key=lambda group: estimate_passes(group[-1]))
