"""Which layer a module sits in, and what goes into and comes out of each layer in one pass."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class Run:
    """One run of a layer (a shared layer runs several times in a pass)."""

    input: Float[Tensor, "batch unit model"]
    output: Float[Tensor, "batch unit model"] | None = None


class Watch:
    """Remembers the latest run of each layer, in this thread alone: hooks fire for everybody who uses the model."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.thread = threading.get_ident()
        self.latest: dict[int, Run] = {}
        self.handles: list[Any] = []
        for layer in {id(layer): layer for layer in layers}.values():
            self.handles.append(layer.register_forward_pre_hook(self._begins, with_kwargs=True))
            self.handles.append(layer.register_forward_hook(self._ends))

    def of(self, layer: nn.Module | None) -> Run | None:
        return self.latest.get(id(layer))

    def _begins(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self.thread:
            named: Any = kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()), None)
            self.latest[id(layer)] = Run(args[0] if args else named)

    def _ends(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.latest[id(layer)].output = output[0] if isinstance(output, tuple) else output


def blocks_of(model: nn.Module) -> dict[int, nn.Module]:
    """For each module, the layer it sits in: its innermost ancestor that is an item of a ModuleList.

    Where it sits in none, an item of a Sequential counts, as in timm's models.
    """
    blocks: dict[int, nn.Module] = {}

    def walk(module: nn.Module, block: nn.Module | None, listed: bool) -> None:
        if block is not None:
            blocks[id(module)] = block
        for child in module.children():
            begins = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and not listed)
            walk(child, child if begins else block, listed or isinstance(module, nn.ModuleList))

    walk(model, None, False)
    return blocks
