"""Recording through what attention modules return, for models that ignore the attention interface (LXMERT, DeBERTa …).

Switching their implementation does nothing, in silence; but the probabilities that they return, some only when asked,
are in the graph."""

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from clearhead.capture.sources.attention_interface import Listener


def handles(model: nn.Module, listener: "Listener") -> list[RemovableHandle]:
    """Ask each innermost attention module for its probabilities, and hear those that the interface did not."""
    found: list[RemovableHandle] = []
    for module in attention_modules(model):
        ear = _Ear(module, listener)
        found.append(module.register_forward_pre_hook(ear.ask, with_kwargs=True))
        found.append(module.register_forward_hook(ear.hear))
    return found


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are called attention and hold no other that is (what is called an output is none)."""
    found: dict[int, nn.Module] = {}

    def is_or_holds_one(module: nn.Module) -> bool:
        inside = [is_or_holds_one(child) for child in module.children()]
        named = _called_attention(type(module).__mro__) and not samples_points(module)
        if named and not any(inside):
            found[id(module)] = module
        return named or any(inside)

    is_or_holds_one(model)
    return list(found.values())


@cache
def _called_attention(classes: tuple[type, ...]) -> bool:
    """Whether a class is, or one that it extends."""
    return any("Attention" in cls.__name__ and "Output" not in cls.__name__ for cls in classes)


def samples_points(module: nn.Module) -> bool:
    """Whether a module looks at a few sampled points of a picture: what it returns is no map over its cells."""
    return "multiscaledeformable" in type(module).__name__.lower()


class _Ear:
    """Listens to one module."""

    def __init__(self, module: nn.Module, listener: "Listener") -> None:
        self.listener = listener
        names = list(inspect.signature(module.forward).parameters)
        self.place = names.index("output_attentions") if "output_attentions" in names else None
        self.before = 0
        self.asked = False  # by this ear, and not by the caller

    def ask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.listener.listening:
            return None
        self.before = self.listener.heard[id(module)]
        if self.place is None:
            return None
        by_place = len(args) > self.place
        self.asked = not (args[self.place] if by_place else kwargs.get("output_attentions"))
        if by_place:
            return (*args[: self.place], True, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, "output_attentions": True}

    def hear(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        through_interface = self.listener.heard[id(module)] > self.before
        if not self.listener.listening or through_interface or not isinstance(output, tuple | list):
            return None
        maps = [part for part in output[1:] if isinstance(part, Tensor) and _fits(part, output[0])]
        if not maps:
            return None
        if self.asked and len(maps) > 1 and output[-1] is maps[-1]:
            # T5 in transformers 5.0 also returns its position bias, which looks like a map, and, when asked, its
            # attention after it. Its stack counts what comes back by what it asked for: it gets no more than that.
            self.listener.hear(module, maps[-1])
            return self.listener.passed_on(output[:-1])
        self.listener.hear(module, maps[0])
        return self.listener.passed_on(output) if self.listener.silent else None


def _fits(part: Tensor, output: Any) -> bool:
    """Whether what a module returns can be its attention, a row for each query: linear attentions return states."""
    if part.dim() != 4:
        return False
    return not isinstance(output, Tensor) or output.dim() != 3 or part.shape[2] in output.shape[:2]
