"""Triton kernels: sums over attention maps that are never materialised; tiles of them exist in registers only.

    A = exp(Q Kᵀ s − lse),     G = ∂y/∂A = ∂y/∂O Vᵀ,     f = A, A ⊙ G or (A ⊙ G)⁺

    over queries:  out[h, j] = Σ_i w[i] f_h[i, j]       over keys:  out[h, i] = Σ_j f_h[i, j]
    heads joined:  out[r, j] = Σ_i w[r, i] E_h[f_h[i, j]]

A program owns a block of keys (or of queries) and loops over the queries (or keys) that are visible and have a weight.
No other program writes the results of its block: there are no atomics, and results are bit-identical in every run. Sums
are in float32; half-precision operands go to the tensor cores unchanged, float32 operands as three products of tf32.

`own` marks what a program owns, `other` what it loops over: keys and queries if keys are owned (`KEYS_OWN`), queries
and keys otherwise. Scores and lse are in units of log₂ e, because the hardware has exp2.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _compute_loop_bounds(
    first, last, queries, keys, offset, window, start, stop,
    OTHER: tl.constexpr, KEYS_OWN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The loop range for the owned positions first to last, and the range inside it where no cell is hidden.

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
def _find_hidden_cells(at_query, at_key, queries, keys, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Cells outside the map, and cells that causality or the window hides."""
    hidden = (at_query >= queries) | (at_key >= keys)
    if CAUSAL:
        hidden = hidden | (at_key > at_query + offset)
    if WINDOW:
        hidden = hidden | (at_key <= at_query + offset - window)
    return hidden


@triton.jit
def _apply_mask(scores, mask, at_query, at_key, queries, keys, mask_query, mask_key, MASK: tl.constexpr):
    """Apply a mask that is read cell by cell: Boolean ("seen"), or added to the scores ("added")."""
    is_inside = (at_query < queries) & (at_key < keys)
    pointers = mask + at_query.to(tl.int64) * mask_query + at_key.to(tl.int64) * mask_key
    if MASK == "seen":
        scores = tl.where(tl.load(pointers, mask=is_inside, other=0) != 0, scores, float("-inf"))
    else:
        scores += tl.load(pointers, mask=is_inside, other=0.0).to(tl.float32) * LOG2E
    return scores


@triton.jit
def _load_rows(base, at, count, stride, width, WIDE: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """Load the vectors at these positions; zeros after the last one, and beyond their width."""
    columns = tl.arange(0, WIDE)
    pointers = base + at[:, None] * stride + columns[None, :]
    if EDGE:
        if WIDE == WIDTH:
            return tl.load(pointers, mask=at[:, None] < count, other=0.0)
        return tl.load(pointers, mask=(at[:, None] < count) & (columns[None, :] < width), other=0.0)
    if WIDE == WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < width, other=0.0)


