"""Whatever touches a user's model while it is recorded, as context managers that put everything back."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from clearhead.errors import Refusal

_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_locks_guard = threading.Lock()


def lock_of(model: nn.Module) -> Any:
    """One lock per configuration object: the attention implementation is a flag on it, and models may share it.

    The caller keeps the lock (and so the model) alive; two recorders of one model get the same lock.
    """
    owner = id(getattr(model, "config", model))
    with _locks_guard:
        lock = _locks.get(owner)
        if lock is None:
            lock = _locks[owner] = threading.RLock()
    return lock


def configs_of(model: nn.Module) -> list[Any]:
    """Every distinct configuration object in the model, sub-configurations included."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


_switched: dict[int, str] = {}


def implementation_of(config: Any) -> str:
    """The attention implementation that the user chose, also while it is switched."""
    return _switched.get(id(config)) or config._attn_implementation or "eager"


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Switch every configuration of the model to `name`, without the library's checks, and back."""
    now = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    before = [(config, old) for config, old in now if old != name]
    try:
        for config, old in before:
            _switched[id(config)] = old or "eager"
            config._attn_implementation_internal = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old
            _switched.pop(id(config), None)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no autocast, no parameter asking for a gradient: so no weight gradient is ever built.

    The user's backward hooks wait, too: this backward pass is not theirs, and torch gives a module that has one copies
    of its outputs, which lie on no way to the target.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    if any(parameter.is_inference() for parameter in parameters):
        raise Refusal(
            f"{type(model).__name__} was made under torch.inference_mode() and can have no gradients: load it outside"
        )
    training = [module for module in modules if module.training]
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    tables = [table for module in modules for table in (module._backward_hooks, module._backward_pre_hooks)]
    waiting = [(table, dict(table)) for table in tables if table]
    try:
        for module in training:
            module.training = False
        for parameter in learning:
            parameter.requires_grad_(False)
        for table, _ in waiting:
            table.clear()
        # Weights that are offloaded are nowhere ("meta") between passes; where the others are, the numbers are, too.
        kinds = (parameter.device.type for parameter in parameters)
        with (
            torch.autocast(next((kind for kind in kinds if kind != "meta"), "cpu"), enabled=False),
            torch.random.fork_rng(devices=[]),  # ViLT draws random numbers at every pass: they are not the user's
            hooks(_forgetful_positions(modules)),
        ):
            yield
    finally:
        for table, before in waiting:
            table.update(before)
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


def _forgetful_positions(modules: Iterable[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that put rotary positions back after each call, where their frequencies depend on the length.

    transformers keeps a dynamic RoPE's frequencies of the longest input so far. So a pass of ours would change what the
    user's model answers from then on, and an explanation would depend on what was explained before it.
    """
    counting = [module for module in modules if _counts_by_length(vars(module).get("rope_type"))]
    return [module.register_forward_hook(_put_back(module), always_call=True) for module in counting]


def _put_back(module: nn.Module) -> Callable[..., None]:
    """A hook that gives the module the attributes and buffers that it has now."""
    tables = (vars(module), module._buffers)
    known = [(table, {name: part for name, part in table.items() if not name.startswith("_")}) for table in tables]

    def hook(*_: Any) -> None:
        for table, before in known:
            for name in [name for name in table if name not in before and not name.startswith("_")]:
                del table[name]
            table.update(before)

    return hook


def _counts_by_length(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]  # kinds of layers may have their own
    return any(kind in ("dynamic", "longrope") for kind in kinds)


@contextmanager
def starting(learned: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the graph start from these parameters, too, in a model at rest: what only they lead to has gradients then."""
    try:
        for parameter in learned:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(False)


def ordered_gradients(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that hand batch norms their gradients in plain order.

    In evaluation mode, on a CPU, torch (2.13) returns a wrong gradient for a batch of one if the gradient that comes in
    lies in memory channels last, as that of `x.flatten(2).transpose(1, 2)` does.
    """

    def order(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(torch.Tensor.contiguous)

    norms = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    return [module.register_forward_hook(order) for module in norms]


@contextmanager
def hooks(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Remove these hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
