"""Generic Attention by rows and columns, where streams that are looked at look at themselves alone (encoder–decoders).

With u_k the row that is read, pushed down to the k-th call in which s looks at q, the rules of
`generic_cross_attention.py` give

    r_s = w · R̂_ss,     r_q = Σ_k u_k · R̄_ssᵀ Ā_k R̄_qq          u_k = w (I + Ā_L) ⋯,  all layers of s above k

with R̄_ss and R̄_qq as they are at k. A row times R is pushed from its last layer to its first; R times a column (the
transpose; the sums of rows, which R̄ is divided by, are R̂ · 1) is pulled from the first to the last. So nothing is made
of units × units, and in a streaming pass there is no such map either.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.methods._stream_maps import Map
from clearhead.methods.base import Frame

Rows = Float[Tensor, "batch row unit"]


def rows_by_stream(maps: Sequence[Map], frames: Mapping[str, Frame], speaking: Sequence[str]) -> dict[str, Rows]:
    """The scores of every stream's units, from maps in the order of the pass."""
    rows = {stream: torch.zeros_like(frame.readout) for stream, frame in frames.items()}
    for stream in speaking:
        for name, part in _read(maps, frames, stream).items():
            rows[name] = rows[name] + part
    return rows


def _read(maps: Sequence[Map], frames: Mapping[str, Frame], s: str) -> dict[str, Rows]:
    """What the rows that are read of one stream find in it, and in those that it looks at."""
    read = frames[s].readout
    found, reaching = _pushed(maps, s, {len(maps): read})
    if not reaching:
        return {s: found}
    # what rows are divided by, and every u_k, in one go
    columns = torch.cat([torch.ones_like(read[:, :1]), *reaching.values()], 1)
    pulled = _pulled(maps, s, columns)
    met: dict[str, dict[int, Rows]] = {}
    for k, (place, row) in enumerate(reaching.items()):
        sums, own = pulled[place][:, :1], pulled[place][:, k + 1 : k + 2]  # across streams, one row is read
        met.setdefault(maps[place].seen, {})[place] = maps[place].push(_divided(own, sums) + row)
    totals: dict[str, Rows] = {s: found}
    for q, rows in met.items():
        sums_of_q = _pulled(maps, q, torch.ones_like(frames[q].readout[:, :1]))
        entering = {place: _divided(row, sums_of_q[place]) for place, row in rows.items()}
        totals[q] = torch.stack([*rows.values(), _pushed(maps, q, entering)[0]]).sum(0)
    return totals


def _pushed(maps: Sequence[Map], stream: str, entering: Mapping[int, Rows]) -> tuple[Rows, dict[int, Rows]]:
    """Rows that enter before these calls (`len(maps)`: after the last), times R̂ of the stream; and, at each call in
    which it looks at another, the rows as they come there."""
    reaching: dict[int, Rows] = {}
    entered = gathered = torch.zeros_like(next(iter(entering.values())))
    for place in range(len(maps), -1, -1):
        entered = entered + entering[place] if place in entering else entered
        if place < len(maps) and maps[place].looks == stream:
            if maps[place].seen == stream:
                gathered = gathered + maps[place].push(entered + gathered)
            else:
                reaching[place] = entered + gathered
    return gathered, reaching


def _pulled(maps: Sequence[Map], stream: str, columns: Rows) -> dict[int, Rows]:
    """R̂ of the stream, as it is before each call between streams, times columns."""
    found: dict[int, Rows] = {}
    gathered = torch.zeros_like(columns)
    for place, one in enumerate(maps):
        if one.looks == one.seen == stream:
            gathered = gathered + one.pull(columns + gathered)
        elif one.looks != one.seen:
            found[place] = gathered
    return found


def _divided(rows: Rows, sums: Float[Tensor, "batch 1 unit"]) -> Rows:
    """Rows of R̂ are divided by their sums; zeros, such as padding's, stay zero."""
    return rows / torch.where(sums == 0, 1, sums)
