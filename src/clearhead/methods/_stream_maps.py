"""Head-averaged attention maps of models with several streams, in the order of the forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.deferred import DeferredCall
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall
from clearhead.methods.base import CrossStreamMethod

StreamMatrix = Float[Tensor, "batch row column"]
MapQuantity = Literal["positive", "attention"]


@dataclass(frozen=True)
class StreamMap:
    """The head-averaged map of one attention call.

    Attributes:
        query_stream: The stream that attends.
        key_stream: The stream that is attended to.
        head_mean: The map, averaged over heads; empty for a deferred map.
        in_tower: Whether the call belongs to a residual tower (`CrossStreamMethod.residual_towers`).
        simultaneous_group: The block whose calls see each stream as it was at the start of the block, if any.
    """

    query_stream: str
    key_stream: str
    head_mean: StreamMatrix
    in_tower: bool
    simultaneous_group: str | None

    def push(self, rows: Float[Tensor, "batch row query"]) -> Float[Tensor, "batch row key"]:
        """Multiply rows over the queries with the map."""
        return rows @ self.head_mean

    def pull(self, columns: Float[Tensor, "batch column key"]) -> Float[Tensor, "batch column query"]:
        """Multiply columns over the keys with the transposed map."""
        return columns @ self.head_mean.mT

    def compute_row_sums(self) -> Float[Tensor, "batch 1 query"]:
        """Return the sum of each row of the map."""
        return self.head_mean.sum(-1)[:, None]


@dataclass(frozen=True)
class DeferredMap(StreamMap):
    """The map of a tiled call, which is never materialised: products with it are reductions by the kernel.

    Attributes:
        deferred_call: The call, with the tensors that reductions are recomputed from.
        quantity: Attention, or the positive part of attention times gradient.
        heads: The selected heads; None for all.
        query_mask: One for queries that count, zero for others; None if the others have no relevance anyway.
    """

    deferred_call: DeferredCall
    quantity: MapQuantity
    heads: Sequence[int] | None
    query_mask: Float[Tensor, "batch 1 query"] | None

    def push(self, rows: Float[Tensor, "batch row query"]) -> Float[Tensor, "batch row key"]:
        """Multiply rows over the queries with the map, in a pass of the kernel."""
        return self._reduce(row_weights=self._apply_query_mask(rows)).sum(1).to(rows)

    def pull(self, columns: Float[Tensor, "batch column key"]) -> Float[Tensor, "batch column query"]:
        """Multiply columns over the keys with the transposed map, in a pass of the kernel."""
        return self._apply_query_mask(self._reduce(column_weights=columns).sum(1).to(columns))

    def compute_row_sums(self) -> Float[Tensor, "batch 1 query"]:
        """Return the sum of each row, averaged over heads; zero for masked queries."""
        return self._apply_query_mask(self._reduce().mean(1, keepdim=True).to(self.head_mean))

    def _reduce(self, row_weights: Tensor | None = None, column_weights: Tensor | None = None) -> Tensor:
        """Compute one reduction of the call; `MapReduction` documents the axes of the result."""
        reduction = MapReduction(self.quantity, row_weights, self.heads, column_weights)
        return self.deferred_call.reduce([reduction])[0]

    def _apply_query_mask(self, rows: Float[Tensor, "batch some query"]) -> Float[Tensor, "batch some query"]:
        """Set the entries of masked queries to zero."""
        if self.query_mask is None:
            return rows
        return rows * self.query_mask


def build_stream_map(method: CrossStreamMethod, call: AttentionCall, head_mean: StreamMatrix) -> StreamMap:
    """Return the map of a call whose attention is materialised."""
    return StreamMap(call.query_stream, call.key_stream, head_mean, *_find_tower_and_group(method, call))


def build_deferred_map(
    method: CrossStreamMethod,
    call: AttentionCall,
    quantity: MapQuantity,
    query_mask: Float[Tensor, "batch 1 query"] | None = None,
) -> DeferredMap:
    """Return the map of a tiled call, whose attention is not materialised."""
    readout = method.unit_contexts[call.query_stream].readout
    empty = readout.new_empty(len(readout), 0, 0)
    assert call.deferred is not None
    return DeferredMap(
        call.query_stream,
        call.key_stream,
        empty,
        *_find_tower_and_group(method, call),
        call.deferred,
        quantity,
        method.heads,
        query_mask,
    )


def _find_tower_and_group(method: CrossStreamMethod, call: AttentionCall) -> tuple[bool, str | None]:
    """Return whether the call is in a residual tower, and its block."""
    return call.module in method.residual_towers, method.simultaneous_groups.get(call.module)


def is_unidirectional(method: CrossStreamMethod) -> bool:
    """Whether every stream that is attended to attends to itself only (encoder–decoders), and calls are sequential."""
    attended_streams = {key_stream for query_stream, key_stream in method.layers if query_stream != key_stream}
    return not (
        method.residual_towers
        or method.simultaneous_groups
        or any(
            query_stream in attended_streams and query_stream != key_stream
            for query_stream, key_stream in method.layers
        )
    )


def iter_simultaneous_maps(stream_maps: Sequence[StreamMap]) -> Iterator[list[StreamMap]]:
    """Group the maps of simultaneous calls: those of a block, and those of two streams that attend to each other.

    Args:
        stream_maps: The maps from the last call to the first, as methods process them.

    Yields:
        Groups of maps in the order of the forward pass.
    """
    step: list[StreamMap] = []
    for stream_map in reversed(stream_maps):
        if step and not _is_simultaneous(step, stream_map):
            yield step
            step = []
        step.append(stream_map)
    yield step


def _is_simultaneous(step: Sequence[StreamMap], following: StreamMap) -> bool:
    """Whether a map belongs to the same group as the maps of `step`."""
    last = step[-1]
    if last.simultaneous_group is not None:
        return last.simultaneous_group == following.simultaneous_group
    mutual = last.query_stream != last.key_stream and (last.query_stream, last.key_stream) == (
        following.key_stream,
        following.query_stream,
    )
    return mutual and len(step) == 1  # a third map between the same streams belongs to the next layer