@triton.jit
def _accumulate_sums(
    sums, own_a, own_b, own_lse, own_at, other_a, other_b, lse, mask,
    lo, hi, queries, keys, offset, window, scale, width, value_width,
    other_a_row, other_b_row, mask_query, mask_key,
    OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEYS_OWN: tl.constexpr, EDGE: tl.constexpr, OF: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the cells of the positions from lo to hi to the sums of the owned positions."""
    count = queries if KEYS_OWN else keys
    for start in range(lo, hi, OTHER):
        at = start + tl.arange(0, OTHER)
        a = _load_rows(other_a, at, count, other_a_row, width, WIDE, WIDTH, EDGE)
        scores = tl.dot(own_a, tl.trans(a), input_precision=PRECISION) * scale
        at_query = at[None, :] if KEYS_OWN else own_at[:, None]
        at_key = own_at[:, None] if KEYS_OWN else at[None, :]
        if MASK != "none":
            scores = _apply_mask(scores, mask, at_query, at_key, queries, keys, mask_query, mask_key, MASK)
        if EDGE:
            hidden = _find_hidden_cells(at_query, at_key, queries, keys, offset, window, CAUSAL, WINDOW)
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
            b = _load_rows(other_b, at, count, other_b_row, value_width, VALUE_WIDE, VALUE_WIDTH, EDGE)
            gradient = tl.dot(own_b, tl.trans(b), input_precision=PRECISION)
            if OF == "positive":
                gradient = tl.maximum(gradient, 0.0)
            cells = cells * gradient
        sums += tl.sum(cells, 1)
    return sums


@triton.jit
def per_head_sums_kernel(
    query, key, value, gradient, lse, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width, value_width,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEYS_OWN: tl.constexpr, OF: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sum for each key (or query) of each head. lse: batch head query, minus the log of the query's weight."""
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    query += batch * query_batch + head * query_head
    gradient += batch * gradient_batch + head * gradient_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    lse += batch_head.to(tl.int64) * queries
    mask += batch * mask_batch + head * mask_head
    if KEYS_OWN:
        block = tl.program_id(0)  # most queries see the first keys: the longest loops start first
        num_owned, own_a, own_b, other_a, other_b = keys, key, value, query, gradient
        own_a_row, own_b_row, other_a_row, other_b_row = key_row, value_row, query_row, gradient_row
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        num_owned, own_a, own_b, other_a, other_b = queries, query, gradient, key, value
        own_a_row, own_b_row, other_a_row, other_b_row = query_row, gradient_row, key_row, value_row
    first = block * OWN
    at = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, num_owned) - 1
    start, stop = tl.load(span + 2 * batch), tl.load(span + 2 * batch + 1)
    lo, lo_full, hi_full, hi = _compute_loop_bounds(
        first, last, queries, keys, offset, window, start, stop, OTHER, KEYS_OWN, CAUSAL, WINDOW
    )
    a = _load_rows(own_a, at, num_owned, own_a_row, width, WIDE, WIDTH, True)
    b = a
    if OF != "attention":
        b = _load_rows(own_b, at, num_owned, own_b_row, value_width, VALUE_WIDE, VALUE_WIDTH, True)
    own_lse = tl.zeros([OWN], tl.float32)
    if not KEYS_OWN:
        own_lse = tl.load(lse + at, mask=at < num_owned, other=float("inf")) * LOG2E
    sums = tl.zeros([OWN], tl.float32)
    # Three ranges: some cells hidden, none hidden, some hidden. The middle one is the longest, and fast.
    sums = _accumulate_sums(sums, a, b, own_lse, at, other_a, other_b, lse, mask, lo, lo_full, queries, keys, offset,
                 window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, True, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    sums = _accumulate_sums(sums, a, b, own_lse, at, other_a, other_b, lse, mask, lo_full, hi_full, queries, keys,
                 offset, window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, False, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    sums = _accumulate_sums(sums, a, b, own_lse, at, other_a, other_b, lse, mask, hi_full, hi, queries, keys, offset,
                 window, scale, width, value_width, other_a_row, other_b_row, mask_query, mask_key, OTHER,
                 WIDE, VALUE_WIDE, WIDTH, VALUE_WIDTH, KEYS_OWN, True, OF, CAUSAL, WINDOW, MASK,
                 PRECISION)  # fmt: skip
    tl.store(out + batch_head.to(tl.int64) * num_owned + at, sums, mask=at < num_owned)


@triton.jit
def head_mean_sums_kernel(
    query, key, value, gradient, lse, weights, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width, value_width, rows,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, OF: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Several sums for each key, over the mean of the heads. weights: batch row query."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * OWN
    at_own = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, keys) - 1
    at_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    start, stop = tl.load(span + 2 * batch), tl.load(span + 2 * batch + 1)
    lo, _, _, hi = _compute_loop_bounds(
        first, last, queries, keys, offset, window, start, stop, OTHER, True, CAUSAL, WINDOW
    )
    sums = tl.zeros([OWN, ROWS], tl.float32)
    for begin in range(lo, hi, OTHER):
        at = begin + tl.arange(0, OTHER)
        hidden = _find_hidden_cells(at[None, :], at_own[:, None], queries, keys, offset, window, CAUSAL, WINDOW)
        head_sum = tl.zeros([OWN, OTHER], tl.float32)
        for head in range(heads):
            a = _load_rows(key + batch * key_batch + (head // group) * key_head, at_own, keys, key_row, width,
                         WIDE, WIDTH, True)  # fmt: skip
            q = _load_rows(query + batch * query_batch + head * query_head, at, queries, query_row, width,
                         WIDE, WIDTH, True)  # fmt: skip
            scores = tl.dot(a, tl.trans(q), input_precision=PRECISION) * scale
            if MASK != "none":
                scores = _apply_mask(scores, mask + batch * mask_batch + head * mask_head, at[None, :], at_own[:, None],
                                 queries, keys, mask_query, mask_key, MASK)  # fmt: skip
            own_lse = tl.load(lse + (batch * heads + head) * queries + at, mask=at < queries, other=float("inf"))
            cells = tl.exp2(tl.where(hidden, float("-inf"), scores) - own_lse[None, :] * LOG2E)
            if OF != "attention":
                b = _load_rows(value + batch * value_batch + (head // group) * value_head, at_own, keys, value_row,
                             value_width, VALUE_WIDE, VALUE_WIDTH, True)  # fmt: skip
                d = _load_rows(gradient + batch * gradient_batch + head * gradient_head, at, queries, gradient_row,
                             value_width, VALUE_WIDE, VALUE_WIDTH, True)  # fmt: skip
                grad_cells = tl.dot(b, tl.trans(d), input_precision=PRECISION)
                if OF == "positive":
                    grad_cells = tl.maximum(grad_cells, 0.0)
                cells = cells * grad_cells
            head_sum += cells
        pointers = weights + (batch * rows + at_row[None, :]) * queries + at[:, None]
        weight = tl.load(pointers, mask=(at[:, None] < queries) & (at_row[None, :] < rows), other=0.0)
        sums += tl.dot(head_sum / heads, weight, input_precision=EXACT)
    pointers = out + (batch * rows + at_row[None, :]) * keys + at_own[:, None]
    tl.store(pointers, sums, mask=(at_own[:, None] < keys) & (at_row[None, :] < rows))


@triton.jit
def logsumexp_kernel(
    query, key, span, mask, out,
    query_batch, query_head, query_row, key_batch, key_head, key_row, mask_batch, mask_head, mask_query, mask_key,
    heads, group, queries, keys, offset, window, scale, width,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log Σ_j exp(q_i · k_j s) for each query of each head."""
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    mask += batch * mask_batch + head * mask_head
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    at_own = first + tl.arange(0, OWN)
    last = tl.minimum(first + OWN, queries) - 1
    lo, _, _, hi = _compute_loop_bounds(
        first, last, queries, keys, offset, window, 0, keys, OTHER, False, CAUSAL, WINDOW
    )
    a = _load_rows(query, at_own, queries, query_row, width, WIDE, WIDTH, True)
    running_max = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    for begin in range(lo, hi, OTHER):
        at = begin + tl.arange(0, OTHER)
        b = _load_rows(key, at, keys, key_row, width, WIDE, WIDTH, True)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        if MASK != "none":
            scores = _apply_mask(scores, mask, at_own[:, None], at[None, :], queries, keys, mask_query, mask_key, MASK)
        hidden = _find_hidden_cells(at_own[:, None], at[None, :], queries, keys, offset, window, CAUSAL, WINDOW)
        scores = tl.where(hidden, float("-inf"), scores)
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row without a visible key so far
        total = total * tl.exp2(running_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        running_max = new_max
    has_key = running_max > float("-inf")
    result = tl.where(has_key, (running_max + tl.log2(tl.where(has_key, total, 1.0))) / LOG2E, float("inf"))
    tl.store(out + batch_head.to(tl.int64) * queries + at_own, result, mask=at_own < queries)
