"""Triton kernels of forward passes: Hedgehog's maps, window, additive linear part, and a KV cache with eviction.

Callers in `triton_autograd` say what each computes; `triton_gradients` has the backward passes. Rows are slots of keys;
the last slots are those of the queries. Positions and documents are int64, with a stride of 0 if all rows have the
same. Logarithms are to base 2. A program computes one head, or one KV head, of one row. The first axis of the grid
numbers rows and heads, since no other axis can have more than 65,535 programs. Triton needs powers of 2 as blocks.

This module imports triton, which not every machine has.
"""

# No `from __future__ import annotations`: Triton reads `tl.constexpr` from the signatures. No checks of types: Triton
# compiles the source of a function and would ignore their wrappers.
from typing import no_type_check

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# Arguments that differ between calls of one model: Triton must not compile a kernel for each of their values.
SIZES = ["x_row", "q_row", "k_row", "v_row", "lo_row", "queries_row", "keys_row", "at_row", "fresh_row"]
SIZES += ["length", "slots", "before", "chunks", "states", "blocks", "pool", "lag", "late", "sinks", "size", "ends_row"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def capped(scores, softcap):
    """Return softcap tanh(scores / softcap), with scores and result to base 2."""
    return softcap * LOG2_E * (1 - 2 / (tl.exp(2 * scores / (softcap * LOG2_E)) + 1))


@triton.jit
@no_type_check
def added(scores, seen, values, top, total, num, PRECISION: tl.constexpr):
    """Return the running max, den and num of online softmax after adding the keys that are seen."""
    scores = tl.where(seen, scores, -float("inf"))
    larger = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(larger == -float("inf"), 0.0, larger)
    weights, before = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    total = total * before + tl.sum(weights, 1)
    num = num * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return larger, total, num


@triton.jit
@no_type_check
def place_of_largest(place, top, scores, seen, places):
    """Return the place of the largest score: `place`, that of `top`, or one of `places`."""
    scores = tl.where(seen, scores, -float("inf"))
    largest = tl.max(scores, 1)
    own = tl.max(tl.where(seen & (scores == largest[:, None]), places[None], -1), 1)
    return tl.where(largest > top, own, place)


@triton.jit
@no_type_check
def sees_near(k_position, k_document, keys_at, j, inside, lowest, position, document, sinks, SINKS: tl.constexpr):
    """Return which of the keys in slots `j` each query sees: those from `lowest` on, and sinks."""
    its = tl.load(k_position + keys_at + j, inside, -1)[None]
    of = tl.load(k_document + keys_at + j, inside, -1)[None]
    seen = (its >= lowest) & (its <= position) & (its >= 0) & (of == document)
    if SINKS:
        seen = seen | ((its >= 0) & (its < sinks) & (its <= position) & (of == document))
    return seen


@triton.jit
@no_type_check
def far_sinks(k_position, k_document, keys_at, last, n, sinks, CARRIED: tl.constexpr):
    """Return the slots of the sinks `n`, and whether each lies in a slot up to `last`.

    They belong to the document of `last`: other documents of the queries begin after it. Its tokens are adjacent,
    except for the sinks of a carried document, which are in the first slots.
    """
    j = n + last - tl.load(k_position + keys_at + last, last >= 0, -1)
    if CARRIED:
        owner = tl.load(k_document + keys_at + last, last >= 0, -1)
        moved = tl.load(k_position + keys_at + n, n < sinks, -1) == n
        j = tl.where(moved & (owner == 0), n, j)
    return j, (n < sinks) & (j >= 0) & (j <= last)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def hedgehog(
    x, weight, bias, phi, x_row, x_head, x_slot, heads, x_group, weight_group, length, least,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr,
    BIAS: tl.constexpr, SOFTMAX: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Concatenate y = x W + b and -y; or softmax of each half or over both (no less than `least`).

    BLOCK_D rows of W at a time.
    """
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    t = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    there, n = t < length, tl.arange(0, BLOCK_N)
    wide, at = n < N, row.to(tl.int64) * x_row + (head // x_group) * x_head
    y = tl.zeros([M, BLOCK_N], tl.float32)
    for i in range((D - 1) // BLOCK_D + 1):
        d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        tall = d < D
        tile = tl.load(x + at + t[:, None] * x_slot + d[None], there[:, None] & tall[None], 0.0).to(tl.float32)
        rows = weight + (head // weight_group) * D * N + d[:, None] * N + n[None]
        rows = tl.load(rows, tall[:, None] & wide[None], 0.0).to(tl.float32)
        y += tl.dot(tile, rows, input_precision=PRECISION)
    if BIAS:
        y += tl.load(bias + (head // weight_group) * N + n, wide, 0.0).to(tl.float32)[None]
    negative = -y
    if SOFTMAX:
        y, negative = tl.where(wide[None], y, -float("inf")), tl.where(wide[None], negative, -float("inf"))
        top, other = tl.max(y, 1), tl.max(negative, 1)
        if not HALVES:
            top = tl.maximum(top, other)
            other = top
        y, negative = tl.exp2((y - top[:, None]) * LOG2_E), tl.exp2((negative - other[:, None]) * LOG2_E)
        total, others = tl.sum(y, 1), tl.sum(negative, 1)
        if not HALVES:
            total += others
            others = total
        y, negative = tl.maximum(y / total[:, None], least), tl.maximum(negative / others[:, None], least)
    out = phi + (tl.program_id(0).to(tl.int64) * length + t)[:, None] * 2 * N + n[None]
    tl.store(out, y, there[:, None] & wide[None])
    tl.store(out + N, negative, there[:, None] & wide[None])


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def window(
    q, k, v, lo, q_position, q_document, k_position, k_document, num, den, log_scale, place,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, lo_row, queries_row, keys_row,
    heads, group, length, slots, lag, sinks, factor, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CARRIED: tl.constexpr,
    PLACE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute softmax of M queries over the keys from `lo` on and the first `sinks`.

    Reads the `lag` slots that end with each query, N at a time, then the sinks before these slots.

    SINKS: whether there are sinks. CARRIED: whether the first slots hold the sinks of document 0. PLACE: whether to
    write `place`, the slot of the key with the largest score, -1 for no key.
    """
    row, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * M
    t, d = (start + tl.arange(0, M)).to(tl.int64), tl.arange(0, BLOCK_D)  # T H D can be more than 2**31
    there, wide = t < length, d < D
    position = tl.load(q_position + row * queries_row + t, there, -1)[:, None]
    document = tl.load(q_document + row * queries_row + t, there, -1)[:, None]
    lowest = tl.load(lo + row * lo_row + t, there, 0)[:, None]
    at = row.to(tl.int64) * q_row + head * q_head
    x = tl.load(q + at + t[:, None] * q_slot + d[None], there[:, None] & wide[None], 0.0)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, BLOCK_D], tl.float32)
    largest = tl.full([M], -1, tl.int32)
    k_at = row.to(tl.int64) * k_row + (head // group) * k_head
    v_at = row.to(tl.int64) * v_row + (head // group) * v_head
    first = slots - length + start - lag + 1
    for i in range((lag + M - 2) // N + 1):
        j = (first + i * N + tl.arange(0, N)).to(tl.int64)
        inside = (j >= 0) & (j < slots)
        keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], inside[None] & wide[:, None], 0.0)
        scores = tl.dot(x, keys, input_precision=PRECISION) * factor
        if SOFTCAP:
            scores = capped(scores, softcap)
        seen = sees_near(
            k_position, k_document, row * keys_row, j, inside, lowest, position, document, sinks, SINKS
        )  # fmt: skip
        values = tl.load(v + v_at + j[:, None] * v_slot + d[None], inside[:, None] & wide[None], 0.0)
        if PLACE:
            largest = place_of_largest(largest, top, scores, seen, j.to(tl.int32))
        top, total, sums = added(scores, seen, values, top, total, sums, PRECISION)
    if SINKS:
        last = (first - 1).to(tl.int64)
        for i in range((sinks - 1) // N + 1):
            n = i * N + tl.arange(0, N)
            j, inside = far_sinks(k_position, k_document, row * keys_row, last, n, sinks, CARRIED)
            of = tl.load(k_document + row * keys_row + j, inside, -1)[None]
            keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], inside[None] & wide[:, None], 0.0)
            scores = tl.dot(x, keys, input_precision=PRECISION) * factor
            if SOFTCAP:
                scores = capped(scores, softcap)
            seen = inside[None] & (n[None] <= position) & (of == document)
            values = tl.load(v + v_at + j[:, None] * v_slot + d[None], inside[:, None] & wide[None], 0.0)
            if PLACE:
                largest = place_of_largest(largest, top, scores, seen, j.to(tl.int32))
            top, total, sums = added(scores, seen, values, top, total, sums, PRECISION)
    out = tl.program_id(0).to(tl.int64) * length + t
    tl.store(num + out[:, None] * D + d[None], sums, there[:, None] & wide[None])
    tl.store(den + out, total, there)
    tl.store(log_scale + out, tl.where(top == -float("inf"), 0.0, top) / LOG2_E, there)
    if PLACE:
        tl.store(place + out, largest, there)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def linear_states(
    phi_k, v, weight, k_position, ends, S, z,
    k_row, k_head, k_slot, v_row, v_head, v_slot, keys_row, ends_row,
    heads, v_group, slots, before, chunks, states, lag, sinks,
    F: tl.constexpr, BLOCK_F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the sums added to S and z before each chunk of C queries: those of C keys, `lag` slots before it.

    The last of the `states` are the sums of the remaining keys below each of a row's `ends`, which are positions.
    BLOCK_D of the values at a time. WEIGHTED: z sums keys times their `weight`, else the keys.
    """
    row, head, c = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    f, d = tl.arange(0, BLOCK_F), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    tall, wide = f < F, d < D
    k_at = row.to(tl.int64) * k_row + head * k_head
    v_at = row.to(tl.int64) * v_row + (head // v_group) * v_head
    first, tiles = before + (tl.minimum(c, chunks) - 1) * C - lag + 1, tl.where(c < chunks, 1, (C + lag - 2) // C + 1)
    ends += row * ends_row
    lowest = tl.maximum(tl.load(ends + c - chunks - 1, c > chunks, 0), sinks)
    below = tl.load(ends + c - chunks, c >= chunks, 2**62)
    sums, total = tl.zeros([BLOCK_F, BLOCK_D], tl.float32), tl.zeros([BLOCK_F], tl.float32)
    for i in range(tiles):
        j = (first + i * C + tl.arange(0, C)).to(tl.int64)
        there = (j >= 0) & (j < slots)
        its = tl.load(k_position + row * keys_row + j, there, -1)
        there = there & (its >= lowest) & (its < below)
        keys = tl.load(phi_k + k_at + j[None] * k_slot + f[:, None], there[None] & tall[:, None], 0.0).to(tl.float32)
        values = tl.load(v + v_at + j[:, None] * v_slot + d[None], there[:, None] & wide[None], 0.0).to(tl.float32)
        sums += tl.dot(keys, values, input_precision=PRECISION)
        if WEIGHTED:
            keys *= tl.load(weight + tl.program_id(0).to(tl.int64) * slots + j, there, 0.0)[None]
        total += tl.sum(keys, 1)
    out = tl.program_id(0).to(tl.int64) * states + c
    tl.store(S + out * F * D + f[:, None] * D + d[None], sums, tall[:, None] & wide[None])
    if tl.program_id(2) == 0:
        tl.store(z + out * F + f, total, tall)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def linear_outputs(
    phi_q, phi_k, v, lo, k_position, S, z, num, den,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, lo_row, keys_row,
    heads, k_group, v_group, length, slots, states, lag, late, sinks,
    F: tl.constexpr, BLOCK_F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute num and den of C queries, from the state before them and from near keys.

    Near keys are those below `lo` in the slots from `lag` - 1 to `late` before a query. BLOCK_D of the values at a
    time.
    """
    row, head, c = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    t, f = (c * C + tl.arange(0, C)).to(tl.int64), tl.arange(0, BLOCK_F)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    there, tall, wide = t < length, f < F, d < D
    lowest = tl.load(lo + row * lo_row + t, there, -1)[:, None]  # -1: padding, which reads nothing
    at = row.to(tl.int64) * q_row + head * q_head
    x = tl.load(phi_q + at + t[:, None] * q_slot + f[None], (lowest >= 0) & tall[None], 0.0).to(tl.float32)
    key_head = head // k_group
    state = (row.to(tl.int64) * (heads // k_group) + key_head) * states + c
    tile = tl.load(S + state * F * D + f[:, None] * D + d[None], tall[:, None] & wide[None], 0.0)
    sums = tl.dot(x, tile, input_precision=PRECISION)
    total = tl.sum(x * tl.load(z + state * F + f, tall, 0.0)[None], 1)
    k_at = row.to(tl.int64) * k_row + key_head * k_head
    v_at = row.to(tl.int64) * v_row + (head // v_group) * v_head
    first = slots - length + c * C - lag + 1
    for i in range((lag - late + C - 2) // C + 1):
        j = (first + i * C + tl.arange(0, C)).to(tl.int64)
        inside = (j >= 0) & (j < slots)
        its = tl.load(k_position + row * keys_row + j, inside, -1)
        inside = inside & (its >= sinks)
        keys = tl.load(phi_k + k_at + j[None] * k_slot + f[:, None], inside[None] & tall[:, None], 0.0).to(tl.float32)
        weights = tl.dot(x, keys, input_precision=PRECISION)
        weights = tl.where(inside[None] & (its[None] < lowest), weights, 0.0)
        values = tl.load(v + v_at + j[:, None] * v_slot + d[None], inside[:, None] & wide[None], 0.0).to(tl.float32)
        total += tl.sum(weights, 1)
        sums += tl.dot(weights, values, input_precision=PRECISION)
    out = tl.program_id(0).to(tl.int64) * length + t
    tl.store(num + out[:, None] * D + d[None], sums, there[:, None] & wide[None])
    if tl.program_id(2) == 0:
        tl.store(den + out, total, there)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def cached(
    q, k, v, at, held, num, den, log_scale, place,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, at_row,
    heads, group, length, slots, blocks, width, size, factor, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, PLACE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the `size` cached keys of a block to the softmax sums of its queries, in place.

    M queries at a time, over all query heads of a KV head. A `place` in the pool is counted after the window's `slots`.
    """
    row, head, block = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)  # KV head
    m, d = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    wide, of, own = d < D, head * group + m // width, m < group * width
    t = tl.load(at + row * at_row + block * width + m % width, own, -1)
    there = own & (t >= 0)
    q_at = row.to(tl.int64) * q_row + of * q_head + t * q_slot
    x = tl.load(q + q_at[:, None] + d[None], there[:, None] & wide[None], 0.0)
    out = (row.to(tl.int64) * heads * group + of) * length + t
    total = tl.load(den + out, there, 0.0)
    top = tl.where(total > 0, tl.load(log_scale + out, there, 0.0) * LOG2_E, -float("inf"))
    sums = tl.load(num + out[:, None] * D + d[None], there[:, None] & wide[None], 0.0)
    largest = tl.full([M], -1, tl.int32)
    if PLACE:
        largest = tl.load(place + out, there, -1)
    k_at, v_at = row.to(tl.int64) * k_row + head * k_head, row.to(tl.int64) * v_row + head * v_head
    holds = held + (tl.program_id(0).to(tl.int64) * blocks + block) * size
    for i in range((size - 1) // N + 1):
        c = i * N + tl.arange(0, N)
        j = tl.load(holds + c, c < size, -1)
        inside = j >= 0
        keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], inside[None] & wide[:, None], 0.0)
        scores = tl.dot(x, keys, input_precision=PRECISION) * factor
        if SOFTCAP:
            scores = capped(scores, softcap)
        values = tl.load(v + v_at + j[:, None] * v_slot + d[None], inside[:, None] & wide[None], 0.0)
        if PLACE:
            seen = inside[None] & there[:, None]
            largest = place_of_largest(largest, top, scores, seen, (slots + j).to(tl.int32))
        top, total, sums = added(scores, inside[None] & there[:, None], values, top, total, sums, PRECISION)
    tl.store(num + out[:, None] * D + d[None], sums, there[:, None] & wide[None])
    tl.store(den + out, total, there)
    tl.store(log_scale + out, tl.where(top == -float("inf"), 0.0, top) / LOG2_E, there)
    if PLACE:
        tl.store(place + out, largest, there)
