"""How many passes a method declares to take: what comes first when several are asked for, and how far one has come."""

import re

from clearhead.methods.base import METHOD_REGISTRY, Declaration

_NUMBER_WORDS = {"one": 1, "two": 2, "three": 3}
#: A forward pass and its backward pass, which costs about twice as much.
_PASSES_BY_DIRECTION = {"forward": 1.0, "backward": 2.0}
#: How many units an input is taken to have where a method needs a pass for each.
ASSUMED_NUM_UNITS = 32


def estimate_passes(method_name: str) -> float:
    """The declared cost of a method, in forward passes.

    >>> names = ["attention", "generic", "integrated-gradients", "lime"]
    >>> sorted(names, key=estimate_passes) == names
    True
    """
    return parse_passes(METHOD_REGISTRY[method_name].declaration.cost)


def parse_passes(cost: str) -> float:
    """
    >>> [parse_passes(cost) for cost in ("one forward", "one forward and one backward", "500 forward passes or fewer")]
    [1.0, 3.0, 500.0]
    >>> parse_passes("21 forward and backward passes (one per step)")
    63.0
    >>> parse_passes("one forward for each unit, batched")
    32.0
    """
    words = re.findall(r"\d+|[a-z]+", cost.split("(")[0])
    count, total = 0.0, 0.0
    for word in words:
        count = float(word) if word.isdigit() else _NUMBER_WORDS.get(word, count)
        total += count * _PASSES_BY_DIRECTION.get(word, 0.0)
    if not total:
        raise ValueError(f"the cost {cost!r} names no forward or backward pass")
    each = "each unit" in cost or "every unit" in cost
    return total * ASSUMED_NUM_UNITS ** (2 if "max-flow" in cost else 1) if each else total


def estimate_num_inputs(method_name: str) -> int:
    """How many inputs a method shows to the model, by its declaration: what progress is measured by."""
    return max(
        1,
        round(
            estimate_passes(method_name) / 3
            if "backward" in METHOD_REGISTRY[method_name].declaration.cost
            else estimate_passes(method_name)
        ),
    )


def format_brief_cost(method_name: str) -> str:
    """What it costs in two words, for a list of many.

    >>> format_brief_cost("generic"), format_brief_cost("integrated-gradients"), format_brief_cost("occlusion")
    ('one pass', '76 passes', 'one per unit')
    """
    cost = METHOD_REGISTRY[method_name].declaration.cost
    if "max-flow" in cost:
        return "max-flow"
    if "each unit" in cost or "every unit" in cost:
        return "one per unit"
    count = estimate_num_inputs(method_name)
    return "one pass" if count == 1 else f"{count:,} passes"


def can_share_pass(declaration: Declaration) -> bool:
    """Whether it is read from one plain recorded pass, which costs the same for one such method and for many."""
    return declaration.pass_type == "tape" and "max-flow" not in declaration.cost


def group_by_cost(method_names: list[str]) -> list[list[str]]:
    """What is run together, the cheapest first: all that one recorded pass gives, then the others one by one.

    >>> group_by_cost(["lime", "generic", "integrated-gradients", "rollout"])
    [['rollout', 'generic'], ['integrated-gradients'], ['lime']]
    """
    ordered = sorted(dict.fromkeys(method_names), key=lambda name: (estimate_passes(name), name))
    together = [name for name in ordered if can_share_pass(METHOD_REGISTRY[name].declaration)]
    alone = [[name] for name in ordered if name not in together]
    return sorted(([together] if together else []) + alone, key=lambda group: estimate_passes(group[-1]))
