"""Records the input and output of each layer during a pass, with forward hooks."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class LayerIO:
    """Input and output of one run of a layer (a shared layer runs several times in a pass).

    Attributes:
        input: The hidden states that enter the layer.
        output: The hidden states that leave it; None until the layer has finished.
    """

    input: Float[Tensor, "batch *unit model"]
    output: Float[Tensor, "batch *unit model"] | None = None


class LayerRecorder:
    """Forward hooks that keep the latest input and output of each layer.

    Hooks fire in every thread that uses the model; only runs in the thread that made the recorder are kept.

    Args:
        layers: The layers to watch; one that occurs twice is hooked once.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.thread_id = threading.get_ident()
        self.latest_io: dict[int, LayerIO] = {}
        self.handles: list[Any] = []
        for layer in {id(layer): layer for layer in layers}.values():
            self.handles.append(layer.register_forward_pre_hook(self._pre_forward_hook, with_kwargs=True))
            self.handles.append(layer.register_forward_hook(self._forward_hook))

    def get_latest(self, layer: nn.Module | None) -> LayerIO | None:
        """Input and output of the layer's latest run; None if it has not run."""
        return self.latest_io.get(id(layer))

    def _pre_forward_hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the record of a run with the layer's input."""
        if threading.get_ident() == self.thread_id:
            self.latest_io[id(layer)] = LayerIO(_get_layer_input(args, kwargs))

    def _forward_hook(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Add the layer's output to the record; of a tuple, its first item."""
        if threading.get_ident() == self.thread_id:
            self.latest_io[id(layer)].output = output[0] if isinstance(output, tuple) else output


def _get_layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first positional argument, else `hidden_states`, else the first keyword argument."""
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(iter(kwargs.values()), None)
