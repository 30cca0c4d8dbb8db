"""Recognises peft layers, which wrap a layer of the model and add adapters to it (LoRA and others).

They are recognised by their attributes, so peft need not be installed.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

_ATTRIBUTES = ("base_layer", "active_adapters", "disable_adapters", "merged", "merge")


def is_peft_layer(module: nn.Module) -> bool:
    """Whether a module is a peft layer that wraps another one.

    Args:
        module: Any module.

    Returns:
        Whether it has the attributes of a wrapper; peft is not imported.
    """
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def has_active_adapters(layer: Any) -> bool:
    """Whether a peft layer adds something to the layer it wraps: its adapters are neither merged nor disabled.

    Args:
        layer: A layer for which `is_peft_layer` is true.

    Returns:
        False if the wrapped layer alone determines the output.
    """
    return bool(layer.active_adapters) and not layer.merged and not layer.disable_adapters


def get_wrapped_layer(module: nn.Module) -> nn.Module:
    """Return the layer inside all peft wrappers; a layer without a wrapper is returned as it is.

    Args:
        module: Any module.

    Returns:
        The innermost layer.
    """
    while is_peft_layer(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def find_wrapping_layer(module: nn.Module, peft_layers: Iterable[nn.Module]) -> nn.Module:
    """Return the outermost of a model's peft layers around a module, or the module itself."""
    return next((layer for layer in peft_layers if get_wrapped_layer(layer) is module), module)
