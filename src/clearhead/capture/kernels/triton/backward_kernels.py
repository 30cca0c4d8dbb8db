"""Triton kernels: the gradients of attention, and the row push, which needs the same two maps.

    A = exp(Q Kᵀ s − lse),     G = dO Vᵀ,     push[h, j] = Σ_i w[i] (A ⊙ G)⁺[i, j]
    dV = Aᵀ dO,     dS = A ⊙ (G − δ),     dK = s dSᵀ Q,     dQ = s dS K,     δ_i = Σ dO_i ⊙ O_i

Two walks: one kernel owns keys and makes dK, dV and the push of them (four products), the other owns queries and makes
dQ (three). Nobody else writes what a program owns: there are no atomics, and the same input gives the same bytes.

What is owned is read once, through pointers; what is walked along comes through tensor descriptors, of the matrix whose
rows are as far apart as the vectors of one head: wherever a head lies, it is some rows of it, from some column on. A
last block that would not be whole begins earlier, so that nothing of another head is read, and leaves out what the one
before it had: there must be as many tokens as a block has. Scores and lse are in units of log₂ e here, because exp2 is
what the hardware has.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: What makes no code faster by being known is not compiled for, so that few kernels run that were not proven.
CORNERS = ("batch", "down", "across")
COUNTS = ["shared", "group"]


@triton.jit
def _owned(source, batch, head, first, tokens, batch_stride, head_stride, row_stride,
           OWN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The vectors that a program owns; zeros beyond the last one."""
    at = first.to(tl.int64) + tl.arange(0, OWN)
    place = batch * batch_stride + head.to(tl.int64) * head_stride + at[:, None] * row_stride
    return tl.load(source + place + tl.arange(0, WIDE)[None, :], mask=at[:, None] < tokens, other=0.0)


@triton.jit(do_not_specialize=["heads"])
def row_numbers(
    output, gradient, lse, levels, delta, output_batch, output_head, output_row,
    gradient_batch, gradient_head, gradient_row, heads, tokens, OWN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """δ_i, and lse in units of log₂ e; both batch head query."""
    both = tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), both % heads
    first = tl.program_id(0) * OWN
    o = _owned(output, batch, head, first, tokens, output_batch, output_head, output_row, OWN, WIDE)
    d = _owned(gradient, batch, head, first, tokens, gradient_batch, gradient_head, gradient_row, OWN, WIDE)
    at = first + tl.arange(0, OWN)
    place = both.to(tl.int64) * tokens + at
    tl.store(delta + place, tl.sum(o.to(tl.float32) * d.to(tl.float32), 1), mask=at < tokens)
    tl.store(levels + place, tl.load(lse + place, mask=at < tokens) * LOG2E, mask=at < tokens)


