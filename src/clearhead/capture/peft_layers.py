"""Layers of peft that wrap a layer of the model and add adapters to it (LoRA and others).

They are recognised by their attributes: peft need not be installed.
"""

from typing import Any

from torch import nn

_ATTRIBUTES = ("base_layer", "active_adapters", "disable_adapters", "merged", "merge")


def is_peft_layer(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def runs_adapters(layer: Any) -> bool:
    """Whether a layer of peft computes more than the layer that it wraps: adapters may be merged, or disabled."""
    return bool(layer.active_adapters) and not layer.merged and not layer.disable_adapters


def wrapped_layer(module: nn.Module) -> nn.Module:
    """The layer of the model inside of a layer of peft, or the layer itself."""
    return wrapped_layer(module.base_layer) if is_peft_layer(module) else module  # type: ignore[arg-type]


def wrapping_layer(module: nn.Module, model: nn.Module) -> nn.Module:
    """The outermost layer of peft around a layer of a model, or the layer itself."""
    around = (layer for layer in model.modules() if is_peft_layer(layer) and wrapped_layer(layer) is module)
    return next(around, module)
