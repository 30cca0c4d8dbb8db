"""Activation checkpointing: recompute each layer in the backward pass, so that memory holds one layer's activations."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache


@contextmanager
def checkpointed_layers(
    layers: Iterable[nn.Module], make_recompute_context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside the `with`, passes of this thread keep only the inputs of each layer and recompute the activations.

    Args:
        layers: The layers to checkpoint. Layers nested in another of them are recomputed with it.
        make_recompute_context: Makes the context in which a layer is recomputed during the backward pass.
    """
    thread_id = threading.get_ident()
    outermost_layers = find_outermost_modules(layers)
    instance_forwards = [layer.__dict__.get("forward") for layer in outermost_layers]

    def run_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread_id:
            return forward(*args, **kwargs)  # another thread uses the same model
        # the second run of the layer would fill a cache twice
        args = tuple(_drop_cache(argument) for argument in args)
        kwargs = {name: _drop_cache(argument) for name, argument in kwargs.items()}
        options: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), make_recompute_context()),
        }
        return checkpoint(forward, *args, **options, **kwargs)

    try:
        for layer in outermost_layers:
            layer.__dict__["forward"] = partial(run_checkpointed, layer.forward)
        yield
    finally:
        for layer, instance_forward in zip(outermost_layers, instance_forwards, strict=True):
            del layer.__dict__["forward"]
            if instance_forward is not None:
                layer.__dict__["forward"] = instance_forward


def _drop_cache(argument: Any) -> Any:
    """Replace a key–value cache among the arguments by None."""
    return None if isinstance(argument, Cache) else argument


def find_outermost_modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that lie in no other one of the list.

    Mixture-of-experts layers hold a list of their own: experts belong to their layer.
    """
    distinct = {id(layer): layer for layer in layers}
    nested_ids = {id(module) for layer in distinct.values() for module in layer.modules() if module is not layer}
    return [layer for key, layer in distinct.items() if key not in nested_ids]
