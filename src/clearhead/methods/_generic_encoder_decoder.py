"""Generic Attention for encoder–decoders by products with rows and columns, without relevance matrices.

It applies if each stream that is attended to attends to itself only. With u_k the read-out row, pushed down to the k-th
call in which s attends to q, the rules of `generic_cross_attention.py` give

    r_s = w · R̂_ss,     r_q = Σ_k u_k · R̄_ssᵀ Ā_k R̄_qq          u_k = w (I + Ā_L) ⋯,  all layers of s above k

with R̄_ss and R̄_qq as they are at k. A row times R is pushed from the last layer to the first. R times a column is
pulled from the first layer to the last; this gives the transpose, and the row sums R̂ · 1 that R̄ is divided by. No
matrix of units × units is built, and in a tiled pass no attention map of this size either.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods._stream_maps import StreamMap
from clearhead.methods.base import UnitContext

RelevanceRows = Float[Tensor, "batch row unit"]


def compute_rows_by_stream(
    stream_maps: Sequence[StreamMap], unit_contexts: Mapping[str, UnitContext], readout_streams: Sequence[str]
) -> dict[str, RelevanceRows]:
    """Return the scores of the units of every stream.

    Args:
        stream_maps: The maps in the order of the forward pass.
        unit_contexts: The unit context of each stream.
        readout_streams: The streams that have a read-out position.
    """
    rows = {stream: torch.zeros_like(unit_context.readout) for stream, unit_context in unit_contexts.items()}
    for readout_stream in readout_streams:
        for stream, stream_rows in _compute_readout_rows(stream_maps, unit_contexts, readout_stream).items():
            rows[stream] = rows[stream] + stream_rows
    return rows


def _compute_readout_rows(
    maps: Sequence[StreamMap], unit_contexts: Mapping[str, UnitContext], stream: str
) -> dict[str, RelevanceRows]:
    """Return the relevance of the units of `stream`, and of the streams it attends to, for its own read-out rows."""
    readout = unit_contexts[stream].readout
    self_rows, rows_at_cross_calls = _push_rows(maps, stream, {len(maps): readout})
    if not rows_at_cross_calls:
        return {stream: self_rows}
    # one pass over the maps for the row sums (a column of ones) and for every u_k
    columns = torch.cat([torch.ones_like(readout[:, :1]), *rows_at_cross_calls.values()], 1)
    pulled = _pull_columns(maps, stream, columns)
    cross_rows: dict[str, dict[int, RelevanceRows]] = {}
    for k, (call_index, row) in enumerate(rows_at_cross_calls.items()):
        row_sums = pulled[call_index][:, :1]
        pulled_row = pulled[call_index][:, k + 1 : k + 2]  # across streams there is a single read-out row
        cross_rows.setdefault(maps[call_index].key_stream, {})[call_index] = maps[call_index].push(
            _divide_by_row_sums(pulled_row, row_sums) + row
        )
    totals: dict[str, RelevanceRows] = {stream: self_rows}
    for key_stream, rows in cross_rows.items():
        key_sums = _pull_columns(maps, key_stream, torch.ones_like(unit_contexts[key_stream].readout[:, :1]))
        entering = {call_index: _divide_by_row_sums(row, key_sums[call_index]) for call_index, row in rows.items()}
        totals[key_stream] = torch.stack([*rows.values(), _push_rows(maps, key_stream, entering)[0]]).sum(0)
    return totals


def _push_rows(
    maps: Sequence[StreamMap], stream: str, entering: Mapping[int, RelevanceRows]
) -> tuple[RelevanceRows, dict[int, RelevanceRows]]:
    """Multiply rows with R̂ of a stream.

    Args:
        maps: The maps in the order of the forward pass.
        stream: The stream of the rows.
        entering: Rows by the index of the call below which they start; `len(maps)` for the top.

    Returns:
        The product, and the rows as they arrive at each call in which the stream attends to another one.
    """
    rows_at_cross_calls: dict[int, RelevanceRows] = {}
    entered = accumulated = torch.zeros_like(next(iter(entering.values())))
    for call_index in range(len(maps), -1, -1):
        if call_index in entering:
            entered = entered + entering[call_index]
        if call_index < len(maps) and maps[call_index].query_stream == stream:
            if maps[call_index].key_stream == stream:
                accumulated = accumulated + maps[call_index].push(entered + accumulated)
            else:
                rows_at_cross_calls[call_index] = entered + accumulated
    return accumulated, rows_at_cross_calls


def _pull_columns(maps: Sequence[StreamMap], stream: str, columns: RelevanceRows) -> dict[int, RelevanceRows]:
    """Multiply R̂ of a stream with columns, for R̂ as it is before each call between streams."""
    columns_at_cross_calls: dict[int, RelevanceRows] = {}
    accumulated = torch.zeros_like(columns)
    for call_index, stream_map in enumerate(maps):
        if stream_map.query_stream == stream_map.key_stream == stream:
            accumulated = accumulated + stream_map.pull(columns + accumulated)
        elif stream_map.query_stream != stream_map.key_stream:
            columns_at_cross_calls[call_index] = accumulated
    return columns_at_cross_calls


def _divide_by_row_sums(rows: RelevanceRows, sums: Float[Tensor, "batch 1 unit"]) -> RelevanceRows:
    """Divide rows of R̂ by their sums; rows of zeros, such as those of padding, stay zero."""
    return rows / torch.where(sums == 0, 1, sums)
