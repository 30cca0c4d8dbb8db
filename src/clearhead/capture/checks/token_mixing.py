"""Detects models that mix tokens outside of attention, which methods that propagate relevance through maps ignore.

If the outputs of all attention calls are zero, no position may depend on another between the input of the first layer
and the output of the last. Where one does, convolutions, recurrences or similar operations carry information past the
maps (hybrids with Mamba or LFM2 layers, ConvBERT, conformers). Operations before the first layer do not count.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.context import CapturedCall
from clearhead.capture.layers import LayerRecorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.topology import ModelTopology

#: Largest gradient that counts as zero, relative to the largest of all positions.
ZERO_GRADIENT_TOLERANCE = 1e-6


def mixes_tokens_outside_attention(
    topology: ModelTopology, forward: Callable[..., Any], inputs: Mapping[str, Any]
) -> bool:
    """Whether positions depend on each other through anything but the captured attention.

    Args:
        topology: The modules of the model.
        forward: Captured forward pass, as `run_self_test` gets it.
        inputs: Keyword arguments of the model.
    """
    model = topology.model
    stacks = list(_iter_layer_stacks(model, forward(inputs)[1]))
    layer_recorder = LayerRecorder(layer for stack in stacks for layer in (stack[0], stack[-1]))
    with torch.enable_grad(), remove_hooks_on_exit(layer_recorder.handles):
        output, calls, _ = forward(inputs, zero_attention=True)
        stack_inputs = [run.input for stack in stacks if (run := layer_recorder.get_latest(stack[0]))]
        results = [run.output for stack in stacks if (run := layer_recorder.get_latest(stack[-1]))]
        results += [call.values.transpose(1, 2).flatten(2) for call in calls if call.values is not None]
        if isinstance(output, Mapping):
            results += list(output.values())
        is_mixed = any(
            _depends_on_other_positions(result, stack_input) for result in results for stack_input in stack_inputs
        )
    return is_mixed or any(_has_convolution(model, call) for call in calls if call.values is None)


def _iter_layer_stacks(model: nn.Module, calls: list[CapturedCall]) -> Iterator[nn.ModuleList | nn.Sequential]:
    """Iterate over the outermost lists of layers that contain attention."""
    attention_ids = {id(model.get_submodule(call.module)) for call in calls}

    def walk(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
        for child in module.children():
            if not any(id(descendant) in attention_ids for descendant in child.modules()):
                continue
            is_attention_list = any(id(item) in attention_ids for item in child.children())  # for example of heads
            if isinstance(child, nn.ModuleList | nn.Sequential) and not is_attention_list:
                yield child
            else:
                yield from walk(child)

    yield from walk(model)


def _depends_on_other_positions(result: Any, stack_input: Any) -> bool:
    """Whether the first or last position of `result` depends on another position of the input.

    Tensors with different positions are not compared.
    """
    for tensor in (result, stack_input):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3 or not tensor.requires_grad:
            return False
    num_positions = result.shape[1]
    if stack_input.shape[:2] != result.shape[:2] or num_positions < 2 or result is stack_input:
        return False
    # a plain sum may be constant, for example after a norm
    weights = torch.linspace(-3, 3, result.shape[2], dtype=result.dtype, device=result.device).sin()
    for position in (0, num_positions - 1):
        (gradient,) = torch.autograd.grad(
            (result[:, position] @ weights).sum(), stack_input, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            continue
        magnitude = gradient.abs().amax((0, 2))
        of_others = torch.cat([magnitude[:position], magnitude[position + 1 :]])
        if of_others.max() > ZERO_GRADIENT_TOLERANCE * magnitude.max():
            return True
    return False


def _has_convolution(model: nn.Module, call: CapturedCall) -> bool:
    """Whether an attention module contains a convolution over positions.

    The full output of a module that returns its attention is set to zero, that of its convolutions included.
    """
    submodules = model.get_submodule(call.module).modules()
    return any(isinstance(module, nn.Conv1d | nn.Conv2d) and max(module.kernel_size) > 1 for module in submodules)
