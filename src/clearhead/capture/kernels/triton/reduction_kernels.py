"""Sums over attention maps that are nowhere: tiles of them are made in registers, and only the sums leave the GPU.

    A = exp(Q Kᵀ s − lse),     G = ∂y/∂A = ∂y/∂O Vᵀ,     f = A, A ⊙ G or (A ⊙ G)⁺

    over queries:  out[h, j] = Σ_i w[i] f_h[i, j]       over keys:  out[h, i] = Σ_j f_h[i, j]
    heads joined:  out[r, j] = Σ_i w[r, i] E_h[f_h[i, j]]

A program owns a block of keys (or of queries) and walks along the others that are seen and have a weight. Nobody else
writes what it owns: there are no atomics, and the same input gives the same bytes. Sums are in float32; half-precision
operands go to the tensor cores as they are, float32 ones as three products of tf32.

*Own* is what a program owns, *other* what it walks along: keys and queries in one direction, queries and keys in the
other. Scores and lse are in units of log₂ e here, because exp2 is what the hardware has.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounds(
    first, last, queries, keys, offset, window, start, stop,
    OTHER: tl.constexpr, KEYS_OWN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Where to walk, beside what is owned (first to last): all of it, and inside it the part where nothing is hidden.

    A query at i sees keys up to i + offset (causal), and none at or before i + offset − window.
    """
    lo, hi = start, stop
    if KEYS_OWN:
        lo_full, hi_full = lo, tl.minimum(hi, queries)
        if CAUSAL:
            lo = tl.maximum(lo, first - offset)
            lo_full = tl.maximum(lo_full, last - offset)
        if WINDOW:
            hi = tl.minimum(hi, last - offset + window)
            hi_full = tl.minimum(hi_full, first - offset + window)
    else:
        lo_full, hi_full = lo, tl.minimum(hi, keys)
        if CAUSAL:
            hi = tl.minimum(hi, last + offset + 1)
            hi_full = tl.minimum(hi_full, first + offset + 1)
        if WINDOW:
            lo = tl.maximum(lo, first + offset - window + 1)
            lo_full = tl.maximum(lo_full, last + offset - window + 1)
    lo = tl.maximum(lo, 0) // OTHER * OTHER
    hi = tl.maximum(hi, lo)
    lo_full = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(lo_full, 0), OTHER) * OTHER, lo), tl.cdiv(hi, OTHER) * OTHER)
    hi_full = tl.maximum(tl.maximum(hi_full, 0) // OTHER * OTHER, lo_full)
    return lo, lo_full, hi_full, hi


@triton.jit
def _hidden(at_query, at_key, queries, keys, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Cells beyond the map, and cells that are not seen."""
    hidden = (at_query >= queries) | (at_key >= keys)
    if CAUSAL:
        hidden = hidden | (at_key > at_query + offset)
    if WINDOW:
        hidden = hidden | (at_key <= at_query + offset - window)
    return hidden


@triton.jit
def _masked(scores, mask, at_query, at_key, queries, keys, mask_query, mask_key, MASK: tl.constexpr):
    """Scores under a mask that is read cell by cell: of truth ("seen"), or of numbers that are added ("added")."""
    inside = (at_query < queries) & (at_key < keys)
    place = mask + at_query.to(tl.int64) * mask_query + at_key.to(tl.int64) * mask_key
    if MASK == "seen":
        scores = tl.where(tl.load(place, mask=inside, other=0) != 0, scores, float("-inf"))
    else:
        scores += tl.load(place, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return scores


@triton.jit
def _rows_of(base, at, count, stride, width, WIDE: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """The vectors at these places; zeros beyond the last one, and beyond their width."""
    along = tl.arange(0, WIDE)
    place = base + at[:, None] * stride + along[None, :]
    if EDGE:
        if WIDE == WIDTH:
            return tl.load(place, mask=at[:, None] < count, other=0.0)
        return tl.load(place, mask=(at[:, None] < count) & (along[None, :] < width), other=0.0)
    if WIDE == WIDTH:
        return tl.load(place)
    return tl.load(place, mask=along[None, :] < width, other=0.0)


@triton.jit
def _walk(
    sums, own_a, own_b, own_lse, own_at, other_a, other_b, lse, mask,
    lo, hi, queries, keys, offset, window, scale, width, value_width,
    other_a_row, other_b_row, mask_query, mask_key,
    OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEYS_OWN: tl.constexpr, EDGE: tl.constexpr, OF: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the sums of what is owned the cells of the others from lo to hi."""
    count = queries if KEYS_OWN else keys
    for start in range(lo, hi, OTHER):
        at = start + tl.arange(0, OTHER)
        a = _rows_of(other_a, at, count, other_a_row, width, WIDE, WIDTH, EDGE)
        scores = tl.dot(own_a, tl.trans(a), input_precision=PRECISION) * scale
        at_query = at[None, :] if KEYS_OWN else own_at[:, None]
        at_key = own_at[:, None] if KEYS_OWN else at[None, :]
        if MASK != "none":
            scores = _masked(scores, mask, at_query, at_key, queries, keys, mask_query, mask_key, MASK)
        if EDGE:
            hidden = _hidden(at_query, at_key, queries, keys, offset, window, CAUSAL, WINDOW)
            scores = tl.where(hidden, float("-inf"), scores)
        if KEYS_OWN:
            if EDGE:
                other_lse = tl.load(lse + at, mask=at < count, other=float("inf")) * LOG2E
            else:
                other_lse = tl.load(lse + at) * LOG2E
            cells = tl.exp2(scores - other_lse[None, :])
        else:
            cells = tl.exp2(scores - own_lse[:, None])
        if OF != "attention":
            b = _rows_of(other_b, at, count, other_b_row, value_width, VALUE_WIDE, VALUE_WIDTH, EDGE)
            gradient = tl.dot(own_b, tl.trans(b), input_precision=PRECISION)
            if OF == "positive":
                gradient = tl.maximum(gradient, 0.0)
            cells = cells * gradient
        sums += tl.sum(cells, 1)
    return sums


@triton.jit
def sums_apart(
    query, key, value, gradient, lse, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width, value_width,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEYS_OWN: tl.constexpr, OF: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sum for each key (or query) of each head. lse: batch head query, less the log of its weight."""
    both = tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), both % heads
    query += batch * query_batch + head * query_head
    gradient += batch * gradient_batch + head * gradient_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    lse += both.to(tl.int64) * queries
    mask += batch * mask_batch + head * mask_head
    if KEYS_OWN:
        block = tl.program_id(0)  # the first keys are seen by most queries: the longest walks start first
        own, own_a, own_b, other_a, other_b = keys, key, value, query, gradient
        own_a_row, own_b_row, other_a_row, other_b_row = key_row, value_row, query_row, gradient_row
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        own, own_a, own_b, other_a, other_b = queries, query, gradient, key, value
        own_a_row, own_b_row, other_a_row, other_b_row = query_row, gradient_row, key_row, value_row
    first = block * OWN
    at = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, own) - 1
    start, stop = tl.load(span + 2 * batch), tl.load(span + 2 * batch + 1)
    lo, lo_full, hi_full, hi = _bounds(
        first, last, queries, keys, offset, window, start, stop, OTHER, KEYS_OWN, CAUSAL, WINDOW
    )
    a = _rows_of(own_a, at, own, own_a_row, width, WIDE, WIDTH, True)
    b = a
    if OF != "attention":
        b = _rows_of(own_b, at, own, own_b_row, value_width, VALUE_WIDE, VALUE_WIDTH, True)
    own_lse = tl.zeros([OWN], tl.float32)
    if not KEYS_OWN:
        own_lse = tl.load(lse + at, mask=at < own, other=float("inf")) * LOG2E
    sums = tl.zeros([OWN], tl.float32)
    # where some cells are hidden, where none is, and the rest: the middle is nearly all of it, and fast
    sums = _walk(sums, a, b, own_lse, at, other_a, other_b, lse, mask, lo, lo_full, queries, keys, offset,
                 window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, True, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    sums = _walk(sums, a, b, own_lse, at, other_a, other_b, lse, mask, lo_full, hi_full, queries, keys, offset,
                 window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, False, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    sums = _walk(sums, a, b, own_lse, at, other_a, other_b, lse, mask, hi_full, hi, queries, keys, offset,
                 window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, True, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    tl.store(out + both.to(tl.int64) * own + at, sums, mask=at < own)


@triton.jit
def sums_joined(
    query, key, value, gradient, lse, weights, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width, value_width, rows,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, OF: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Several sums for each key, of the mean of the heads. weights: batch row query."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * OWN
    at_own = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, keys) - 1
    at_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    start, stop = tl.load(span + 2 * batch), tl.load(span + 2 * batch + 1)
    lo, _, _, hi = _bounds(first, last, queries, keys, offset, window, start, stop, OTHER, True, CAUSAL, WINDOW)
    sums = tl.zeros([OWN, ROWS], tl.float32)
    for begin in range(lo, hi, OTHER):
        at = begin + tl.arange(0, OTHER)
        hidden = _hidden(at[None, :], at_own[:, None], queries, keys, offset, window, CAUSAL, WINDOW)
        joined = tl.zeros([OWN, OTHER], tl.float32)
        for head in range(heads):
            a = _rows_of(key + batch * key_batch + (head // group) * key_head, at_own, keys, key_row, width,
                         WIDE, WIDTH, True)  # fmt: skip
            q = _rows_of(query + batch * query_batch + head * query_head, at, queries, query_row, width,
                         WIDE, WIDTH, True)  # fmt: skip
            scores = tl.dot(a, tl.trans(q), input_precision=PRECISION) * scale
            if MASK != "none":
                scores = _masked(scores, mask + batch * mask_batch + head * mask_head, at[None, :], at_own[:, None],
                                 queries, keys, mask_query, mask_key, MASK)  # fmt: skip
            own_lse = tl.load(lse + (batch * heads + head) * queries + at, mask=at < queries, other=float("inf"))
            cells = tl.exp2(tl.where(hidden, float("-inf"), scores) - own_lse[None, :] * LOG2E)
            if OF != "attention":
                b = _rows_of(value + batch * value_batch + (head // group) * value_head, at_own, keys, value_row,
                             value_width, VALUE_WIDE, VALUE_WIDTH, True)  # fmt: skip
                d = _rows_of(gradient + batch * gradient_batch + head * gradient_head, at, queries, gradient_row,
                             value_width, VALUE_WIDE, VALUE_WIDTH, True)  # fmt: skip
                wished = tl.dot(b, tl.trans(d), input_precision=PRECISION)
                if OF == "positive":
                    wished = tl.maximum(wished, 0.0)
                cells = cells * wished
            joined += cells
        place = weights + (batch * rows + at_row[None, :]) * queries + at[:, None]
        weight = tl.load(place, mask=(at[:, None] < queries) & (at_row[None, :] < rows), other=0.0)
        sums += tl.dot(joined / heads, weight, input_precision=EXACT)
    place = out + (batch * rows + at_row[None, :]) * keys + at_own[:, None]
    tl.store(place, sums, mask=(at_own[:, None] < keys) & (at_row[None, :] < rows))


@triton.jit
def log_sums(
    query, key, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log Σ_j exp(q_i · k_j s) for each query of each head, for kernels that do not say it."""
    both = tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), both % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    mask += batch * mask_batch + head * mask_head
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    at_own = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, queries) - 1
    lo, _, _, hi = _bounds(first, last, queries, keys, offset, window, 0, keys, OTHER, False, CAUSAL, WINDOW)
    a = _rows_of(query, at_own, queries, query_row, width, WIDE, WIDTH, True)
    most = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    for begin in range(lo, hi, OTHER):
        at = begin + tl.arange(0, OTHER)
        b = _rows_of(key, at, keys, key_row, width, WIDE, WIDTH, True)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        if MASK != "none":
            scores = _masked(scores, mask, at_own[:, None], at[None, :], queries, keys, mask_query, mask_key, MASK)
        hidden = _hidden(at_own[:, None], at[None, :], queries, keys, offset, window, CAUSAL, WINDOW)
        scores = tl.where(hidden, float("-inf"), scores)
        highest = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
        total = total * tl.exp2(most - level) + tl.sum(tl.exp2(scores - level[:, None]), 1)
        most = highest
    seen = most > float("-inf")
    result = tl.where(seen, (most + tl.log2(tl.where(seen, total, 1.0))) / LOG2E, float("inf"))
    tl.store(out + both.to(tl.int64) * queries + at_own, result, mask=at_own < queries)
