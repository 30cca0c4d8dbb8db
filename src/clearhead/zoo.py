"""Lists the models of `clearhead-zoo`, the optional package with small trained models, and finds their folders.

Nothing is loaded: neither torch nor transformers is imported.
"""

from importlib.util import find_spec
from typing import Any

from clearhead.errors import InputError


def is_zoo_installed() -> bool:
    """Return whether the package `clearhead-zoo` is installed, even if it contains no models.

    Returns:
        True if it can be imported; it is not imported.
    """
    return find_spec("clearhead_zoo") is not None


def zoo_models() -> dict[str, dict[str, Any]]:
    """List the models of `clearhead-zoo` with their model cards.

    Returns:
        The card of each model by name; empty if `clearhead-zoo` is not installed.

    Example:
        >>> sorted(clearhead.zoo_models())[:2]  # doctest: +SKIP
    """
    if not is_zoo_installed():
        return {}
    import clearhead_zoo

    return {name: clearhead_zoo.card(name) for name in clearhead_zoo.names()}


def zoo_model_path(name: str) -> str:
    """Return the folder of a zoo model.

    Args:
        name: Name of the model, without "zoo:".

    Returns:
        Path of the folder.

    Raises:
        InputError: If `clearhead-zoo` is not installed, or has no such model.
    """
    if not is_zoo_installed():
        raise InputError(f"zoo:{name} needs the zoo: pip install clearhead-zoo")
    import clearhead_zoo

    try:
        return str(clearhead_zoo.path(name))
    except (LookupError, ValueError) as error:
        raise InputError(str(error.args[0])) from None
