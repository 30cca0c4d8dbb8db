"""Tiled attention on a CPU: torch's fused kernel in the forward pass, cache-sized tiles in the backward pass.

    A = softmax(Q Kᵀ s + mask);     ∂y/∂A = ∂y/∂O Vᵀ,  ∂y/∂S = A ⊙ (∂y/∂A − Σ_j A ⊙ ∂y/∂A)

The formula of `materialised.py`, for some queries and heads of one sample at a time. Each tile is reduced before the
next one is computed, so maps stay in the CPU's cache. This kernel is for models that run with torch's fused kernel,
which takes a scale and a mask and nothing else; other models run their own eager attention in tiles (`tiled.py`).
"""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from clearhead.capture.attention import chunked_sdpa
from clearhead.capture.attention.lazy_mask import HasVisibleKey
from clearhead.capture.attention.materialised import SDPA_COMPATIBLE_KWARGS, empty_bthd, repeat_kv_heads, sum_kv_groups
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import QKVGradients, TiledAttention

#: Elements of a tile (2 MiB in float32).
CPU_TILE_ELEMENTS = 2**19
#: Matrix products with fewer rows are slow.
MIN_CPU_TILE_ROWS = 128
#: More rows bring no speed.
MAX_CPU_TILE_ROWS = 512


class CPUKernel:
    """Attention kernel for the CPU (the `AttentionKernel` protocol of `tiling.py`)."""

    name = "cached tiles"

    def supports(self, call: TiledAttention, reductions: Sequence[MapReduction]) -> bool:
        """Whether a call is float32 on the CPU, and has nothing that torch's fused kernel cannot compute."""
        tensors = (call.query, call.key, call.value)
        if call.sdpa_forward is None:
            return False
        if not all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors):
            return False
        if not {name for name, value in call.kwargs.items() if value is not None} <= SDPA_COMPATIBLE_KWARGS:
            return False
        if call.causal and call.query.shape[2] != call.key.shape[2]:
            return False
        return call.mask is None or call.mask.dim() == 4

    def forward(self, call: TiledAttention) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        """Compute the output; no tensors are saved for the backward pass."""
        return chunked_sdpa.chunked_sdpa_forward(call), ()

    def backward(
        self,
        call: TiledAttention,
        gradient: Float[Tensor, "batch query head width"],
        reductions: Sequence[MapReduction],
    ) -> tuple[QKVGradients, list[Tensor]]:
        """Compute the gradients of query, key and value, and the reductions, in one loop over tiles."""
        if not reductions:
            return chunked_sdpa.chunked_sdpa_backward(call, gradient), []
        gradients = _GradientAccumulator(call)
        samples = [_SampleInputs(call, i, sample.transpose(0, 1)) for i, sample in enumerate(gradient)]
        accumulators = [_ReductionAccumulator(reduction, call) for reduction in reductions]
        for sample, tile in _iter_tiles(call, samples):
            for accumulator in accumulators:
                accumulator.add_tile(sample.sample_index, tile)
            gradients.add_tile(sample, tile)
        return gradients.finish(), [accumulator.total for accumulator in accumulators]

    def reduce_maps(
        self,
        call: TiledAttention,
        gradient: Float[Tensor, "batch query head width"] | None,
        reductions: Sequence[MapReduction],
    ) -> list[Tensor]:
        """Compute the reductions of a call's maps, without the gradients of query, key and value."""
        if not reductions:
            return []
        if gradient is None:
            samples = [_SampleInputs(call, i, None) for i in range(len(call.query))]
        else:
            samples = [_SampleInputs(call, i, sample.transpose(0, 1)) for i, sample in enumerate(gradient)]
        accumulators = [_ReductionAccumulator(reduction, call) for reduction in reductions]
        for sample, tile in _iter_tiles(call, samples):
            for accumulator in accumulators:
                accumulator.add_tile(sample.sample_index, tile)
        return [accumulator.total for accumulator in accumulators]


@dataclass
class _Tile:
    """Attention, and its gradient, of some heads and queries to their visible keys."""

    heads: slice
    queries: slice
    keys: slice
    attention: Float[Tensor, "head query key"]
    gradient: Float[Tensor, "head query key"] | None
    scratch: Float[Tensor, "head query key"]

    def compute_maps(self, quantity: str) -> Float[Tensor, "head query key"]:
        """Return the maps of a quantity; they are valid until the next call, which reuses the scratch buffer."""
        if quantity == "attention":
            return self.attention
        assert self.gradient is not None
        torch.mul(self.attention, self.gradient, out=self.scratch)
        if quantity == "positive":
            return self.scratch.clamp_(min=0)
        return self.scratch


