"""Triton kernels: the gradients of attention, fused with the push of one row, which needs the same two maps.

    A = exp(Q Kᵀ s − lse),     G = dO Vᵀ,     push[h, j] = Σ_i w[i] (A ⊙ G)⁺[i, j]
    dV = Aᵀ dO,     dS = A ⊙ (G − δ),     dK = s dSᵀ Q,     dQ = s dS K,     δ_i = Σ dO_i ⊙ O_i

There are two loops: one kernel owns keys and computes dK, dV and their push (four products), the other owns queries and
computes dQ (three products). No other program writes the results of a block: there are no atomics, and results are
bit-identical in every run.

Owned vectors are loaded once, through pointers. The vectors of the loop are loaded through tensor descriptors of the
matrix whose row stride is that of the vectors of one head: in every supported layout, a head is some rows of it, from
some column on. An incomplete last block starts earlier, so that nothing of another head is read, and skips what the
block before it had: there must be at least as many tokens as a block has. Scores and lse are in units of log₂ e,
because the hardware has exp2.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: Arguments whose values do not make code faster are not specialised, so that few unvalidated kernels run.
DESCRIPTOR_STRIDE_SUFFIXES = ("batch", "down", "across")
HEAD_COUNT_PARAMETERS = ["shared", "group"]


@triton.jit
def _load_owned_rows(source, batch, head, first, tokens, batch_stride, head_stride, row_stride,
           OWN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Load the vectors that a program owns; zeros after the last one."""
    at = first.to(tl.int64) + tl.arange(0, OWN)
    offsets = batch * batch_stride + head.to(tl.int64) * head_stride + at[:, None] * row_stride
    return tl.load(source + offsets + tl.arange(0, WIDE)[None, :], mask=at[:, None] < tokens, other=0.0)