@triton.jit
def _along_queries(
    dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
    levels, delta, weights, lo, hi, tokens, scale,
    OTHER: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add what the queries from lo to hi have for the keys that are owned.

    Cells lie key by query, so that Aᵀ and dSᵀ go from the registers where they are made to the tensor cores.
    """
    for start in tl.range(lo, hi, OTHER, num_stages=AHEAD):
        begin = start
        if RAGGED:
            begin = tl.minimum(start, tokens - OTHER)
        at = begin + tl.arange(0, OTHER)
        q = query.load([query_at + begin, query_column])
        scores = tl.dot(k, tl.trans(q))
        level = tl.load(levels + at)
        if RAGGED:
            level = tl.where(at < start, float("inf"), level)
        cells = tl.exp2(scores * scale - level[None, :])
        if CAUSAL:
            cells = tl.where(at_key[:, None] > at[None, :], 0.0, cells)
        d = gradient.load([gradient_at + begin, gradient_column])
        dv = tl.dot(cells.to(d.dtype), d, dv)
        slope = tl.dot(v, tl.trans(d))
        mean = tl.load(delta + at)
        weight = tl.load(weights + at)
        product = cells * slope
        sums += tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)
        ds = (product - cells * mean[None, :]).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    return dk, dv, sums


@triton.jit(do_not_specialize=[f"{part}_{corner}" for part in ("query", "gradient") for corner in CORNERS] + COUNTS)
def keys_owned(
    query, key, value, gradient, levels, delta, weights, dk_out, dv_out, push,
    query_batch, query_down, query_across, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_down, gradient_across, shared, group, tokens, scale,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """dK, dV (batch token head width) and the push (batch head key) of a block of keys, from all heads that share them.

    query, gradient: descriptors; _batch, _down: how many rows further down the next sample and the next head start, and
    _across, how many columns. AHEAD: how many blocks ahead lse, δ and weights are fetched, too; None: they are not.
    """
    sample, owner = tl.program_id(1) // shared, tl.program_id(1) % shared
    batch = sample.to(tl.int64)
    first = tl.program_id(0) * OWN  # the first keys are seen by most queries: the longest walks start first
    at_key = first + tl.arange(0, OWN)
    k = _owned(key, batch, owner, first, tokens, key_batch, key_head, key_row, OWN, WIDE)
    v = _owned(value, batch, owner, first, tokens, value_batch, value_head, value_row, OWN, WIDE)
    dk = tl.zeros([OWN, WIDE], tl.float32)
    dv = tl.zeros([OWN, WIDE], tl.float32)
    # queries that see some of the keys, those that see all of them, and those of a block that is not whole
    lo, lo_full = 0, 0
    if CAUSAL:
        lo = first // OTHER * OTHER
        lo_full = tl.minimum(tl.cdiv(first + OWN, OTHER), tl.cdiv(tokens, OTHER)) * OTHER
    hi_full = tokens
    if RAGGED:
        hi_full = tl.maximum(tokens // OTHER * OTHER, lo_full)
    for member in range(group):
        head = owner * group + member
        query_at, query_column = sample * query_batch + head * query_down, head * query_across
        gradient_at, gradient_column = sample * gradient_batch + head * gradient_down, head * gradient_across
        numbers = (batch * shared * group + head) * tokens
        sums = tl.zeros([OWN], tl.float32)
        if CAUSAL:
            dk, dv, sums = _along_queries(
                dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
                levels + numbers, delta + numbers, weights + batch * tokens, lo, lo_full, tokens, scale,
                OTHER, True, RAGGED, AHEAD,
            )  # fmt: skip
        dk, dv, sums = _along_queries(
            dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
            levels + numbers, delta + numbers, weights + batch * tokens, lo_full, hi_full, tokens, scale,
            OTHER, False, False, AHEAD,
        )  # fmt: skip
        if RAGGED:
            dk, dv, sums = _along_queries(
                dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
                levels + numbers, delta + numbers, weights + batch * tokens, hi_full, tokens, tokens, scale,
                OTHER, False, True, AHEAD,
            )  # fmt: skip
        tl.store(push + numbers + at_key, sums, mask=at_key < tokens)
    place = ((batch * tokens + at_key[:, None]) * shared + owner) * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(dk_out + place, (dk * (scale / LOG2E)).to(k.dtype), mask=at_key[:, None] < tokens)
    tl.store(dv_out + place, dv.to(v.dtype), mask=at_key[:, None] < tokens)


@triton.jit
def _along_keys(
    dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at, value_column, lo, hi, tokens, scale,
    OTHER: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add what the keys from lo to hi have for the queries that are owned."""
    for start in tl.range(lo, hi, OTHER):
        begin = start
        if RAGGED:
            begin = tl.minimum(start, tokens - OTHER)
        k = key.load([key_at + begin, key_column])
        v = value.load([value_at + begin, value_column])
        scores = tl.dot(q, tl.trans(k))
        slope = tl.dot(d, tl.trans(v))
        cells = tl.exp2(scores * scale - level[:, None])
        at = begin + tl.arange(0, OTHER)
        if RAGGED:
            cells = tl.where(at[None, :] < start, 0.0, cells)
        if CAUSAL:
            cells = tl.where(at[None, :] > at_query[:, None], 0.0, cells)
        ds = (cells * (slope - mean[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    return dq


@triton.jit(do_not_specialize=[f"{part}_{corner}" for part in ("key", "value") for corner in CORNERS] + COUNTS)
def queries_owned(
    query, key, value, gradient, levels, delta, dq_out,
    query_batch, query_head, query_row, key_batch, key_down, key_across, value_batch, value_down, value_across,
    gradient_batch, gradient_head, gradient_row, shared, group, tokens, scale,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """dQ (batch token head width) of a block of queries. key, value: descriptors, as those of `keys_owned`."""
    both = tl.program_id(1)
    heads = shared * group
    sample, head = both // heads, both % heads
    batch = sample.to(tl.int64)
    first = tl.program_id(0) * OWN
    if CAUSAL:  # the last queries see most keys: the longest walks start first
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    at_query = first + tl.arange(0, OWN)
    there = at_query < tokens
    q = _owned(query, batch, head, first, tokens, query_batch, query_head, query_row, OWN, WIDE)
    d = _owned(gradient, batch, head, first, tokens, gradient_batch, gradient_head, gradient_row, OWN, WIDE)
    numbers = both.to(tl.int64) * tokens
    level = tl.load(levels + numbers + at_query, mask=there, other=float("inf"))
    mean = tl.load(delta + numbers + at_query, mask=there, other=0.0)
    owner = head // group
    key_at, key_column = sample * key_batch + owner * key_down, owner * key_across
    value_at, value_column = sample * value_batch + owner * value_down, owner * value_across
    hi, hi_full = tokens, tokens // OTHER * OTHER
    if CAUSAL:
        hi = tl.minimum(tokens, first + OWN)
        hi_full = tl.minimum(hi_full, first // OTHER * OTHER)
    dq = tl.zeros([OWN, WIDE], tl.float32)
    dq = _along_keys(dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at, value_column,
                     0, hi_full, tokens, scale, OTHER, False, False)  # fmt: skip
    if CAUSAL or RAGGED:
        dq = _along_keys(dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at, value_column,
                         hi_full, hi, tokens, scale, OTHER, CAUSAL, RAGGED)  # fmt: skip
    place = ((batch * tokens + at_query[:, None]) * heads + head) * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(dq_out + place, (dq * (scale / LOG2E)).to(q.dtype), mask=there[:, None])
