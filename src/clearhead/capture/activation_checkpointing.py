"""Activation checkpointing: each layer is computed again on the way back, so that memory is one layer's."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache


@contextmanager
def layers_again(layers: Iterable[nn.Module], again: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside the `with`, this thread's passes keep what goes into each layer, and nothing of what is made inside.

    `again` is what must hold while a layer is computed again, in the backward pass.
    """
    thread, own = threading.get_ident(), outermost(layers)
    before = [layer.__dict__.get("forward") for layer in own]

    def run(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **named)  # somebody else's pass through the same model
        # a cache would be filled twice
        args = tuple(None if isinstance(part, Cache) else part for part in args)
        named = {name: None if isinstance(part, Cache) else part for name, part in named.items()}
        how: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), again()),
        }
        return checkpoint(forward, *args, **how, **named)

    try:
        for layer in own:
            layer.__dict__["forward"] = partial(run, layer.forward)
        yield
    finally:
        for layer, forward in zip(own, before, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward


def outermost(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that lie in no other: experts are items of a list, too, and belong to their layer."""
    distinct = {id(layer): layer for layer in layers}
    inner = {id(part) for layer in distinct.values() for part in layer.modules() if part is not layer}
    return [layer for key, layer in distinct.items() if key not in inner]
