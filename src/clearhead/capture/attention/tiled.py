"""Tiled attention: the fastest exact kernel in the forward pass; maps are recomputed in tiles in the backward pass.

    A[i] = softmax(q_i Kᵀ s + mask_i),     ∂y/∂A[i] = ∂y/∂o_i Vᵀ          i: the queries of one tile

A tile holds complete rows, so that its softmax is independent of other tiles. The model's own eager attention computes
it from some of the queries: position biases, soft caps, sinks, windows and grouped heads stay exact. Methods process A
and ∂y/∂A of each tile in the loop that computes the ordinary gradients (in half precision, where these are rounded, in
a separate loop); no map of all queries ever exists. Memory is queries, keys and values of each layer and one tile; with
activation checkpointing (`activation_checkpointing.py`) those of one layer and one tile; and the tensors kept for
deferred reductions (`deferred.py`).

An `AttentionKernel` that also splits the keys replaces the loop for the calls that it supports, where methods need only
reductions (`reductions.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from clearhead.capture.attention import chunked_sdpa
from clearhead.capture.attention.lazy_mask import (
    HasVisibleKey,
    LazyMask,
    compute_has_visible_key,
    find_key_span,
    upcast_mask,
)
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiling import TORCH_TILES_NAME, TilingConfig
from clearhead.capture.attention.tiling import QKVGradients as QKVGradients

#: Largest number of elements in the map of one tile (16 MiB in float32), unless that is fewer than `MIN_TILE_ROWS`.
MAX_TILE_ELEMENTS = 2**22
MIN_TILE_ROWS = 16

#: Up to this many keys, tiles that compute outputs leave no masked keys out: adding up fewer products rounds
#: differently, and later layers amplify the difference where attention is sharp.
MAX_UNSLICED_KEYS = 4096

#: Receives each tile: its queries, their attention, and the gradient of the attention (None if there is none).
TileCallback = Callable[[slice, Float[Tensor, "batch head query key"], Tensor | None], None]


@dataclass
class TiledAttention:
    """One attention call that computes its maps tile by tile, as often as needed.

    Attributes:
        eager_forward: The model's eager attention.
        sdpa_forward: Torch's kernel, which computes the output without tiles; None where only eager attention is exact.
        module: The attention module.
        mask: Boolean (which keys each query sees) or additive mask.
        causal: Whether no query sees later keys; there is no mask then.
        kwargs: Further arguments of the attention function.
        tiling: Settings of the tiled pass.
        saved_tensors: Queries, keys, values, and tensors that the kernel saved in its forward pass.
        ctx_ref: Weak reference to the autograd context that holds these tensors until the backward pass; a strong one
            would close a reference cycle.
        query_gradient_edge: Graph edge of the queries; a gradient that passes it has passed the attention.
        on_backward: Called with ∂y/∂output when the backward pass reaches the call; returns the gradients of query, key
            and value.
        is_persistent: Whether the tensors are kept after a backward pass, because several may follow.
    """

    eager_forward: Callable[..., tuple[Tensor, Tensor]]
    sdpa_forward: Callable[..., tuple[Tensor, Any]] | None
    module: nn.Module
    mask: Tensor | None
    causal: bool
    kwargs: Mapping[str, Any]
    tiling: TilingConfig
    saved_tensors: tuple[Tensor, ...] | None = None
    ctx_ref: Callable[[], Any] | None = None
    query_gradient_edge: Any = None
    on_backward: Callable[[Tensor], QKVGradients] | None = None
    is_persistent: bool = False

    def prepare_backward(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Float[Tensor, "batch query head width"] | None:
        """Save the tensors for any number of backward passes to an output that is computed elsewhere.

        Returns:
            The output, if a kernel must compute it in order to save tensors for its backward pass; else None.
        """
        self.is_persistent = True
        self._setup(query, key, value)
        if self.kernel is None:
            return None
        output, saved = self.kernel.forward(self)
        self.saved_tensors = (*self._get_saved_tensors(), *saved)
        return output

    def _setup(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the detached tensors, and choose the kernel: None where it does not support the call."""
        self.saved_tensors = (query.detach(), key.detach(), value.detach())
        self.meta_attention = torch.empty((*query.shape[:3], key.shape[2]), dtype=query.dtype, device="meta")
        self.kernel = self.tiling.kernel
        if self.kernel is not None and not self.kernel.supports(self, ()):
            self.kernel = None
        self.tiling.kernel_log.output_kernels.add(TORCH_TILES_NAME if self.kernel is None else self.kernel.name)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch query head width"]:
        """Compute the output; its gradient is computed by tiles or by the kernel."""
        self._setup(query, key, value)
        if query.requires_grad:
            self.query_gradient_edge = torch.autograd.graph.get_gradient_edge(query)
        output: Tensor = _TiledAttentionFunction.apply(query, key, value, self)
        if output.requires_grad:
            self.saved_tensors = None  # autograd saves or, with checkpointing, recomputes them
        return output

    def release(self) -> None:
        """Drop all references to tensors and to the graph."""
        self.saved_tensors = self.ctx_ref = self.query_gradient_edge = self.on_backward = None

    def copy_detached(self) -> "TiledAttention":
        """Return a copy without references to the graph, which is released after the pass, and without callbacks."""
        saved_tensors = self._get_saved_tensors()
        detached = copy(self)
        detached.release()
        detached.saved_tensors = saved_tensors
        detached.tiling = TilingConfig(
            tile_rows=self.tiling.tile_rows, kernel=self.tiling.kernel, kernel_log=self.tiling.kernel_log
        )
        return detached

    def _get_saved_tensors(self) -> tuple[Tensor, ...]:
        """Return query, key, value and the kernel's tensors, after `forward` from the autograd context."""
        if self.saved_tensors is None:
            assert self.ctx_ref is not None
            self.saved_tensors = tuple(tensor.detach() for tensor in self.ctx_ref().saved_tensors)
        return self.saved_tensors

    @property
    def query(self) -> Float[Tensor, "batch head query width"]:
        """Queries, detached from the graph."""
        return self._get_saved_tensors()[0]

    @property
    def key(self) -> Float[Tensor, "batch kv_head key width"]:
        """Keys, detached from the graph."""
        return self._get_saved_tensors()[1]

    @property
    def value(self) -> Float[Tensor, "batch kv_head key width"]:
        """Values, detached from the graph."""
        return self._get_saved_tensors()[2]

    @property
    def kernel_saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel saved in its forward pass."""
        return self._get_saved_tensors()[3:]

    @property
    def scaling(self) -> float:
        """The factor of the scores."""
        scaling = self.kwargs.get("scaling")
        return self.query.shape[3] ** -0.5 if scaling is None else float(scaling)

    def compute_output(self) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        """Compute the output, and the tensors that the kernel saves for the backward pass."""
        if self.kernel is not None:
            return self.kernel.forward(self)
        if self.sdpa_forward is not None:
            return chunked_sdpa.chunked_sdpa_forward(self), ()
        query, key, value = self._get_saved_tensors()
        keeps_all_keys = key.shape[2] <= MAX_UNSLICED_KEYS
        outputs = [
            self._compute_tile(
                query_slice, key_slice, query[:, :, query_slice], key[:, :, key_slice], value[:, :, key_slice]
            )[0]
            for query_slice, key_slice in self._iter_tile_spans(keeps_all_keys, 1, self.tiling.tile_rows)
        ]
        return torch.cat(outputs, dim=1), ()

    def backward(self, gradient: Float[Tensor, "*target batch query head width"]) -> QKVGradients:
        """Handle the backward pass: return ∂y/∂query, ∂y/∂key and ∂y/∂value, and notify `on_backward`.

        Args:
            gradient: ∂y/∂output, of one target or of several.
        """
        row_gradient = gradient.reshape(-1, *gradient.shape[-3:])
        if self.on_backward is not None:
            qkv_gradients = self.on_backward(row_gradient)
        else:
            qkv_gradients = self.compute_gradients(row_gradient)
            if not self.is_persistent:
                self.release()
        dq, dk, dv = (tensor.reshape(*gradient.shape[:-3], *tensor.shape[1:]) for tensor in qkv_gradients)
        return dq, dk, dv

    def compute_gradients(self, gradient: Float[Tensor, "row query head width"]) -> QKVGradients:
        """Compute ∂y/∂query, ∂y/∂key and ∂y/∂value from ∂y/∂output; rows are target × sample."""
        if self.kernel is not None:
            target_gradients = gradient.split(len(self.query))
            return _concat_gradients(
                [self.kernel.backward(self, target_gradient, ())[0] for target_gradient in target_gradients]
            )
        qkv_gradients = self.for_each_tile(gradient, None, with_gradients=True)
        assert qkv_gradients is not None
        return qkv_gradients

    def reduce_with_kernel(
        self, gradient: Tensor | None, reductions: Sequence[MapReduction] | None, num_targets: int, with_gradients: bool
    ) -> tuple[QKVGradients | None, list[Tensor]] | None:
        """Compute reductions of the maps with the kernel.

        Args:
            gradient: ∂y/∂output, target × sample; None if reductions are of attention alone.
            reductions: What to compute; None if tiles are needed.
            num_targets: Number of targets.
            with_gradients: Whether to compute the gradients of query, key and value, too.

        Returns:
            The gradients, if requested, and the reductions; None where tiles are needed.
        """
        if self.kernel is None or reductions is None or not self.kernel.supports(self, reductions):
            return None
        num_samples = len(self.query)
        gradients: list[QKVGradients] = []
        results: list[list[Tensor]] = []
        for target in range(num_targets):
            rows = slice(target * num_samples, (target + 1) * num_samples)
            target_reductions = [reduction.select_samples(rows, self.query.device) for reduction in reductions]
            target_gradient = None if gradient is None else gradient[rows]
            if with_gradients and target_gradient is not None:
                qkv_gradients, target_results = self.kernel.backward(self, target_gradient, target_reductions)
                gradients.append(qkv_gradients)
            else:
                target_results = self.kernel.reduce_maps(self, target_gradient, target_reductions)
            results.append(target_results)
        concatenated = [torch.cat(per_target) for per_target in zip(*results, strict=True)]
        if not gradients:
            return None, concatenated
        return _concat_gradients(gradients), concatenated

    def for_each_tile(
        self,
        gradient: Float[Tensor, "row query head width"] | None,
        on_tile: TileCallback | None,
        with_gradients: bool = False,
        num_targets: int = 1,
    ) -> QKVGradients | None:
        """Compute each tile once, in the order of the queries, for `on_tile` and for the ordinary gradients.

        Args:
            gradient: ∂y/∂output of one target or of several (target × sample), for which a tile is computed once.
            on_tile: Receives each tile.
            with_gradients: Whether to compute the gradients of query, key and value.
            num_targets: Number of targets that `on_tile` repeats a tile for, which limits its size.

        Returns:
            The gradients, if requested. Where they are computed separately, the size of the tiles does not depend on
            the settings.
        """
        qkv = self._get_saved_tensors()[:3]
        num_keys = qkv[1].shape[2]
        has_gradient = gradient is not None
        target_gradients = () if gradient is None else gradient.split(len(qkv[0]))
        sums: list[Tensor] = []
        if with_gradients:
            sums = [
                tensor.new_zeros((len(target_gradients), *tensor.shape), dtype=get_accumulation_dtype(tensor.dtype))
                for tensor in qkv
            ]
        keeps_all_keys = self.tiling.needs_masked_gradients and on_tile is not None
        if self.needs_separate_gradients and on_tile is None:
            spans = self._iter_tile_spans(keeps_all_keys, 1, None)
        else:
            spans = self._iter_tile_spans(
                keeps_all_keys, max(num_targets, len(target_gradients)), self.tiling.tile_rows
            )
        for query_slice, key_slice in spans:
            slices = (query_slice, key_slice, key_slice)
            # relevance is computed in float32 for models in half precision, too
            tile_qkv = [
                tensor[:, :, slice_].to(get_accumulation_dtype(tensor.dtype)).requires_grad_(has_gradient)
                for tensor, slice_ in zip(qkv, slices, strict=True)
            ]
            with torch.set_grad_enabled(has_gradient):
                output, attention = self._compute_tile(query_slice, key_slice, *tile_qkv)
            has_visible_key = self.compute_has_visible_key(query_slice, key_slice)
            nodes = (attention, *tile_qkv) if with_gradients else (attention,)
            attention_gradients: list[Tensor] = []
            for target, target_gradient in enumerate(target_gradients):
                output_gradient = target_gradient[:, query_slice]
                if has_visible_key is not None:
                    output_gradient = output_gradient * has_visible_key.transpose(1, 2)
                attention_gradient, *tile_gradients = torch.autograd.grad(
                    output, nodes, output_gradient.to(output.dtype), retain_graph=target + 1 < len(target_gradients)
                )
                if on_tile is not None:
                    attention_gradients.append(attention_gradient)
                for sum_, slice_, tile_gradient in zip(sums, slices, tile_gradients, strict=False):
                    sum_[target, :, :, slice_] += tile_gradient
            if on_tile is not None:
                padding = (key_slice.start, num_keys - key_slice.stop)
                attention = attention.detach()
                if has_visible_key is not None:
                    attention = attention * has_visible_key
                padded_gradient = None
                if attention_gradients:
                    padded_gradient = pad(torch.cat(attention_gradients), padding)
                on_tile(query_slice, pad(attention, padding), padded_gradient)
        if not with_gradients:
            return None
        dq, dk, dv = (sum_.flatten(0, 1).to(tensor.dtype) for sum_, tensor in zip(sums, qkv, strict=True))
        return dq, dk, dv

    def _compute_tile(
        self, query_slice: slice, key_slice: slice, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"]]:
        """Output and attention of some queries and keys, by the model's eager attention."""
        kwargs = {name: self.slice_argument(argument, query_slice, key_slice) for name, argument in self.kwargs.items()}
        mask = self.compute_additive_mask(query_slice, key_slice, query.dtype)
        return self.eager_forward(self.module, query, key, value, mask, **kwargs)

    @property
    def needs_separate_gradients(self) -> bool:
        """Whether the gradients are computed in a loop separate from that of the methods' tiles.

        In half precision gradients are rounded, and the result depends on the size of the tiles. It must not depend on
        which methods run.
        """
        return get_accumulation_dtype(self.query.dtype) != self.query.dtype

    def compute_has_visible_key(self, query_slice: slice, key_slice: slice) -> HasVisibleKey:
        """Return which of these queries see a key; None if all do, or if torch's kernel is not used."""
        if self.sdpa_forward is None or self.causal:
            return None
        return compute_has_visible_key(self.compute_visible_mask(query_slice, key_slice))

    def slice_argument(self, argument: Any, query_slice: slice, key_slice: slice) -> Any:
        """Return the tile of a tensor that has axes of queries and keys, such as a position bias."""
        _, _, num_queries, num_keys = self.meta_attention.shape
        if not isinstance(argument, Tensor) or argument.dim() != 4 or argument.shape[3] != num_keys:
            return argument
        argument = argument[..., key_slice]
        if argument.shape[2] == num_queries:
            return argument[:, :, query_slice]
        return argument

    def compute_additive_mask(
        self, query_slice: slice, key_slice: slice, dtype: torch.dtype
    ) -> Float[Tensor, "#batch #head query key"] | None:
        """Return the tile of the mask for eager attention: zero, or a value that a softmax maps to zero."""
        visible = self.compute_visible_mask(query_slice, key_slice)
        if visible is not None:
            # Float64's minimum is −∞ to a softmax in float32, which makes NaN of a padded row that sees no key.
            minimum = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
            return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, minimum)
        if self.mask is None:
            return None
        return upcast_mask(self.slice_argument(self.mask, query_slice, key_slice), dtype)

    def compute_visible_mask(
        self, query_slice: slice, key_slice: slice
    ) -> Bool[Tensor, "#batch #head query key"] | None:
        """Return which of these keys these queries see; None if there is no mask, or if it is additive."""
        if self.causal:
            query_positions = torch.arange(query_slice.start, query_slice.stop, device=self.query.device)
            key_positions = torch.arange(key_slice.start, key_slice.stop, device=self.query.device)
            return (key_positions <= query_positions[:, None])[None, None]
        if isinstance(self.mask, LazyMask):
            return self.mask.compute_tile(query_slice, key_slice).to(self.query.device)
        if self.mask is None or self.mask.dtype != torch.bool:
            return None
        return self.slice_argument(self.mask, query_slice, key_slice)

    def _iter_tile_spans(
        self, keeps_all_keys: bool, num_targets: int, tile_rows: int | None
    ) -> Iterator[tuple[slice, slice]]:
        """The queries of each tile, and its keys: the span that these queries see, or all with `keeps_all_keys`."""
        batch, heads, num_queries, num_keys = self.meta_attention.shape
        size = tile_rows or max(MIN_TILE_ROWS, MAX_TILE_ELEMENTS // (num_targets * batch * heads * num_keys))
        for start in range(0, num_queries, size):
            query_slice = slice(start, min(start + size, num_queries))
            if keeps_all_keys or self._has_fully_masked_row(query_slice):
                yield query_slice, slice(0, num_keys)
            else:
                yield query_slice, self.find_key_span(query_slice)

    def _has_fully_masked_row(self, query_slice: slice) -> bool:
        """Whether one of these queries sees no key, so that eager attention is uniform over all keys."""
        if self.sdpa_forward is not None:
            return False
        if isinstance(self.mask, LazyMask) and self.mask.band_mask is not None and self.mask.band_mask.padding is None:
            return False  # every query sees at least its own position
        visible = self.compute_visible_mask(query_slice, slice(0, self.meta_attention.shape[3]))
        return compute_has_visible_key(visible) is not None

    def find_key_span(self, query_slice: slice) -> slice:
        """Return the span from the first key that one of these queries sees to the last."""
        all_keys = slice(0, self.meta_attention.shape[3])
        if self.causal:
            return slice(0, min(query_slice.stop, all_keys.stop))
        if isinstance(self.mask, LazyMask):
            return self.mask.find_key_span(query_slice)
        visible = self.compute_visible_mask(query_slice, all_keys)
        return all_keys if visible is None else find_key_span(visible)


class _TiledAttentionFunction(torch.autograd.Function):
    """Computes the output without tiles; its gradient comes from `TiledAttention.backward`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: TiledAttention) -> Tensor:
        """Compute the output, and save the tensors of the call and of its kernel with autograd."""
        output, saved = call.compute_output()
        ctx.save_for_backward(query, key, value, *saved)
        ctx.call = call
        call.ctx_ref = weakref.ref(ctx)
        if call.saved_tensors is not None:
            call.saved_tensors = (*call.saved_tensors, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value; None for the call."""
        return *dispatch_backward(ctx.call, gradients[0]), None


def dispatch_backward(call: TiledAttention, gradient: Float[Tensor, "batch query head width"]) -> QKVGradients:
    """Run the backward pass of a call, for one target or, under `torch.vmap`, for several."""
    if torch._C._are_functorch_transforms_active():
        qkv_gradients: QKVGradients = _BatchedBackwardFunction.apply(gradient, call)
        return qkv_gradients
    return call.backward(gradient)


class _BatchedBackwardFunction(torch.autograd.Function):
    """Backward pass of a call for several targets at once, under `torch.vmap`."""

    @staticmethod
    def forward(gradient: Tensor, call: TiledAttention) -> QKVGradients:
        """Run the backward pass for one target; torch calls `vmap` for several."""
        return call.backward(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are not differentiated again."""

    @staticmethod
    def vmap(info: Any, dims: Any, gradient: Tensor, call: TiledAttention) -> tuple[QKVGradients, tuple[int, int, int]]:
        """Run one backward pass with the targets as first axis of the gradient."""
        if dims[0] is None:
            per_target = gradient[None].expand(info.batch_size, *gradient.shape)
        else:
            per_target = gradient.movedim(dims[0], 0)
        return call.backward(per_target), (0, 0, 0)


def repeat_for_targets(tensor: Tensor, num_targets: int) -> Tensor:
    """Repeat a tensor for each target, with target × sample as one axis (without a copy if there is one sample)."""
    if num_targets == 1:
        return tensor
    return tensor.expand(num_targets, *tensor.shape).flatten(0, 1)


def _concat_gradients(target_gradients: Sequence[QKVGradients]) -> QKVGradients:
    """Concatenate the gradients of several targets, each of query, key and value, to target × sample."""
    if len(target_gradients) == 1:
        return target_gradients[0]
    dq, dk, dv = (torch.cat(gradients) for gradients in zip(*target_gradients, strict=True))
    return dq, dk, dv


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float32 for half precision, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
