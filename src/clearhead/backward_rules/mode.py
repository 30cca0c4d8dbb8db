"""The operator mode: every operation of a forward pass, seen as it is called, gets the rule of its kind.

An operation that moves numbers about (reshape, index, concatenate …) is differentiated as ever; one of a kind that the
family of rules knows gets its rule (`operators.py`); any other that the target depends on is refused by its name. The
mode holds in one thread, inside one `with`, and nothing is patched.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import Family, NoRule, active, flat
from clearhead.backward_rules.float64_mode import mixed, widened
from clearhead.backward_rules.operators import KINDS, MOVES, PICKS, SAME
from clearhead.backward_rules.peft_merging import run_merged
from clearhead.capture.session import hooks


class Rules(TorchFunctionMode):
    """A family of rules at work on one forward pass of `size` samples."""

    def __init__(self, family: Family, size: int) -> None:
        super().__init__()
        self.family, self.size = family, size
        #: What became of each tensor so far.
        self.uses = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = list(filter(active, flat((args, kwargs)))) if torch.is_grad_enabled() else []
        if self.family.wide and (parts or mixed(func, args, kwargs)):
            func, args, kwargs = widened(func, args, kwargs)
            parts = [part for part in flat((args, kwargs)) if active(part)] if parts else []
        if not parts:
            return func(*args, **kwargs)
        name = func.__name__
        if name in KINDS:
            self._use(parts, name)
            return self._by_rule(func, args, kwargs)
        output = func(*args, **kwargs)
        if not any(map(active, flat(output))) or any(output is part for part in parts):
            return output
        if name not in MOVES | self.family.ordinary:
            raise NoRule(f"the operator {resolve_name(func) or name} has no rule in {self.family.name}")
        self._use(parts, name)
        return self.family.picked(output) if name in PICKS and isinstance(output, Tensor) else output

    def _by_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return KINDS[func.__name__](self, func, *args, **kwargs)
        except TypeError as problem:  # with arguments that its handler does not take
            said = f"the operator {func.__name__}, as it is called, has no rule in {self.family.name}"
            raise NoRule(said) from problem

    def _use(self, parts: list[Tensor], name: str) -> None:
        for part in parts if name not in SAME else ():
            self.family.used(part, self.uses, name)


@contextmanager
def under(model: nn.Module, family: Family, size: int) -> Iterator[None]:
    """Let the passes that run in this thread inside the `with` be differentiated by these rules."""
    merged = run_merged(model) if family.splits_maps else []
    with hooks([*merged, *_activations(model, family)]), Rules(family, size):
        yield


def _activations(model: nn.Module, family: Family) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """transformers' activation functions, some of which are made of several operations, as one function each.

    The module is called with an input out of the graph, and its output gets back into it by the rule.
    """
    thread = threading.get_ident()
    given: dict[int, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() == thread and args and active(args[0]):
            given[id(module)] = args[0]
            return (args[0].detach(), *args[1:])
        return None

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        x = given.pop(id(module), None) if threading.get_ident() == thread else None
        return None if x is None else family.activation(module.forward, x)

    for module in model.modules():
        if type(module).__module__ == "transformers.activations" or type(module).__name__ == "BloomGelu":
            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(after)