class _SampleInputs:
    """One sample of a call, with a key and a value for each head."""

    def __init__(self, call: TiledAttention, i: int, gradient: Float[Tensor, "head query width"] | None) -> None:
        self.scale = call.scaling
        self.sample_index = i
        self.gradient = gradient
        self.query = call.query[i]
        num_heads = len(self.query)
        self.key = repeat_kv_heads(call.key[i], num_heads)
        self.value = repeat_kv_heads(call.value[i], num_heads)

    def compute_tile(
        self, heads: slice, rows: slice, keys: slice, mask: "_TileMask", buffer: Float[Tensor, "3 cell"]
    ) -> _Tile:
        """Compute a tile in the memory of `buffer`."""
        query = self.query[heads, rows]
        key = self.key[heads, keys]
        value = self.value[heads, keys]
        shape = (len(query), query.shape[1], key.shape[1])
        maps, gradient, scratch = (row[: math.prod(shape)].view(shape) for row in buffer)
        maps.baddbmm_(query, key.mT, beta=0, alpha=self.scale)
        if mask.additive_mask is not None:
            maps[:, :, mask.masked_keys] += self._select_sample(mask.additive_mask, heads)
        torch.softmax(maps, -1, out=maps)
        if mask.has_visible_key is not None:
            maps *= self._select_sample(mask.has_visible_key, heads)
        if self.gradient is None:
            return _Tile(heads, rows, keys, maps, None, scratch)
        torch.bmm(self.gradient[heads, rows], value.mT, out=gradient)
        return _Tile(heads, rows, keys, maps, gradient, scratch)

    def _select_sample(
        self, mask: Shaped[Tensor, "#batch #head query key"], heads: slice
    ) -> Shaped[Tensor, "#head query key"]:
        """The mask of this sample and these heads, from one that may be shared by all samples or heads."""
        sample_mask = mask[self.sample_index] if len(mask) > 1 else mask[0]
        if len(sample_mask) == 1:
            return sample_mask
        return sample_mask[heads]


@dataclass
class _TileMask:
    """The mask of some queries.

    Attributes:
        additive_mask: Is added to the scores of `masked_keys`; None if there is no mask.
        masked_keys: The keys of the tile that some query may not see.
        has_visible_key: Which queries see any key at all; None if all do.
    """

    additive_mask: Float[Tensor, "#batch #head query key"] | None
    masked_keys: slice
    has_visible_key: HasVisibleKey

    @classmethod
    def from_call(cls, call: TiledAttention, rows: slice, keys: slice) -> "_TileMask":
        """Compute the mask of the queries `rows` and the keys `keys`."""
        # In causal attention, every query of the tile sees all keys before the first query.
        masked = slice(rows.start, keys.stop) if call.causal else keys
        masked_in_tile = slice(masked.start - keys.start, masked.stop - keys.start)
        return cls(
            call.compute_additive_mask(rows, masked, torch.float32),
            masked_in_tile,
            call.compute_has_visible_key(rows, keys),
        )


class _GradientAccumulator:
    """Sums the gradients of the queries, keys and values of a call over tiles, head by head."""

    def __init__(self, call: TiledAttention) -> None:
        self.inputs = (call.query, call.key, call.value)
        self.scale = call.scaling
        num_heads = call.query.shape[1]
        # If many tiles add to each key, the sums have the memory layout of the products.
        has_single_tile = _choose_tile_rows(call) == call.query.shape[2]
        key_layout = empty_bthd if has_single_tile else _empty_transposed
        self.totals = [
            make_empty(tensor, num_heads).zero_()
            for make_empty, tensor in zip((empty_bthd, key_layout, key_layout), self.inputs, strict=True)
        ]

    def add_tile(self, sample: _SampleInputs, tile: _Tile) -> None:
        """Add the contribution of a tile; the tile's gradient is overwritten."""
        assert sample.gradient is not None and tile.gradient is not None
        heads = tile.heads
        rows = tile.queries
        keys = tile.keys
        grad_scores = tile.gradient
        total_query, total_key, total_value = (total[sample.sample_index, heads] for total in self.totals)
        # A map as the right operand is read in its memory order.
        total_value[:, keys] += (sample.gradient[heads, rows].mT @ tile.attention).mT
        torch.ops.aten._softmax_backward_data.out(
            grad_scores, tile.attention, -1, grad_scores.dtype, grad_input=grad_scores
        )
        total_query[:, rows].add_(grad_scores @ sample.key[heads, keys], alpha=self.scale)
        total_key[:, keys].add_((sample.query[heads, rows].mT @ grad_scores).mT, alpha=self.scale)

    def finish(self) -> QKVGradients:
        """Return the gradients, summed over heads that share keys."""
        pairs = zip(self.totals, self.inputs, strict=True)
        dq, dk, dv = (sum_kv_groups(total, tensor.shape[1], 1) for total, tensor in pairs)
        return dq, dk, dv


