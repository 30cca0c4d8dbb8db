"""How many passes a method declares to take: what comes first when several are asked for, and how far one has come."""

import re

from clearhead.methods.base import REGISTRY, Declaration

_NUMBERS = {"one": 1, "two": 2, "three": 3}
#: A forward pass and its backward pass, which costs about twice as much.
_WAYS = {"forward": 1.0, "backward": 2.0}
#: How many units an input is taken to have where a method needs a pass for each.
UNITS = 32


def passes_of(name: str) -> float:
    """The declared cost of a method, in forward passes.

    >>> passes_of("attention") < passes_of("generic") < passes_of("integrated-gradients") < passes_of("lime")
    True
    """
    return passes_in(REGISTRY[name].declaration.cost)


def passes_in(cost: str) -> float:
    """
    >>> passes_in("one forward"), passes_in("one forward and one backward"), passes_in("500 forward passes or fewer")
    (1.0, 3.0, 500.0)
    >>> passes_in("21 forward and backward passes (one a step)"), passes_in("one forward for each unit, in batches")
    (63.0, 32.0)
    """
    words = re.findall(r"\d+|[a-z]+", cost.split("(")[0])
    count, total = 0.0, 0.0
    for word in words:
        count = float(word) if word.isdigit() else _NUMBERS.get(word, count)
        total += count * _WAYS.get(word, 0.0)
    if not total:
        raise ValueError(f"the cost {cost!r} names no forward or backward pass")
    each = "each unit" in cost or "every unit" in cost
    return total * UNITS ** (2 if "max-flow" in cost else 1) if each else total


def samples_of(name: str) -> int:
    """How many inputs a method shows to the model, by its declaration: what progress is measured by."""
    return max(1, round(passes_of(name) / 3 if "backward" in REGISTRY[name].declaration.cost else passes_of(name)))


def in_brief(name: str) -> str:
    """What it costs in two words, for a list of many.

    >>> in_brief("generic"), in_brief("integrated-gradients"), in_brief("occlusion")
    ('one pass', '76 passes', 'one a unit')
    """
    cost = REGISTRY[name].declaration.cost
    if "max-flow" in cost:
        return "max-flow"
    if "each unit" in cost or "every unit" in cost:
        return "one a unit"
    count = samples_of(name)
    return "one pass" if count == 1 else f"{count:,} passes"


def shares_a_pass(told: Declaration) -> bool:
    """Whether it is read from one plain recorded pass, which costs the same for one such method and for many."""
    return told.kind == "tape" and "max-flow" not in told.cost


def in_order(names: list[str]) -> list[list[str]]:
    """What is run together, the cheapest first: all that one recorded pass gives, then the others one by one.

    >>> in_order(["lime", "generic", "integrated-gradients", "rollout"])
    [['rollout', 'generic'], ['integrated-gradients'], ['lime']]
    """
    ordered = sorted(dict.fromkeys(names), key=lambda name: (passes_of(name), name))
    together = [name for name in ordered if shares_a_pass(REGISTRY[name].declaration)]
    alone = [[name] for name in ordered if name not in together]
    return sorted(([together] if together else []) + alone, key=lambda group: passes_of(group[-1]))
