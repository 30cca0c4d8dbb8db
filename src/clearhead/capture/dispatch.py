"""Dispatches captured attention calls to methods from the last call to the first.

Gradients arrive in the order of autograd, which differs from the order of the calls where streams run in parallel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.attention.deferred import DeferredCall
from clearhead.capture.attention.tiled import QKVGradients, TiledAttention, repeat_for_targets
from clearhead.capture.attention.tiling import TORCH_TILES_NAME, TilingConfig
from clearhead.capture.checks.self_test import CallSite
from clearhead.capture.context import CapturedCall
from clearhead.capture.tape import DIFFERENTIABLE_TENSORS, AttentionCall, Requirements
from clearhead.errors import UnsupportedError

CallCallback = Callable[[AttentionCall], None]


class CallDispatcher:
    """Passes each call to `on_call`, from the last to the first, once all its requested gradients have arrived.

    Args:
        calls: All calls of the forward pass, in order.
        call_sites: Layer and streams of each call.
        call_indices: The calls to dispatch, as ascending indices into `calls`.
        requires: The tensors that `on_call` needs.
        on_call: Receives each complete call.
        tiling: Settings and callbacks of a tiled pass; the defaults where maps are materialised.
        keep_maps: Whether `on_call` keeps attention maps. If not, their memory is reused.
    """

    def __init__(
        self,
        calls: list[CapturedCall],
        call_sites: Sequence[CallSite],
        call_indices: Sequence[int],
        requires: Requirements,
        on_call: CallCallback,
        tiling: TilingConfig,
        keep_maps: bool = True,
    ) -> None:
        self.calls = calls
        self.call_sites = call_sites
        self.requires = requires
        self.on_call = on_call
        self.tiling = tiling
        self.keep_maps = keep_maps
        self.requested_gradients = [
            f"{name}_gradient" for name in DIFFERENTIABLE_TENSORS if f"{name}_gradient" in requires
        ]
        self.received_gradients: dict[int, dict[str, Tensor]] = {index: {} for index in call_indices}
        self.pending = list(call_indices)
        self.num_targets = 1
        self.reduced_calls: set[int] = set()
        self.backpropagated_calls: set[int] = set()  # tiled calls that the backward pass has reached
        for index, call in enumerate(calls):
            if call.gradient_buffer is not None:
                call.gradient_buffer.can_overwrite = (
                    index not in self.received_gradients or "attention_gradient" not in self.requested_gradients
                )
        for index in call_indices:
            tiled_call = calls[index].tiled
            if tiled_call is not None:
                tiled_call.on_backward = partial(self._on_backward, index, tiled_call)

    def find_gradient_sources(self) -> list[tuple[int, str, Any]]:
        """Return (call index, requirement, tensor or graph edge) for every gradient that a pending call waits for.

        Raises:
            UnsupportedError: A tensor does not take part in the computation from the input to the target.
        """
        sources: list[tuple[int, str, Any]] = []
        for index in self.pending:
            call = self.calls[index]
            for requirement in self.requested_gradients:
                node = getattr(call, requirement.removesuffix("_gradient"))
                if call.tiled is not None and requirement == "attention_gradient":
                    node = call.tiled.query_gradient_edge  # a gradient that reaches it has passed the attention
                if node is None or (isinstance(node, Tensor) and not node.requires_grad):
                    raise UnsupportedError(
                        f"{requirement.replace('_', ' ')} of {call.module} cannot be recorded: "
                        "it is not part of the computation that leads from the input to the target"
                    )
                sources.append((index, requirement, node))
        return sources

    def on_gradient_hook(self, call_index: int, requirement: str, gradient: Tensor) -> None:
        """Tensor hook: receives a gradient, of several targets at once if the backward pass is batched."""
        if torch._C._are_functorch_transforms_active():
            _BatchedGradientTap.apply(gradient, partial(self.receive_gradient, call_index, requirement))
        else:
            self.receive_gradient(call_index, requirement, gradient)

    def delivers_own_gradient(self, call_index: int, requirement: str) -> bool:
        """Whether the tiled attention itself delivers this gradient, so that no hook is needed."""
        return requirement == "attention_gradient" and self.calls[call_index].tiled is not None

    def receive_gradient(self, call_index: int, requirement: str, gradient: Tensor) -> None:
        """Store a gradient, then dispatch every call at the end of the queue that is complete."""
        self.received_gradients[call_index][requirement] = gradient
        while self.pending and len(self.received_gradients[self.pending[-1]]) == len(self.requested_gradients):
            self._dispatch(self.pending.pop())

    def dispatch_remaining(self) -> None:
        """Dispatch the calls that received no gradient: the target does not depend on them, so theirs is zero."""
        while self.pending:
            self._dispatch(self.pending.pop())

    def _make_call(self, call_index: int) -> AttentionCall:
        """An `AttentionCall` with the metadata of a captured call and no tensors."""
        captured = self.calls[call_index]
        site = self.call_sites[call_index]
        call = AttentionCall(site.layer, captured.module, captured.kind, site.query_stream, site.key_stream)
        if site.query_stream != site.key_stream:
            call.kind = "cross"
        return call

    def _on_backward(self, call_index: int, tiled_call: TiledAttention, output_gradient: Tensor) -> QKVGradients:
        """Handle the backward pass at a tiled call; returns the gradients of query, key and value.

        If it is this call's turn, one sweep over the tiles serves the methods and the gradients. A call that is reached
        before the calls after it (parallel streams) only computes its gradients and is swept again later.
        """
        is_requested = "attention_gradient" in self.requested_gradients
        qkv_gradients = None
        if is_requested and self.pending[-1:] == [call_index]:
            qkv_gradients = self._process_maps(call_index, output_gradient, backward=True)
        qkv_gradients = qkv_gradients or tiled_call.compute_gradients(output_gradient)
        self.backpropagated_calls.add(call_index)
        if is_requested:
            self.receive_gradient(call_index, "attention_gradient", output_gradient)
        elif call_index not in self.pending:
            tiled_call.release()
        return qkv_gradients

    def _process_maps(
        self, call_index: int, output_gradient: Tensor | None, backward: bool = False
    ) -> QKVGradients | None:
        """Compute everything that methods need of one call's maps and, with `backward`, the gradients, too."""
        tiled_call = self.calls[call_index].tiled
        call = self._make_call(call_index)
        assert tiled_call is not None
        self.reduced_calls.add(call_index)
        kernel_result = tiled_call.reduce_with_kernel(
            output_gradient, self.tiling.request_reductions(call), self.num_targets, backward
        )
        if kernel_result is not None:
            qkv_gradients, reductions = kernel_result
            assert tiled_call.kernel is not None
            if reductions:
                self.tiling.kernel_log.map_kernels.add(tiled_call.kernel.name)
            self.tiling.on_reduced(call, reductions)
            return qkv_gradients
        if self.tiling.tile_passes:
            self.tiling.kernel_log.map_kernels.add(TORCH_TILES_NAME)
        qkv_gradients = None
        for sweep in range(self.tiling.tile_passes):
            sweep_gradients = tiled_call.for_each_tile(
                output_gradient,
                partial(self._handle_tile, call_index, sweep),
                backward and sweep == 0 and not tiled_call.needs_separate_gradients,
                self.num_targets,
            )
            qkv_gradients = qkv_gradients or sweep_gradients
        return qkv_gradients

    def _handle_tile(
        self, call_index: int, sweep: int, query_slice: slice, attention: Tensor, gradient: Tensor | None
    ) -> None:
        """Pass one tile to `on_tile` as a call whose maps are those of the tile's queries."""
        call = self._make_call(call_index)
        call.attention = repeat_for_targets(detach_and_upcast(attention), self.num_targets)
        if "attention_gradient" in self.requires:
            call.attention_gradient = detach_or_zeros(gradient, call.attention)
        self.tiling.on_tile(call, query_slice, sweep)

    def _make_deferred_call(self, tiled_call: TiledAttention, output_gradient: Tensor | None) -> DeferredCall:
        """Return the call without its graph; ∂y/∂output is zero if no gradient arrived."""
        detached_call = tiled_call.copy_detached()
        if output_gradient is None and "attention_gradient" in self.requires:
            batch, heads, queries, _ = detached_call.meta_attention.shape
            output_gradient = detached_call.value.new_zeros(
                self.num_targets * batch, queries, heads, detached_call.value.shape[3]
            )
        return DeferredCall(detached_call, output_gradient, self.num_targets)

    def _dispatch(self, call_index: int) -> None:
        """Complete one call and pass it to `on_call`; its maps are released first."""
        captured = self.calls[call_index]
        gradients = self.received_gradients.pop(call_index)
        call = self._make_call(call_index)
        if captured.tiled is not None:
            output_gradient = gradients.get("attention_gradient")
            if call_index not in self.reduced_calls:
                self._process_maps(call_index, output_gradient)
            if self.tiling.defers_reductions:
                call.deferred = self._make_deferred_call(captured.tiled, output_gradient)
            if call_index in self.backpropagated_calls:  # otherwise the backward pass still needs the saved tensors
                captured.tiled.release()
        self._attach_differentiable_tensors(call, captured, gradients)
        if "values" in self.requires:
            call.values = repeat_for_targets(detach_and_upcast(captured.repeat_values_per_head()), self.num_targets)
        if "output_projection" in self.requires:
            call.output_projection = detach_and_upcast(captured.output_projection)
        self.calls[call_index] = CapturedCall(
            captured.module, captured.attention.new_empty(0, 0, 0, 0), captured.source
        )  # releases the maps
        self.on_call(call)
        if captured.gradient_buffer is not None and not self.keep_maps:
            captured.gradient_buffer.can_overwrite = True

    def _attach_differentiable_tensors(
        self, call: AttentionCall, captured: CapturedCall, gradients: dict[str, Tensor]
    ) -> None:
        """Set attention, block input and hidden state, with their gradients, as far as they are required."""
        for name in DIFFERENTIABLE_TENSORS:
            if name not in self.requires or (name == "attention" and captured.tiled is not None):
                continue
            node = getattr(captured, name)
            if node is None:
                continue
            tensor = detach_and_upcast(node)
            if name == "attention" and captured.has_visible_key is not None:
                tensor = tensor * captured.has_visible_key
            tensor = repeat_for_targets(tensor, self.num_targets)
            setattr(call, name, tensor)
            if f"{name}_gradient" in self.requested_gradients:
                setattr(call, f"{name}_gradient", detach_or_zeros(gradients.get(f"{name}_gradient"), tensor))