def _empty_transposed(
    tensor: Float[Tensor, "batch kv_head key width"], num_heads: int
) -> Float[Tensor, "batch head key width"]:
    """Allocate the gradient of keys or values per head, stored as its transpose."""
    batch, _, keys, width = tensor.shape
    return tensor.new_empty(batch, num_heads, width, keys).mT


_thread_buffers = threading.local()


def _get_scratch_buffer(num_cells: int) -> Float[Tensor, "3 cell"]:
    """Return this thread's buffer, reused for all tiles: touching new memory takes longer than the computation."""
    buffer: Tensor | None = getattr(_thread_buffers, "buffer", None)
    if buffer is None or buffer.shape[1] < num_cells:
        buffer = torch.empty(3, max(num_cells, CPU_TILE_ELEMENTS), dtype=torch.float32, device="cpu")
    if buffer.shape[1] <= CPU_TILE_ELEMENTS:  # a larger buffer is freed after the call
        _thread_buffers.buffer = buffer
    return buffer


def _choose_tile_rows(call: TiledAttention) -> int:
    """The number of queries in a tile."""
    num_queries, num_keys = call.meta_attention.shape[2:]
    default_rows = min(max(CPU_TILE_ELEMENTS // num_keys, MIN_CPU_TILE_ROWS), MAX_CPU_TILE_ROWS)
    return min(num_queries, call.tiling.tile_rows or default_rows)


def _iter_tiles(call: TiledAttention, samples: Sequence[_SampleInputs]) -> Iterator[tuple[_SampleInputs, _Tile]]:
    """Yield the tiles of all samples; each mask is computed once for all of them."""
    _, num_heads, num_queries, num_keys = call.meta_attention.shape
    tile_rows = _choose_tile_rows(call)
    buffer = _get_scratch_buffer(tile_rows * num_keys)
    for start in range(0, num_queries, tile_rows):
        rows = slice(start, min(start + tile_rows, num_queries))
        keys = call.find_key_span(rows)
        mask = _TileMask.from_call(call, rows, keys)
        tile_heads = max(1, CPU_TILE_ELEMENTS // (tile_rows * (keys.stop - keys.start)))
        for sample in samples:
            for first_head in range(0, num_heads, tile_heads):
                heads = slice(first_head, min(first_head + tile_heads, num_heads))
                yield sample, sample.compute_tile(heads, rows, keys, mask, buffer)


class _ReductionAccumulator:
    """Accumulates one `MapReduction` over all tiles."""

    def __init__(self, reduction: MapReduction, call: TiledAttention) -> None:
        batch, num_heads, num_queries, num_keys = call.meta_attention.shape
        self.reduction = reduction
        self.heads = range(num_heads) if reduction.heads is None else reduction.heads
        self.weighs_columns = reduction.column_weights is not None
        self.weights = reduction.column_weights if self.weighs_columns else reduction.row_weights
        if self.weights is None:
            self.total = call.query.new_zeros(batch, len(self.heads), num_queries)
        else:
            num_vectors = self.weights.shape[1]
            num_totals = len(self.heads) if num_vectors == 1 else 1
            num_units = num_queries if self.weighs_columns else num_keys
            self.total = call.query.new_zeros(batch, num_totals, num_vectors, num_units)
        self.last_head = max(self.heads)
        self.head_sum: Tensor | None = None

    def add_tile(self, i: int, tile: _Tile) -> None:
        """Add the contribution of a tile of sample i."""
        head_indices = [k for k, head in enumerate(self.heads) if tile.heads.start <= head < tile.heads.stop]
        if not head_indices:
            return
        maps = tile.compute_maps(self.reduction.quantity)
        total = self.total[i]
        selected: slice | list[int] = slice(head_indices[0], head_indices[-1] + 1)
        if self.reduction.heads is not None:
            maps = maps[[self.heads[k] - tile.heads.start for k in head_indices]]
            selected = head_indices
        if self.weights is None:
            total[selected, tile.queries] += maps.sum(2)
            return
        if self.weighs_columns:
            summed, remaining = tile.keys, tile.queries
        else:
            summed, remaining = tile.queries, tile.keys
        weights = self.weights[i, :, summed].float() / len(self.heads)
        if len(weights) == 1:
            total[selected, :, remaining] += weights.expand(len(maps), 1, -1) @ self._orient(maps)
            return
        # With as many vectors as queries, the products cost as much as the maps: sum over all heads first.
        self.head_sum = maps.sum(0) if self.head_sum is None else self.head_sum.add_(maps.sum(0))
        if self.last_head < tile.heads.stop:
            total[0, :, remaining] += weights @ self._orient(self.head_sum)
            self.head_sum = None

    def _orient(self, maps: Tensor) -> Tensor:
        """Maps with the axis that is summed over first."""
        return maps.mT if self.weighs_columns else maps
