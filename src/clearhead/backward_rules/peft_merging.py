"""Merges PEFT adapters (LoRA and others) into their layers for one pass, so that both become one linear map.

A layer with LoRA computes Wx + sBAx, as two linear maps and a sum. Relevance propagation depends on the signs of
weights and divides at sums, so the relevance of the two maps differs from that of W + sBA. A copy of each adapted layer
is merged by peft's own code and runs in place of the layer. The copies hold their weights in float32 or wider until the
end of the pass.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from clearhead.backward_rules.base import MissingRuleError, depends_on_input, flatten_args
from clearhead.capture.peft_layers import get_wrapped_layer, has_active_adapters, is_peft_layer
from clearhead.machine_failures import is_machine_failure

_HALF = (torch.float16, torch.bfloat16)


class UnmergeableAdapterError(MissingRuleError):
    """Adapters that cannot be merged. The error is not cached: another adapter may be active at the next call."""


def run_merged_layers(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Let merged copies run in place of a model's adapted layers, in passes of this thread.

    The layer itself runs on detached inputs, and its output is replaced by that of the copy. The copy has no hooks: the
    caller's hooks see the layer's inputs and the copy's output.

    Args:
        model: A model that may contain layers of peft.

    Returns:
        Handles that remove the replacements.

    Raises:
        UnmergeableAdapterError: If a layer and its adapters cannot be merged into one linear map.
    """
    copies = [(layer, _merged_copy(name, layer)) for name, layer in _adapted_layers(model)]
    return [handle for layer, merged in copies for handle in _replace_output(layer, merged)]


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost adapted layers. Embeddings are skipped: the graph starts after them."""
    submodules: set[nn.Module] = set()
    for name, layer in model.named_modules():
        if layer in submodules or not is_peft_layer(layer):
            continue
        submodules.update(layer.modules())
        if has_active_adapters(layer) and not isinstance(get_wrapped_layer(layer), nn.Embedding):
            yield name, layer


def _merged_copy(name: str, layer: nn.Module) -> nn.Module:
    """Copy a layer with its adapters merged, or raise `UnmergeableAdapterError`."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        raise _not_mergeable(name, layer, "its weights are offloaded")
    if not all(parameter.is_floating_point() for parameter in get_wrapped_layer(layer).parameters()):
        raise _not_mergeable(name, layer, "its weights are quantised")
    try:
        merged: Any = deepcopy(layer, _without_hooks(layer))
        for parameter in merged.parameters():
            if parameter.dtype in _HALF:  # a merge in half precision would round the merged weights
                parameter.data = parameter.data.float()
        merged.merge()
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as problem:
        if isinstance(problem, RuntimeError) and is_machine_failure(problem):
            raise
        raise _not_mergeable(name, layer, f"{type(problem).__name__}: {problem}") from problem
    return merged


def _without_hooks(layer: nn.Module) -> dict[int, Any]:
    """Return a memo with which `deepcopy` skips hooks: they may reference anything, even the whole model."""
    tables = (
        table
        for module in layer.modules()
        for name, table in vars(module).items()
        if "_hooks" in name and isinstance(table, dict)
    )
    return {id(table): OrderedDict() for table in tables}


def _not_mergeable(name: str, layer: nn.Module, reason: str) -> UnmergeableAdapterError:
    """Return the error for an adapted layer that cannot be merged, with the reason and a way out."""
    return UnmergeableAdapterError(
        f"the adapters of {name} ({type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}) cannot "
        f"be merged into one linear map with the layer ({reason}), which this method requires: disable the adapters, "
        "or choose attn-lrp, deeplift or another method that does not require it"
    )


def _replace_output(layer: nn.Module, merged: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that replace a layer's output by that of its merged copy."""
    thread = threading.get_ident()
    saved_inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def detach_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or not any(map(depends_on_input, flatten_args((args, kwargs)))):
            return None
        saved_inputs.append((args, kwargs))
        return tuple(map(_detached, args)), {name: _detached(arg) for name, arg in kwargs.items()}

    def run_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if threading.get_ident() != thread or not saved_inputs:
            return None
        args, kwargs = saved_inputs.pop()
        return merged(*args, **kwargs)

    return [
        layer.register_forward_pre_hook(detach_inputs, with_kwargs=True),
        layer.register_forward_hook(run_copy, with_kwargs=True, prepend=True),
    ]


def _detached(arg: Any) -> Any:
    """Detach a tensor that depends on the input; return anything else as it is."""
    return arg.detach() if depends_on_input(arg) else arg