@contextmanager
def release_calls_on_exit(calls: Sequence[CapturedCall]) -> Iterator[None]:
    """Release the tensors of tiled calls when the `with` ends, also after an exception.

    The graph references the calls and the calls reference the graph, a cycle that Python's collector cannot see.
    """
    tiled_calls = [call.tiled for call in calls if call.tiled is not None]
    try:
        yield
    finally:
        for tiled_call in tiled_calls:
            tiled_call.release()


def detach_and_upcast(tensor: Tensor | None) -> Any:
    """Detach a tensor from the graph; half precision becomes float32, so that sums are accurate. None stays None."""
    if tensor is None:
        return None
    detached = tensor.detach()
    return detached.float() if tensor.dtype in (torch.float16, torch.bfloat16) else detached


def detach_or_zeros(gradient: Tensor | None, reference: Tensor) -> Tensor:
    """Return the detached gradient of a tensor, in float32 at least; zeros if the target does not depend on it."""
    if gradient is None:
        gradient = torch.zeros_like(reference)
    detached: Tensor = detach_and_upcast(gradient)
    return detached


class _BatchedGradientTap(torch.autograd.Function):
    """Passes the gradients of several targets at one tensor to a callback, with target × sample as the batch."""

    @staticmethod
    def forward(gradient: Tensor, callback: Callable[[Tensor], None]) -> Tensor:
        """Return the gradient; torch calls `vmap` for the batched gradient."""
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are not differentiated again."""

    @staticmethod
    def vmap(info: Any, dims: Any, gradient: Tensor, callback: Callable[[Tensor], None]) -> tuple[Tensor, int]:
        """Call the callback with target × sample as first axis, and return the gradient of each target."""
        if dims[0] is None:
            per_target = gradient.expand(info.batch_size, *gradient.shape)
        else:
            per_target = gradient.movedim(dims[0], 0)
        callback(per_target.flatten(0, 1))
        return per_target, 0
