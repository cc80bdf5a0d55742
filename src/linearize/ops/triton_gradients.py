"""Triton kernels of backward passes: window, KV cache with eviction, additive linear part, and Hedgehog's maps.

They recompute scores from the inputs and the running max, as FlashAttention-2 does (Dao 2023, arXiv 2307.08691).
All products are of float32. Rows, slots, heads and blocks are as in `triton_kernels`.

This module imports triton, which not every machine has.
"""

# No `from __future__ import annotations`, and no checks of types: as in `triton_kernels`.
from typing import no_type_check

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from linearize.ops.triton_kernels import capped, far_sinks, sees_near

# Arguments that differ between calls of one model: Triton must not compile a kernel for each of their values.
SIZES = ["q_row", "k_row", "v_row", "lo_row", "queries_row", "keys_row", "at_row", "length", "slots", "before"]
SIZES += ["chunks", "blocks", "pool", "lag", "late", "sinks", "size"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def weights_and_gradients(
    x, keys, values, seen, is_largest, g_num, g_den, top, delta, factor, softcap,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights of keys, and the gradients of their unscaled products with queries.

    The running max, the largest score, is subtracted from all scores. So `delta`, the sum of all scores' gradients less
    the running max's gradient, is subtracted from the gradient of the largest score.
    """
    scores = tl.dot(x, keys, input_precision=PRECISION) * factor
    if SOFTCAP:
        scores = capped(scores, softcap)
    weights = tl.exp2(tl.where(seen, scores - top[:, None], -float("inf")))
    gradients = weights * (tl.dot(g_num, values, input_precision=PRECISION) + g_den[:, None])
    gradients -= tl.where(seen & is_largest, delta[:, None], 0.0)
    if SOFTCAP:
        tanh = scores / (softcap * LOG2_E)
        gradients *= 1 - tanh * tanh
    return weights, gradients


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def window_queries(
    q, k, v, lo, q_position, q_document, k_position, k_document, num, den, log_scale, place, g_num, g_den, g_log_scale,
    delta, grad_q, sink_k, sink_v, sink_slot,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, lo_row, queries_row, keys_row,
    heads, group, length, slots, lag, sinks, factor, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CARRIED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of M queries, their `delta`, and gradients of the sinks before the window's slots.

    `sink_k`, `sink_v` [B, H, chunks of M queries, sinks, D] belong to the keys in `sink_slot` [B, chunks, sinks], -1
    for no key.
    """
    row, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * M
    t, d = (start + tl.arange(0, M)).to(tl.int64), tl.arange(0, BLOCK_D)
    there, wide = t < length, d < D
    position = tl.load(q_position + row * queries_row + t, there, -1)[:, None]
    document = tl.load(q_document + row * queries_row + t, there, -1)[:, None]
    lowest = tl.load(lo + row * lo_row + t, there, 0)[:, None]
    at = row.to(tl.int64) * q_row + head * q_head
    tile = there[:, None] & wide[None]
    x = tl.load(q + at + t[:, None] * q_slot + d[None], tile, 0.0).to(tl.float32)
    out = tl.program_id(0).to(tl.int64) * length + t
    places = out[:, None] * D + d[None]
    g, g_total = tl.load(g_num + places, tile, 0.0), tl.load(g_den + out, there, 0.0)
    below = tl.sum(g * tl.load(num + places, tile, 0.0), 1) + g_total * tl.load(den + out, there, 0.0)
    below -= tl.load(g_log_scale + out, there, 0.0)
    tl.store(delta + out, below, there)
    top, largest = tl.load(log_scale + out, there, 0.0) * LOG2_E, tl.load(place + out, there, -1)[:, None]
    sums = tl.zeros([M, BLOCK_D], tl.float32)
    k_at = row.to(tl.int64) * k_row + (head // group) * k_head
    v_at = row.to(tl.int64) * v_row + (head // group) * v_head
    first = slots - length + start - lag + 1
    for i in range((lag + M - 2) // N + 1):
        j = (first + i * N + tl.arange(0, N)).to(tl.int64)
        inside = (j >= 0) & (j < slots)
        block = inside[None] & wide[:, None]
        keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], block, 0.0).to(tl.float32)
        values = tl.load(v + v_at + j[None] * v_slot + d[:, None], block, 0.0).to(tl.float32)
        seen = sees_near(k_position, k_document, row * keys_row, j, inside, lowest, position, document, sinks, SINKS)
        _, gradients = weights_and_gradients(
            x, keys, values, seen, j[None] == largest, g, g_total, top, below, factor, softcap, SOFTCAP, PRECISION
        )
        sums += tl.dot(gradients, tl.trans(keys), input_precision=PRECISION)
    if SINKS:
        last = (first - 1).to(tl.int64)
        chunk = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        for i in range((sinks - 1) // N + 1):
            n = i * N + tl.arange(0, N)
            j, inside = far_sinks(k_position, k_document, row * keys_row, last, n, sinks, CARRIED)
            of = tl.load(k_document + row * keys_row + j, inside, -1)[None]
            block = inside[None] & wide[:, None]
            keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], block, 0.0).to(tl.float32)
            values = tl.load(v + v_at + j[None] * v_slot + d[:, None], block, 0.0).to(tl.float32)
            seen = inside[None] & (n[None] <= position) & (of == document)
            weights, gradients = weights_and_gradients(
                x, keys, values, seen, j[None] == largest, g, g_total, top, below, factor, softcap, SOFTCAP, PRECISION
            )
            sums += tl.dot(gradients, tl.trans(keys), input_precision=PRECISION)
            own, its = (n < sinks)[:, None] & wide[None], (chunk * sinks + n)[:, None] * D + d[None]
            of_keys = tl.dot(tl.trans(gradients), x, input_precision=PRECISION) * (factor / LOG2_E)
            tl.store(sink_k + its, of_keys, own)
            tl.store(sink_v + its, tl.dot(tl.trans(weights), g, input_precision=PRECISION), own)
            if head == 0:
                kept = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * sinks + n
                tl.store(sink_slot + kept, tl.where(inside, j, -1), n < sinks)
    tl.store(grad_q + places, sums * (factor / LOG2_E), tile)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def window_keys(
    q, k, v, lo, q_position, q_document, k_position, k_document, log_scale, place, g_num, g_den, delta, grad_k, grad_v,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, lo_row, queries_row, keys_row,
    heads, group, length, slots, lag, sinks, factor, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of N keys and values of a KV head, from all queries whose window slots hold them, M at a time.

    CHUNK: queries of a program of `window_queries`, which computes the gradients of sinks before these slots.
    """
    row, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * N
    j, d = (start + tl.arange(0, N)).to(tl.int64), tl.arange(0, BLOCK_D)
    inside, wide, before = j < slots, d < D, slots - length
    block = inside[None] & wide[:, None]
    k_at = row.to(tl.int64) * k_row + head * k_head
    v_at = row.to(tl.int64) * v_row + head * v_head
    keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], block, 0.0).to(tl.float32)
    values = tl.load(v + v_at + j[None] * v_slot + d[:, None], block, 0.0).to(tl.float32)
    of_keys, of_values = tl.zeros([N, BLOCK_D], tl.float32), tl.zeros([N, BLOCK_D], tl.float32)
    begin, last = tl.maximum(start - before, 0), start + N - 2 - before + lag
    if SINKS:
        last += CHUNK - 1
    tiles = (tl.minimum(last, length - 1) - begin + M) // M
    for i in range(group * tiles):
        t = (begin + i % tiles * M + tl.arange(0, M)).to(tl.int64)
        there, query_head = t < length, head * group + i // tiles
        position = tl.load(q_position + row * queries_row + t, there, -1)[:, None]
        document = tl.load(q_document + row * queries_row + t, there, -1)[:, None]
        lowest = tl.load(lo + row * lo_row + t, there, 0)[:, None]
        tile = there[:, None] & wide[None]
        at = row.to(tl.int64) * q_row + query_head * q_head
        x = tl.load(q + at + t[:, None] * q_slot + d[None], tile, 0.0).to(tl.float32)
        out = (row.to(tl.int64) * heads * group + query_head) * length + t
        g, g_total = tl.load(g_num + out[:, None] * D + d[None], tile, 0.0), tl.load(g_den + out, there, 0.0)
        top, largest = tl.load(log_scale + out, there, 0.0) * LOG2_E, tl.load(place + out, there, -1)[:, None]
        below = tl.load(delta + out, there, 0.0)
        seen = sees_near(k_position, k_document, row * keys_row, j, inside, lowest, position, document, sinks, SINKS)
        if SINKS:
            seen = seen & (j[None] > before + (t // CHUNK * CHUNK)[:, None] - lag)
        weights, gradients = weights_and_gradients(
            x, keys, values, seen, j[None] == largest, g, g_total, top, below, factor, softcap, SOFTCAP, PRECISION
        )
        of_keys += tl.dot(tl.trans(gradients), x, input_precision=PRECISION)
        of_values += tl.dot(tl.trans(weights), g, input_precision=PRECISION)
    places = (tl.program_id(0).to(tl.int64) * slots + j)[:, None] * D + d[None]
    tl.store(grad_k + places, of_keys * (factor / LOG2_E), inside[:, None] & wide[None])
    tl.store(grad_v + places, of_values, inside[:, None] & wide[None])


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def cached_pairs(
    q, k, v, at, held, log_scale, place, g_num, g_den, delta, grad_q, grad_k, grad_v,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot, at_row,
    heads, group, length, slots, blocks, width, size, pool, factor, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of M queries of a block and of the cached pairs that they read.

    Many blocks read a pair of the pool, and their programs add to its gradient in no fixed order.
    """
    row, head, block = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)  # KV head
    m, d = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    wide, of, own = d < D, head * group + m // width, m < group * width
    t = tl.load(at + row * at_row + block * width + m % width, own, -1)
    there = own & (t >= 0)
    tile = there[:, None] & wide[None]
    q_at = row.to(tl.int64) * q_row + of * q_head + t * q_slot
    x = tl.load(q + q_at[:, None] + d[None], tile, 0.0).to(tl.float32)
    out = (row.to(tl.int64) * heads * group + of) * length + t
    places = out[:, None] * D + d[None]
    g, g_total = tl.load(g_num + places, tile, 0.0), tl.load(g_den + out, there, 0.0)
    top, largest = tl.load(log_scale + out, there, 0.0) * LOG2_E, tl.load(place + out, there, -1)[:, None]
    below = tl.load(delta + out, there, 0.0)
    sums = tl.zeros([M, BLOCK_D], tl.float32)
    k_at, v_at = row.to(tl.int64) * k_row + head * k_head, row.to(tl.int64) * v_row + head * v_head
    holds = held + (tl.program_id(0).to(tl.int64) * blocks + block) * size
    for i in range((size - 1) // N + 1):
        c = i * N + tl.arange(0, N)
        j = tl.load(holds + c, c < size, -1)
        inside = j >= 0
        chosen = inside[None] & wide[:, None]
        keys = tl.load(k + k_at + j[None] * k_slot + d[:, None], chosen, 0.0).to(tl.float32)
        values = tl.load(v + v_at + j[None] * v_slot + d[:, None], chosen, 0.0).to(tl.float32)
        seen, is_largest = inside[None] & there[:, None], (slots + j)[None] == largest
        weights, gradients = weights_and_gradients(
            x, keys, values, seen, is_largest, g, g_total, top, below, factor, softcap, SOFTCAP, PRECISION
        )
        sums += tl.dot(gradients, tl.trans(keys), input_precision=PRECISION)
        of_keys = tl.dot(tl.trans(gradients), x, input_precision=PRECISION) * (factor / LOG2_E)
        of_values = tl.dot(tl.trans(weights), g, input_precision=PRECISION)
        pairs = (tl.program_id(0).to(tl.int64) * pool + j)[:, None] * D + d[None]
        tl.atomic_add(grad_k + pairs, of_keys, inside[:, None] & wide[None], sem="relaxed")
        tl.atomic_add(grad_v + pairs, of_values, inside[:, None] & wide[None], sem="relaxed")
    # A query belongs to one block, so no other program writes its gradient.
    tl.store(grad_q + places, tl.load(grad_q + places, tile, 0.0) + sums * (factor / LOG2_E), tile)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def linear_queries(
    phi_k, v, lo, k_position, S, z, g_num, g_den, grad_q,
    k_row, k_head, k_slot, v_row, v_head, v_slot, lo_row, keys_row,
    heads, k_group, v_group, length, slots, chunks, lag, late, sinks,
    F: tl.constexpr, BLOCK_F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the features of M queries, from the state before their chunk of C and from near keys.

    N near keys and BLOCK_D of the values at a time.
    """
    row, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * M
    t, f = (start + tl.arange(0, M)).to(tl.int64), tl.arange(0, BLOCK_F)
    there, tall, chunk, key_head = t < length, f < F, start // C, head // k_group
    lowest = tl.load(lo + row * lo_row + t, there, -1)[:, None]  # -1: padding, which reads nothing
    out = tl.program_id(0).to(tl.int64) * length + t
    g_total = tl.load(g_den + out, there, 0.0)
    state = (row.to(tl.int64) * (heads // k_group) + key_head) * chunks + chunk
    sums = g_total[:, None] * tl.load(z + state * F + f, tall, 0.0)[None]
    for s in range((D - 1) // BLOCK_D + 1):
        d = s * BLOCK_D + tl.arange(0, BLOCK_D)
        wide = d < D
        g = tl.load(g_num + out[:, None] * D + d[None], there[:, None] & wide[None], 0.0)
        tile = tl.load(S + state * F * D + f[None] * D + d[:, None], tall[None] & wide[:, None], 0.0)
        sums += tl.dot(g, tile, input_precision=PRECISION)
    k_at = row.to(tl.int64) * k_row + key_head * k_head
    v_at = row.to(tl.int64) * v_row + (head // v_group) * v_head
    first = slots - length + chunk * C - lag + 1
    for i in range((lag - late + C - 2) // N + 1):
        j = (first + i * N + tl.arange(0, N)).to(tl.int64)
        inside = (j >= 0) & (j < slots)
        its = tl.load(k_position + row * keys_row + j, inside, -1)
        inside = inside & (its >= sinks)
        gradients = tl.zeros([M, N], tl.float32) + g_total[:, None]
        for s in range((D - 1) // BLOCK_D + 1):
            d = s * BLOCK_D + tl.arange(0, BLOCK_D)
            wide = d < D
            g = tl.load(g_num + out[:, None] * D + d[None], there[:, None] & wide[None], 0.0)
            block = inside[None] & wide[:, None]
            values = tl.load(v + v_at + j[None] * v_slot + d[:, None], block, 0.0).to(tl.float32)
            gradients += tl.dot(g, values, input_precision=PRECISION)
        gradients = tl.where(inside[None] & (its[None] < lowest), gradients, 0.0)
        keys = tl.load(phi_k + k_at + j[:, None] * k_slot + f[None], inside[:, None] & tall[None], 0.0).to(tl.float32)
        sums += tl.dot(gradients, keys, input_precision=PRECISION)
    sums = tl.where(lowest >= 0, sums, 0.0)
    tl.store(grad_q + out[:, None] * F + f[None], sums, there[:, None] & tall[None])


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def linear_keys(
    phi_q, v, lo, k_position, S, z, g_num, g_den, grad_k,
    q_row, q_head, q_slot, v_row, v_head, v_slot, lo_row, keys_row,
    heads, group, v_group, length, slots, chunks, lag, late, sinks,
    F: tl.constexpr, BLOCK_F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the features of N keys, from S and z and from near queries of all heads that share the keys.

    Near queries are read M at a time. S and z [B, Hk, chunks + 1, ...] are sums over the queries of later chunks: over
    all queries, over those from chunk 0 on, from chunk 1 on, and so on.
    """
    row, head, f = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.arange(0, BLOCK_F)
    chunk = tl.program_id(1) * N // C - 1  # the chunk of queries that reads these keys one by one, from 0
    j = (slots - length - lag + 1 - C + tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    tall, inside = f < F, (j >= 0) & (j < slots)
    its = tl.load(k_position + row * keys_row + j, inside, -1)
    read = inside & (its >= 0) & (its >= sinks)
    v_at = row.to(tl.int64) * v_row + (head // v_group) * v_head
    state, later = tl.program_id(0).to(tl.int64) * (chunks + 1) + chunk + 2, chunk + 2 <= chunks
    sums = tl.zeros([N, BLOCK_F], tl.float32) + tl.load(z + state * F + f, tall & later, 0.0)[None]
    for s in range((D - 1) // BLOCK_D + 1):
        d = s * BLOCK_D + tl.arange(0, BLOCK_D)
        wide = d < D
        values = tl.load(v + v_at + j[:, None] * v_slot + d[None], read[:, None] & wide[None], 0.0).to(tl.float32)
        tile = tl.load(S + state * F * D + f[None] * D + d[:, None], tall[None] & wide[:, None] & later, 0.0)
        sums += tl.dot(values, tile, input_precision=PRECISION)
    begin = tl.maximum((chunk - (lag - late + C - 2) // C) * C, 0)
    tiles = (tl.minimum((chunk + 1) * C, length) - begin + M - 1) // M
    for i in range(group * tiles):
        t = (begin + i % tiles * M + tl.arange(0, M)).to(tl.int64)
        there, query_head = t < length, head * group + i // tiles
        lowest = tl.load(lo + row * lo_row + t, there, -1)[None]
        out = (row.to(tl.int64) * heads * group + query_head) * length + t
        gradients = tl.zeros([N, M], tl.float32) + tl.load(g_den + out, there, 0.0)[None]
        for s in range((D - 1) // BLOCK_D + 1):
            d = s * BLOCK_D + tl.arange(0, BLOCK_D)
            wide = d < D
            values = tl.load(v + v_at + j[:, None] * v_slot + d[None], read[:, None] & wide[None], 0.0).to(tl.float32)
            g = tl.load(g_num + out[None] * D + d[:, None], there[None] & wide[:, None], 0.0)
            gradients += tl.dot(values, g, input_precision=PRECISION)
        gradients = tl.where(its[:, None] < lowest, gradients, 0.0)
        at = row.to(tl.int64) * q_row + query_head * q_head
        x = tl.load(phi_q + at + t[:, None] * q_slot + f[None], there[:, None] & tall[None], 0.0).to(tl.float32)
        sums += tl.dot(gradients, x, input_precision=PRECISION)
    sums = tl.where(read[:, None], sums, 0.0)
    out = tl.program_id(0).to(tl.int64) * slots + j
    tl.store(grad_k + out[:, None] * F + f[None], sums, inside[:, None] & tall[None])


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def linear_values(
    phi_q, phi_k, lo, k_position, S, g_num, grad_v,
    q_row, q_head, q_slot, k_row, k_head, k_slot, lo_row, keys_row,
    heads, group, length, slots, chunks, lag, late, sinks,
    F: tl.constexpr, BLOCK_F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of BLOCK_D of the values of N keys, as in `linear_keys`."""
    row, head, f = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.arange(0, BLOCK_F)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    chunk = tl.program_id(1) * N // C - 1
    j = (slots - length - lag + 1 - C + tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    tall, wide, inside = f < F, d < D, (j >= 0) & (j < slots)
    its = tl.load(k_position + row * keys_row + j, inside, -1)
    read = inside & (its >= 0) & (its >= sinks)
    k_at = row.to(tl.int64) * k_row + head * k_head
    keys = tl.load(phi_k + k_at + j[:, None] * k_slot + f[None], read[:, None] & tall[None], 0.0).to(tl.float32)
    state, later = tl.program_id(0).to(tl.int64) * (chunks + 1) + chunk + 2, chunk + 2 <= chunks
    tile = tl.load(S + state * F * D + f[:, None] * D + d[None], tall[:, None] & wide[None] & later, 0.0)
    sums = tl.dot(keys, tile, input_precision=PRECISION)
    begin = tl.maximum((chunk - (lag - late + C - 2) // C) * C, 0)
    tiles = (tl.minimum((chunk + 1) * C, length) - begin + M - 1) // M
    for i in range(group * tiles):
        t = (begin + i % tiles * M + tl.arange(0, M)).to(tl.int64)
        there, query_head = t < length, head * group + i // tiles
        lowest = tl.load(lo + row * lo_row + t, there, -1)[None]
        at = row.to(tl.int64) * q_row + query_head * q_head
        x = tl.load(phi_q + at + t[None] * q_slot + f[:, None], there[None] & tall[:, None], 0.0).to(tl.float32)
        weights = tl.where(its[:, None] < lowest, tl.dot(keys, x, input_precision=PRECISION), 0.0)
        out = (row.to(tl.int64) * heads * group + query_head) * length + t
        g = tl.load(g_num + out[:, None] * D + d[None], there[:, None] & wide[None], 0.0)
        sums += tl.dot(weights, g, input_precision=PRECISION)
    out = tl.program_id(0).to(tl.int64) * slots + j
    tl.store(grad_v + out[:, None] * D + d[None], sums, inside[:, None] & wide[None])


@triton.jit(do_not_specialize=["length"])
@no_type_check
def hedgehog_outputs(
    phi, g_phi, grad_y, length, least,
    N: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr, SOFTMAX: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Compute gradients of y = x W + b from those of the features of y and -y, M tokens of a head at a time.

    Features that are no more than `least` have a gradient of 0.
    """
    t, n = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64), tl.arange(0, BLOCK_N)
    there, out = (t < length)[:, None] & (n < N)[None], tl.program_id(0).to(tl.int64) * length + t
    places = out[:, None] * 2 * N + n[None]
    g, negative = tl.load(g_phi + places, there, 0.0), tl.load(g_phi + places + N, there, 0.0)
    if SOFTMAX:
        y, other = tl.load(phi + places, there, 0.0), tl.load(phi + places + N, there, 0.0)
        g, negative = tl.where(y > least, g, 0.0), tl.where(other > least, negative, 0.0)
        mean, others = tl.sum(g * y, 1), tl.sum(negative * other, 1)
        if not HALVES:
            mean += others
            others = mean
        g, negative = y * (g - mean[:, None]), other * (negative - others[:, None])
    tl.store(grad_y + out[:, None] * N + n[None], g - negative, there)
