"""Detects models that detach their own gradients for the sake of training, and restores the full gradients.

RT-DETR and DAB-DETR detach the boxes that a decoder layer starts from, HRM runs most of its cycles without gradients.
Autograd then does not give the dependence of the output on the input. The forward pass is the same with and without.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Largest change of a gradient, relative to its magnitude, that does not count as detached.
GRADIENT_TOLERANCE = 1e-4
_DETACH_FUNCTIONS = (Tensor.detach, Tensor.detach_, torch.detach, torch.detach_)


class IgnoreDetachMode(TorchFunctionMode):
    """Inside the `with`, detaching does nothing, and all operations run with gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DETACH_FUNCTIONS:
            return args[0]
        with torch.enable_grad():
            return func(*args, **(kwargs or {}))


class _DetachDetector(TorchFunctionMode):
    """Remembers whether a tensor with a gradient was detached."""

    has_detached = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_detaching = func in _DETACH_FUNCTIONS or not torch.is_grad_enabled()
        if is_detaching and isinstance(result, Tensor) and result.is_floating_point():
            self.has_detached |= any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        return result


def detaches_gradients(
    forward: Callable[..., Any], inputs: Mapping[str, Any], select_tensor: Callable[[Any], Tensor]
) -> bool:
    """Whether the gradient of the input changes if detaching is ignored.

    Where the full gradient is zero, the detached operation is a step function (rounding) that is bypassed on purpose.

    Args:
        forward: Captured forward pass, as `run_self_test` gets it.
        inputs: Keyword arguments of the model.
        select_tensor: Selects the tensor to differentiate from the model's output.

    Returns:
        True if the model detaches something that its output depends on.
    """
    with torch.enable_grad(), _DetachDetector() as detector:
        forward(inputs)
    if not detector.has_detached:
        return False
    plain_gradients = _compute_input_gradients(forward, inputs, select_tensor, nullcontext())
    full_gradients = _compute_input_gradients(forward, inputs, select_tensor, IgnoreDetachMode())
    return any(
        full.any() and (plain - full).abs().max() > GRADIENT_TOLERANCE * full.abs().max()
        for plain, full in zip(plain_gradients, full_gradients, strict=True)
    )


def _compute_input_gradients(
    forward: Callable[..., Any], inputs: Mapping[str, Any], select_tensor: Callable[[Any], Tensor], mode: Any
) -> list[Tensor]:
    """Gradients of a fixed linear combination of all outputs by the tensors that the graph starts from."""
    with torch.enable_grad():
        with mode:
            output, _, graph_leaves = forward(inputs)
        logits = select_tensor(output)
        weights = torch.linspace(-3, 3, logits.numel(), dtype=logits.dtype, device=logits.device).sin()
        leaves = list(graph_leaves.values())
        gradients = torch.autograd.grad((logits.flatten() * weights).sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]
