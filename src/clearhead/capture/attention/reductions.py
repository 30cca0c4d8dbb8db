"""`MapReduction`: rows × map, map × columns or row sums, which kernels compute without materialising the map."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.capture.tape import AttentionCall


@dataclass(frozen=True)
class MapReduction:
    """Row vectors times the maps M of one call, M times column vectors, or, without either, row sums of M.

    The result is batch × head × row × key (`push_rows`), batch × head × column × query (`pull_columns`), or
    batch × head × query (row sums over keys).

    Attributes:
        quantity: M is (A ⊙ ∂y/∂A)⁺ ("positive"), A ⊙ ∂y/∂A ("product"), or A ("attention"), head by head.
        row_weights: Row vectors that are multiplied with M from the left.
        heads: The selected heads; None for all.
        column_weights: Column vectors that M is multiplied with from the right.
        has_negative_rows: Whether row vectors may have negative entries, for which kernels need a second pass.
    """

    quantity: Literal["positive", "product", "attention"]
    row_weights: Float[Tensor, "batch row query"] | None = None
    heads: Sequence[int] | None = None
    column_weights: Float[Tensor, "batch column key"] | None = None
    has_negative_rows: bool = True

    def select_samples(self, sample_slice: slice, device: torch.device) -> "MapReduction":
        """Return the reduction with the weights of some samples, on the device of their maps.

        Args:
            sample_slice: The samples, as a slice of the first axis of the weights.
            device: Device of the maps.

        Returns:
            A copy with the weights of these samples.
        """

        def select(weights: Tensor | None) -> Tensor | None:
            return None if weights is None else weights[sample_slice].to(device)

        return replace(self, row_weights=select(self.row_weights), column_weights=select(self.column_weights))

    def reduce_tile(self, call: AttentionCall, query_slice: slice, total_queries: int) -> Tensor:
        """Reduce the given maps of one tile; a result per query is padded to all queries, so that tiles add up.

        Args:
            call: Maps of the tile, with the selected heads only.
            query_slice: Queries of the tile.
            total_queries: Number of queries of the full map.

        Returns:
            Row vectors times the maps (batch, head or 1, row, key), or one value per query (batch, head, query).
        """
        maps = self.compute_maps(call)
        if self.row_weights is not None:
            return push_rows(self.row_weights[:, :, query_slice], maps)
        if self.column_weights is not None:
            per_query = pull_columns(self.column_weights, maps)
        else:
            per_query = maps.sum(3)
        return pad(per_query, (query_slice.start, total_queries - query_slice.stop))

    def compute_maps(self, call: AttentionCall) -> Float[Tensor, "batch head query key"]:
        """Return the maps M of a call: its attention, or the product with its gradient.

        Args:
            call: A call with its attention, and with its gradient for the product.

        Returns:
            A, A ⊙ ∂y/∂A, or its positive part, as `quantity` names it.
        """
        if self.quantity == "positive":
            return call.positive_product
        assert call.attention is not None
        if self.quantity == "attention":
            return call.attention
        assert call.attention_gradient is not None
        return call.attention * call.attention_gradient


def push_rows(
    rows: Float[Tensor, "batch row query"], maps: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head_or_1 row key"]:
    """Multiply row vectors with the maps, divided by the number of heads: the sum over heads is r · E_h[maps].

    One row gives a result per head, which costs nothing extra; several rows are multiplied with the mean map, and the
    head axis has length one.

    Args:
        rows: The row vectors r.
        maps: The maps, one per head.

    Returns:
        The products: per head for one row, summed over heads for several.
    """
    if rows.shape[1] == 1:
        return (rows[:, None] @ maps) / maps.shape[1]
    return (rows @ maps.mean(1))[:, None]


def pull_columns(
    columns: Float[Tensor, "batch column key"], maps: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head_or_1 column query"]:
    """Multiply the maps with column vectors, as `push_rows` does with rows: the sum over heads is E_h[maps] · c."""
    if columns.shape[1] == 1:
        return (columns[:, None] @ maps.mT) / maps.shape[1]
    return (columns @ maps.mean(1).mT)[:, None]
