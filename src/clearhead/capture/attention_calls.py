"""Captures every attention call of a pass, through all capture sources."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.activation_checkpointing import checkpointed_layers
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.context import IMPLEMENTATION_NAME, CaptureContext, CapturedCall
from clearhead.capture.layers import LayerRecorder
from clearhead.capture.session import remove_hooks_on_exit, switched_attention_implementation
from clearhead.capture.sources.attention_interface import ATTENTION_INTERFACE
from clearhead.capture.sources.base import CaptureSource
from clearhead.capture.sources.custom_modules import CUSTOM_MODULES
from clearhead.capture.sources.returned_attentions import RETURNED_ATTENTIONS
from clearhead.capture.topology import ModelTopology

#: Every way to capture calls; those that show more of a call come first.
CAPTURE_SOURCES: tuple[CaptureSource, ...] = (ATTENTION_INTERFACE, CUSTOM_MODULES, RETURNED_ATTENTIONS)


def find_capture_source(calls: Sequence[CapturedCall]) -> CaptureSource:
    """Return how calls were captured: of several sources, the one that shows least."""
    return max((call.source for call in calls), key=CAPTURE_SOURCES.index)


@contextmanager
def capture_attention_calls(
    topology: ModelTopology,
    keep_layer_io: bool = False,
    find_projections: bool = False,
    needs_maps: bool = True,
    implementation: str = IMPLEMENTATION_NAME,
    zero_attention: bool = False,
    tiling: TilingConfig | None = None,
    keep_values: bool = True,
    use_tiled_gradients: bool = False,
) -> Iterator[list[CapturedCall]]:
    """Collect every attention call that the model makes in this thread inside the `with`, through all sources.

    Args:
        topology: The modules of the model.
        keep_layer_io: Whether calls keep the input and output of their layer.
        find_projections: Whether to find the output projection of each call.
        needs_maps: Whether calls have attention maps; if not, the model's own kernels run.
        implementation: Attention implementation to switch to; "eager" for models that do not use transformers' table
            of attention functions.
        zero_attention: Whether attention outputs are replaced by zeros after they are captured.
        tiling: Settings of a tiled pass: calls have no maps, but a `TiledAttention` that computes them.
        keep_values: Whether calls of a tiled pass keep values and outputs.
        use_tiled_gradients: Whether gradients in half precision are computed as in a tiled pass, also where maps are
            materialised.

    Yields:
        The list that receives the calls.
    """
    layer_recorder = LayerRecorder(topology.layers if keep_layer_io else ())
    context = CaptureContext(
        topology, layer_recorder, implementation, needs_maps, zero_attention, tiling, keep_values, use_tiled_gradients
    )
    handles = layer_recorder.handles
    if find_projections:
        hook = _make_projection_hook(context)
        handles += [module.register_forward_pre_hook(hook) for module in topology.matrix_modules]
    with ExitStack() as stack:
        stack.enter_context(remove_hooks_on_exit(handles))
        for source in CAPTURE_SOURCES:
            stack.enter_context(source.capturing(context))
        if tiling is not None and tiling.checkpoint_layers and torch.is_grad_enabled():
            stack.enter_context(checkpointed_layers(topology.layers, partial(_recompute_context, context)))
        stack.callback(context.clear)
        stack.enter_context(context.active())
        yield context.calls


@contextmanager
def _recompute_context(context: CaptureContext) -> Iterator[None]:
    """State while activation checkpointing recomputes a layer in the backward pass, in whichever thread that is."""
    with switched_attention_implementation(context.topology, context.implementation), context.active():
        context.is_recomputing = True
        if context.tiling is not None:
            context.tiling.kernel_log.has_recomputed_layers = True
        try:
            yield
        finally:
            context.is_recomputing = False


def _make_projection_hook(context: CaptureContext) -> Callable[..., None]:
    """Make a hook that recognises the output projection: the linear map whose input is the attention's output."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not context.is_active or not context.calls or not args or not isinstance(args[0], Tensor):
            return
        call = context.calls[-1]
        if call.output is None or call.output_projection is not None:
            return
        if _has_same_values(args[0], call.output):
            weight = module.weight
            assert isinstance(weight, Tensor)
            # GPT-2's Conv1D stores its weight as input × output.
            call.output_projection = weight if isinstance(module, nn.Linear) else weight.T
            if call.tiled is not None:
                call.output = None  # a tiled pass keeps only what it needs

    return hook


def _has_same_values(tensor: Tensor, reference: Tensor) -> bool:
    """Whether two tensors hold the same values in the same order, whatever their shapes."""
    if tensor.numel() != reference.numel():
        return False
    return tensor.data_ptr() == reference.data_ptr() or torch.equal(tensor.reshape(-1), reference.reshape(-1))