@triton.jit(do_not_specialize=["heads"])
def row_statistics_kernel(
    output, gradient, lse, levels, delta, output_batch, output_head, output_row,
    gradient_batch, gradient_head, gradient_row, heads, tokens, OWN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute δ_i, and lse in units of log₂ e; each has the shape batch head query."""
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    first = tl.program_id(0) * OWN
    o = _load_owned_rows(output, batch, head, first, tokens, output_batch, output_head, output_row, OWN, WIDE)
    d = _load_owned_rows(gradient, batch, head, first, tokens, gradient_batch, gradient_head, gradient_row, OWN, WIDE)
    at = first + tl.arange(0, OWN)
    offsets = batch_head.to(tl.int64) * tokens + at
    tl.store(delta + offsets, tl.sum(o.to(tl.float32) * d.to(tl.float32), 1), mask=at < tokens)
    tl.store(levels + offsets, tl.load(lse + offsets, mask=at < tokens) * LOG2E, mask=at < tokens)


@triton.jit
def _accumulate_over_queries(
    dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
    levels, delta, weights, lo, hi, tokens, scale,
    OTHER: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries from lo to hi to the owned keys.

    Cells are key × query, so that Aᵀ and dSᵀ go from registers to the tensor cores without a transposition.
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
        grad_attention = tl.dot(v, tl.trans(d))
        mean = tl.load(delta + at)
        weight = tl.load(weights + at)
        product = cells * grad_attention
        sums += tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)
        ds = (product - cells * mean[None, :]).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    return dk, dv, sums


@triton.jit(
    do_not_specialize=[f"{name}_{suffix}" for name in ("query", "gradient") for suffix in DESCRIPTOR_STRIDE_SUFFIXES]
    + HEAD_COUNT_PARAMETERS
)
def key_gradient_kernel(
    query, key, value, gradient, levels, delta, weights, dk_out, dv_out, push,
    query_batch, query_down, query_across, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_down, gradient_across, shared, group, tokens, scale,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """dK, dV (batch token head width) and the push (batch head key) of a block of keys, from all heads that share them.

    query, gradient: descriptors. Their _batch and _down are the row offsets of the next sample and the next head, and
    _across the column offset of the next head. AHEAD: by how many blocks lse, δ and weights are prefetched; None: not.
    """
    sample = tl.program_id(1) // shared
    owner = tl.program_id(1) % shared
    batch = sample.to(tl.int64)
    first = tl.program_id(0) * OWN  # most queries see the first keys: the longest loops start first
    at_key = first + tl.arange(0, OWN)
    k = _load_owned_rows(key, batch, owner, first, tokens, key_batch, key_head, key_row, OWN, WIDE)
    v = _load_owned_rows(value, batch, owner, first, tokens, value_batch, value_head, value_row, OWN, WIDE)
    dk = tl.zeros([OWN, WIDE], tl.float32)
    dv = tl.zeros([OWN, WIDE], tl.float32)
    # Three ranges of queries: those that see some of the keys, those that see all, and an incomplete block.
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
        row_offset = (batch * shared * group + head) * tokens
        sums = tl.zeros([OWN], tl.float32)
        if CAUSAL:
            dk, dv, sums = _accumulate_over_queries(
                dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
                levels + row_offset, delta + row_offset, weights + batch * tokens, lo, lo_full, tokens, scale,
                OTHER, True, RAGGED, AHEAD,
            )  # fmt: skip
        dk, dv, sums = _accumulate_over_queries(
            dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
            levels + row_offset, delta + row_offset, weights + batch * tokens, lo_full, hi_full, tokens, scale,
            OTHER, False, False, AHEAD,
        )  # fmt: skip
        if RAGGED:
            dk, dv, sums = _accumulate_over_queries(
                dk, dv, sums, k, v, at_key, query, query_at, query_column, gradient, gradient_at, gradient_column,
                levels + row_offset, delta + row_offset, weights + batch * tokens, hi_full, tokens, tokens, scale,
                OTHER, False, True, AHEAD,
            )  # fmt: skip
        tl.store(push + row_offset + at_key, sums, mask=at_key < tokens)
    offsets = ((batch * tokens + at_key[:, None]) * shared + owner) * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(dk_out + offsets, (dk * (scale / LOG2E)).to(k.dtype), mask=at_key[:, None] < tokens)
    tl.store(dv_out + offsets, dv.to(v.dtype), mask=at_key[:, None] < tokens)


@triton.jit
def _accumulate_over_keys(
    dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at, value_column, lo, hi, tokens, scale,
    OTHER: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys from lo to hi to the owned queries."""
    for start in tl.range(lo, hi, OTHER):
        begin = start
        if RAGGED:
            begin = tl.minimum(start, tokens - OTHER)
        k = key.load([key_at + begin, key_column])
        v = value.load([value_at + begin, value_column])
        scores = tl.dot(q, tl.trans(k))
        grad_attention = tl.dot(d, tl.trans(v))
        cells = tl.exp2(scores * scale - level[:, None])
        at = begin + tl.arange(0, OTHER)
        if RAGGED:
            cells = tl.where(at[None, :] < start, 0.0, cells)
        if CAUSAL:
            cells = tl.where(at[None, :] > at_query[:, None], 0.0, cells)
        ds = (cells * (grad_attention - mean[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    return dq


@triton.jit(
    do_not_specialize=[f"{name}_{suffix}" for name in ("key", "value") for suffix in DESCRIPTOR_STRIDE_SUFFIXES]
    + HEAD_COUNT_PARAMETERS
)
def query_gradient_kernel(
    query, key, value, gradient, levels, delta, dq_out,
    query_batch, query_head, query_row, key_batch, key_down, key_across, value_batch, value_down, value_across,
    gradient_batch, gradient_head, gradient_row, shared, group, tokens, scale,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """dQ (batch token head width) of a block of queries. key, value: descriptors as in `key_gradient_kernel`."""
    batch_head = tl.program_id(1)
    heads = shared * group
    sample = batch_head // heads
    head = batch_head % heads
    batch = sample.to(tl.int64)
    first = tl.program_id(0) * OWN
    if CAUSAL:  # the last queries see most keys: the longest loops start first
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    at_query = first + tl.arange(0, OWN)
    is_valid = at_query < tokens
    q = _load_owned_rows(query, batch, head, first, tokens, query_batch, query_head, query_row, OWN, WIDE)
    d = _load_owned_rows(gradient, batch, head, first, tokens, gradient_batch, gradient_head, gradient_row, OWN, WIDE)
    row_offset = batch_head.to(tl.int64) * tokens
    level = tl.load(levels + row_offset + at_query, mask=is_valid, other=float("inf"))
    mean = tl.load(delta + row_offset + at_query, mask=is_valid, other=0.0)
    owner = head // group
    key_at, key_column = sample * key_batch + owner * key_down, owner * key_across
    value_at, value_column = sample * value_batch + owner * value_down, owner * value_across
    hi, hi_full = tokens, tokens // OTHER * OTHER
    if CAUSAL:
        hi = tl.minimum(tokens, first + OWN)
        hi_full = tl.minimum(hi_full, first // OTHER * OTHER)
    dq = tl.zeros([OWN, WIDE], tl.float32)
    dq = _accumulate_over_keys(dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at,
                     value_column, 0, hi_full, tokens, scale, OTHER, False, False)  # fmt: skip
    if CAUSAL or RAGGED:
        dq = _accumulate_over_keys(dq, q, d, level, mean, at_query, key, key_at, key_column, value, value_at,
                         value_column, hi_full, hi, tokens, scale, OTHER, CAUSAL, RAGGED)  # fmt: skip
    offsets = ((batch * tokens + at_query[:, None]) * heads + head) * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(dq_out + offsets, (dq * (scale / LOG2E)).to(q.dtype), mask=is_valid[:, None])
