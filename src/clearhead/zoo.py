"""The small trained models of `clearhead-zoo`, where it is installed; nothing heavy is imported to list them."""

from importlib.util import find_spec
from typing import Any

from clearhead.errors import InputError


def has_zoo() -> bool:
    """Whether `clearhead-zoo` is installed, with or without models in it."""
    return find_spec("clearhead_zoo") is not None


def models() -> dict[str, dict[str, Any]]:
    """The zoo's models and their cards; empty where `clearhead-zoo` is not installed."""
    if not has_zoo():
        return {}
    import clearhead_zoo

    return {name: clearhead_zoo.card(name) for name in clearhead_zoo.names()}


def path(name: str) -> str:
    """The folder of one of its models."""
    if not has_zoo():
        raise InputError(f"zoo:{name} needs the zoo: pip install clearhead-zoo")
    import clearhead_zoo

    try:
        return str(clearhead_zoo.path(name))
    except (LookupError, ValueError) as problem:
        raise InputError(str(problem.args[0])) from None
