"""Merges adapters (LoRA and others of peft) into their layers for one pass, so that the two are one linear map.

A layer with LoRA computes Wx + sBAx, as two linear maps and a sum. Relevance propagation depends on the signs of
weights and divides at sums, so it gives the two maps other relevance than W + sBA. A copy of each adapted layer is
merged by peft's own code and runs in place of the layer. The copies hold their weights in float32 at least, until the
pass is over.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from clearhead.backward_rules.base import NoRule, active, flat
from clearhead.capture.peft_layers import is_peft_layer, runs_adapters, wrapped_layer
from clearhead.machine_failures import is_machine_failure

_HALF = (torch.float16, torch.bfloat16)


class NotMergeable(NoRule):
    """Adapters that cannot be merged. It says nothing for good: another adapter may be active at the next call."""


def run_merged(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Let merged copies run in place of a model's adapted layers, in passes of this thread.

    The layer itself is called with inputs out of the graph, and its output is replaced by that of the copy. The copy
    has no hooks: those of the caller see the layer's inputs, and the copy's output.

    Raises:
        NotMergeable: If a layer and its adapters cannot be made one map.
    """
    copies = [(layer, _merged_copy(name, layer)) for name, layer in _adapted_layers(model)]
    return [handle for layer, merged in copies for handle in _replace_output(layer, merged)]


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost ones. Embeddings are left out: what depends on the input starts after them."""
    inside: set[nn.Module] = set()
    for name, layer in model.named_modules():
        if layer in inside or not is_peft_layer(layer):
            continue
        inside.update(layer.modules())
        if runs_adapters(layer) and not isinstance(wrapped_layer(layer), nn.Embedding):
            yield name, layer


def _merged_copy(name: str, layer: nn.Module) -> nn.Module:
    if any(parameter.is_meta for parameter in layer.parameters()):
        raise _not_mergeable(name, layer, "its weights are offloaded")
    if not all(parameter.is_floating_point() for parameter in wrapped_layer(layer).parameters()):
        raise _not_mergeable(name, layer, "its weights are quantised")
    try:
        merged: Any = deepcopy(layer, _without_hooks(layer))
        for parameter in merged.parameters():  # merged in half precision, the map would be rounded
            parameter.data = parameter.data.float() if parameter.dtype in _HALF else parameter.data
        merged.merge()
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as problem:
        if isinstance(problem, RuntimeError) and is_machine_failure(problem):
            raise
        raise _not_mergeable(name, layer, f"{type(problem).__name__}: {problem}") from problem
    return merged


def _without_hooks(layer: nn.Module) -> dict[int, Any]:
    """A memo for `deepcopy` by which hooks are not copied: they may hold anything, the whole model among it."""
    tables = (
        table
        for module in layer.modules()
        for name, table in vars(module).items()
        if "_hooks" in name and isinstance(table, dict)
    )
    return {id(table): OrderedDict() for table in tables}


def _not_mergeable(name: str, layer: nn.Module, why: str) -> NotMergeable:
    return NotMergeable(
        f"the adapters of {name} ({type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}) cannot "
        f"be merged into one linear map with the layer ({why}), on which its scores depend: disable the adapters, or "
        "choose attn-lrp, deeplift or another method that does not depend on it"
    )


def _replace_output(layer: nn.Module, merged: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    thread = threading.get_ident()
    waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def detach_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or not any(map(active, flat((args, kwargs)))):
            return None
        waiting.append((args, kwargs))
        return tuple(map(_detached, args)), {name: _detached(part) for name, part in kwargs.items()}

    def run_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if threading.get_ident() != thread or not waiting:
            return None
        args, kwargs = waiting.pop()
        return merged(*args, **kwargs)

    return [
        layer.register_forward_pre_hook(detach_inputs, with_kwargs=True),
        layer.register_forward_hook(run_copy, with_kwargs=True, prepend=True),
    ]


def _detached(part: Any) -> Any:
    return part.detach() if active(part) else part
