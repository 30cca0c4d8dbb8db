"""Models that cut their own gradients off, for the sake of training, and how they are made whole.

RT-DETR and DAB-DETR detach the boxes that a decoder layer starts from, HRM runs most of its cycles without gradients.
What autograd gives then is not how the answer depends on the input. The forward pass is the same with and without."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: How much a gradient may change, relative to its size, before something was cut off.
TOLERANCE = 1e-4
_DETACH = (Tensor.detach, Tensor.detach_, torch.detach, torch.detach_)


class Whole(TorchFunctionMode):
    """Inside the `with`, detaching does nothing, and nothing runs without gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DETACH:
            return args[0]
        with torch.enable_grad():
            return func(*args, **(kwargs or {}))


class _Watched(TorchFunctionMode):
    """Remembers whether anything was cut off."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        cut = func in _DETACH or not torch.is_grad_enabled()
        if cut and isinstance(made, Tensor) and made.is_floating_point():
            self.found |= any(isinstance(part, Tensor) and part.requires_grad for part in args)
        return made


def gradients_are_cut(forward: Callable[..., Any], inputs: Mapping[str, Any], first: Callable[[Any], Tensor]) -> bool:
    """Whether the gradient of the input is another one once nothing is cut off.

    Where nothing is left of it then, what was detached is a step (rounding) that is passed over on purpose.
    """
    with torch.enable_grad(), _Watched() as watched:
        forward(inputs)
    if not watched.found:
        return False
    plain, whole = (_gradients(forward, inputs, first, mode) for mode in (nullcontext(), Whole()))
    return any(b.any() and (a - b).abs().max() > TOLERANCE * b.abs().max() for a, b in zip(plain, whole, strict=True))


def _gradients(
    forward: Callable[..., Any], inputs: Mapping[str, Any], first: Callable[[Any], Tensor], mode: Any
) -> list[Tensor]:
    """How a fixed mix of all outputs depends on what the graph starts from."""
    with torch.enable_grad():
        with mode:
            output, _, starts = forward(inputs)
        numbers = first(output)
        mix = torch.linspace(-3, 3, numbers.numel(), dtype=numbers.dtype, device=numbers.device).sin()
        ends = list(starts.values())
        found = torch.autograd.grad((numbers.flatten() * mix).sum(), ends, allow_unused=True)
    return [torch.zeros_like(end) if part is None else part for part, end in zip(found, ends, strict=True)]
