"""Is attention all that lets positions see each other? Relevance that is pushed through its maps takes it for that.

In a pass in which every attention call says nothing, no position may depend on another, from what goes into the first
layer to what comes out of the last: where one does, convolutions, recurrences or the like carry information past the
maps (hybrids with Mamba or LFM2 layers, ConvBERT, conformers). What happens before the first layer makes the units."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.layers import Watch
from clearhead.capture.session import hooks
from clearhead.capture.sources.attention_interface import Captured

#: What is left of a gradient that should be zero, relative to the largest.
NOTHING = 1e-6


def mixes_elsewhere(model: nn.Module, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> bool:
    """Whether positions see each other by other means than the recorded attention."""
    stacks = list(_stacks(model, forward(inputs)[1]))
    watch = Watch(layer for stack in stacks for layer in (stack[0], stack[-1]))
    with torch.enable_grad(), hooks(watch.handles):
        output, calls, _ = forward(inputs, silent=True)
        begins = [run.input for stack in stacks if (run := watch.of(stack[0]))]
        ends = [run.output for stack in stacks if (run := watch.of(stack[-1]))]
        ends += [call.values.transpose(1, 2).flatten(2) for call in calls if call.values is not None]
        ends += list(output.values()) if isinstance(output, Mapping) else []
        seen = any(_sees_another(end, begin) for end in ends for begin in begins)
    return seen or any(_convolves(model, call) for call in calls if call.values is None)


def _stacks(model: nn.Module, calls: list[Captured]) -> Iterator[nn.ModuleList | nn.Sequential]:
    """The outermost lists of layers that hold attention."""
    heard = {id(model.get_submodule(call.module)) for call in calls}

    def walk(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
        for child in module.children():
            holds = any(id(part) in heard for part in child.modules())
            alone = any(id(part) in heard for part in child.children())  # a list of heads, or of attentions
            if holds and isinstance(child, nn.ModuleList | nn.Sequential) and not alone:
                yield child
            elif holds:
                yield from walk(child)

    yield from walk(model)


def _sees_another(end: Any, begin: Any) -> bool:
    """Whether the first or the last row of `end` depends on another row of `begin`, where they are the same rows."""
    for part in (end, begin):
        if not isinstance(part, Tensor) or part.dim() != 3 or not part.requires_grad:
            return False
    count = end.shape[1]
    if begin.shape[:2] != end.shape[:2] or count < 2 or end is begin:
        return False
    weights = torch.linspace(-3, 3, end.shape[2], dtype=end.dtype, device=end.device).sin()  # a sum may be constant
    for row in (0, count - 1):
        (seen,) = torch.autograd.grad((end[:, row] @ weights).sum(), begin, retain_graph=True, allow_unused=True)
        if seen is None:
            continue
        size = seen.abs().amax((0, 2))
        if torch.cat([size[:row], size[row + 1 :]]).max() > NOTHING * size.max():
            return True
    return False


def _convolves(model: nn.Module, call: Captured) -> bool:
    """A module that only returns its attention is silenced as a whole, convolutions inside it included."""
    inside = model.get_submodule(call.module).modules()
    return any(isinstance(part, nn.Conv1d | nn.Conv2d) and max(part.kernel_size) > 1 for part in inside)
