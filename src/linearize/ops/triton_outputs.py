"""Triton kernels that compute a mixer's output: from a prompt's window and linear part, and of one more token.

They have no backward passes. Logarithms are to base 2. Triton needs powers of 2 as blocks.

This module imports triton, which not every machine has.
"""

# No `from __future__ import annotations`, and no checks of types: as in `triton_kernels`.
from typing import no_type_check

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from linearize.ops.triton_kernels import added, capped

# Arguments that differ between calls of one model: Triton must not compile a kernel for each of their values.
SIZES = ["q_row", "new_k_row", "new_v_row", "k_row", "v_row", "phi_k_row", "bias_row", "slots", "length"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def _quotient(window, window_den, linear, linear_den, factor, least, WINDOW: tl.constexpr, LINEAR: tl.constexpr):
    """Return (g num_w + num_l) / (g den_w + den_l), g = sigmoid(factor), or num / den of the only part."""
    num, den = window, window_den
    if LINEAR:
        if WINDOW:
            g = 1 / (1 + tl.exp2(-factor * LOG2_E))
            num, den = g[:, None] * window + linear, g * window_den + linear_den
        else:
            num, den = linear, linear_den
    return num / tl.maximum(den, least)[:, None]


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def quotient(
    num_w, den_w, num_l, den_l, window_factor, y, heads, length, least,
    WINDOW: tl.constexpr, LINEAR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the output of M tokens of a head; the heads of a token are adjacent in memory."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    t, d = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    there, at = t < length, tl.program_id(0).to(tl.int64) * length + t
    inside = there[:, None] & (d < D)[None]
    window, window_den = tl.zeros([M, BLOCK_D], tl.float32), tl.zeros([M], tl.float32)
    linear, linear_den = window, window_den
    if WINDOW:
        window, window_den = tl.load(num_w + at[:, None] * D + d[None], inside, 0.0), tl.load(den_w + at, there, 0.0)
    if LINEAR:
        linear, linear_den = tl.load(num_l + at[:, None] * D + d[None], inside, 0.0), tl.load(den_l + at, there, 0.0)
    factor = window_den
    if WINDOW and LINEAR:
        factor = tl.load(window_factor + head + t * 0).to(tl.float32)
    out = _quotient(window, window_den, linear, linear_den, factor, least, WINDOW, LINEAR)
    tl.store(y + ((row * length + t) * heads + head)[:, None] * D + d[None], out, inside)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def one_token(
    q, new_k, new_v, k, v, slot, bias, phi_q, phi_k, entering, enters,
    S, z, ahead_S, ahead_z, begins, window_factor, y, next_k, next_v, next_S, next_z, next_ahead_S, next_ahead_z,
    q_row, q_head, new_k_row, new_k_head, new_v_row, new_v_head, k_row, k_head, k_slot, v_row, v_head, v_slot,
    phi_k_row, phi_k_head, bias_row, units, group, shared, slots, factor, softcap, least,
    WINDOW: tl.constexpr, HIDES: tl.constexpr, LINEAR: tl.constexpr, WRITES: tl.constexpr, LEAVES: tl.constexpr,
    AHEAD: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    F: tl.constexpr, BLOCK_F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y = (g num_w + num_l) / (g den_w + den_l), g = sigmoid(window_factor), or num / den of the only part.

    A program computes SIDE columns of the values, for one row and one unit (a head of the state; without a linear part,
    a KV head) with its `group` of adjacent query heads. It writes the token to its row's `slot`. HIDES: slots whose
    `bias` is not 0 are not read. WRITES: `phi_k` times `enters` is added to the state before it is read, with the value
    in the slot `entering` (LEAVES) or the token's own value. AHEAD: it is added to the state `ahead` of a terraced
    span instead, which replaces the state where a block `begins`.
    """
    unit, row = tl.program_id(0) % units, (tl.program_id(0) // units).to(tl.int64)
    head, m, d = unit // shared, tl.arange(0, M), tl.arange(0, BLOCK_D)
    c = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    own, wide, column, of = m < group, d < D, c < D, unit * group + m
    writer = unit % shared == 0  # units can share slots, which one of them writes
    top = tl.full([M], -float("inf"), tl.float32)
    total, sums = tl.zeros([M], tl.float32), tl.zeros([M, SIDE], tl.float32)
    den, num = total, sums
    new_v_at = new_v + row * new_v_row + head * new_v_head + c
    v_at = v + row * v_row + head * v_head + c
    if WINDOW:
        x = tl.load(q + row * q_row + of[:, None] * q_head + d[None], own[:, None] & wide[None], 0.0)
        new_key = tl.load(new_k + row * new_k_row + head * new_k_head + d, wide, 0.0)
        new_value = tl.load(new_v_at, column, 0.0)
        k_at = k + row * k_row + head * k_head + d[:, None]
        next_at = (row * (units // shared) + head) * slots
        own_slot = tl.load(slot + row)
        for i in range((slots - 1) // N + 1):
            j = i * N + tl.arange(0, N)
            inside, new = j < slots, j == own_slot
            keys = tl.load(k_at + j[None] * k_slot, inside[None] & wide[:, None], 0.0)
            keys = tl.where(new[None], new_key[:, None], keys)
            values = tl.load(v_at[None] + j[:, None] * v_slot, inside[:, None] & column[None], 0.0)
            values = tl.where(new[:, None], new_value[None], values)
            scores = tl.dot(x, keys, input_precision=PRECISION) * factor
            if SOFTCAP:
                scores = capped(scores, softcap)
            seen = inside
            if HIDES:
                seen = tl.load(bias + row * bias_row + j, inside, -float("inf")) == 0
            top, total, sums = added(scores, seen[None] & own[:, None], values, top, total, sums, PRECISION)
            places = (next_at + j) * D
            if tl.program_id(1) == 0:
                tl.store(next_k + places[None] + d[:, None], keys, (inside & writer)[None] & wide[:, None])
            tl.store(next_v + places[:, None] + c[None], values, (inside & writer)[:, None] & column[None])
    if LINEAR:
        f, state = tl.arange(0, BLOCK_F), row * units + unit
        tall = f < F
        S_at, inside = state * F * D + f[:, None] * D + c[None], tall[:, None] & column[None]
        matrix, vector = tl.load(S + S_at, inside, 0.0), tl.load(z + state * F + f, tall, 0.0)
        if WRITES:
            key = tl.load(phi_k + row * phi_k_row + unit * phi_k_head + f, tall, 0.0) * tl.load(enters + row)
            value_at = new_v_at
            if LEAVES:
                value_at = v_at + tl.load(entering + row) * v_slot
            value = tl.load(value_at, column, 0.0).to(tl.float32)
            added_S = key[:, None] * value[None]
            if AHEAD:
                later, later_z = tl.load(ahead_S + S_at, inside, 0.0), tl.load(ahead_z + state * F + f, tall, 0.0)
                now = tl.load(begins + row) != 0
                matrix, vector = tl.where(now, later, matrix), tl.where(now, later_z, vector)
                tl.store(next_ahead_S + S_at, later + added_S, inside)
                if tl.program_id(1) == 0:
                    tl.store(next_ahead_z + state * F + f, later_z + key, tall)
            else:
                matrix, vector = matrix + added_S, vector + key
            tl.store(next_S + S_at, matrix, inside)
            if tl.program_id(1) == 0:
                tl.store(next_z + state * F + f, vector, tall)
        phi = tl.load(phi_q + (row * units * group + of)[:, None] * F + f[None], own[:, None] & tall[None], 0.0)
        den = tl.sum(phi * vector[None], 1)
        num = tl.dot(phi, matrix, input_precision=PRECISION)
    shares = total
    if WINDOW and LINEAR:
        shares = tl.load(window_factor + of, own, 0.0).to(tl.float32)
    out = _quotient(sums, total, num, den, shares, least, WINDOW, LINEAR)
    tl.store(y + (row * units * group + of)[:, None] * D + c[None], out, own[:, None] & column[None])
