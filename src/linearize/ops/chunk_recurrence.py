"""Compute vector decays and the delta rule as recurrences over chunks, in O(T) time and memory.

Autograd computes the backward pass.

Keys are moved `span.linear_delay` slots to the right, to the slot of the first query that reads them. Terraced spans
read whole terraces: their keys stand less than `window_size` slots before that query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.configs.spans import NoSpan, Span, TerracedSpan
from linearize.ops.block_sizes import kind
from linearize.ops.decays import decay_factor, decayed_scores, decayed_sums, masked_log_decay
from linearize.ops.grid import BlockArgs, Body, ChunkLayout, Grads, Grid, Tensors, pick, scan
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial, accumulation_dtype

CHUNK = 64
# Scores per block: on a CPU, most of the 12 to 24 tensors of that size should stay in cache.
BLOCK_SCORES = {"cpu": 2**17, "cuda": 2**23}
# Blocks take more heads before more chunks: heads are parallel, chunks sequential. But each segment stores a state.
MIN_CHUNKS_PER_BLOCK = 4


class Masks(NamedTuple):
    """Masks of a block: 1 (or true) where a key, query or state counts, 0 elsewhere.

    The state has R registers. The first sums all keys so far. For terraced spans, a second one sums the keys before the
    current terrace, which the queries of this terrace read.
    """

    query: Float[Tensor, "b 1 n C 1"]
    key: Float[Tensor, "b 1 n C 1"]  # there is a linear key, so its step decays too
    near: Float[Tensor, "b 1 n C C"]  # a query reads a key of its chunk, if it is not a later one
    reads: Float[Tensor, "b 1 n C R"]  # a query reads a register as it stands before the chunk
    enters: Float[Tensor, "b 1 n C R"]  # a key enters a register by the end of the chunk
    keeps: Float[Tensor, "b 1 n 1"]  # the registers keep their sums through the chunk
    catches_up: Bool[Tensor, "b 1 n"] | None  # a terrace begins in the chunk: the second register starts from the first


def power_of_two_chunks(layout: SequenceLayout) -> ChunkLayout:
    """Return chunks whose size is a power of 2, which `decays` halves again and again."""
    chunk = CHUNK
    while chunk > max(16, layout.key_position.shape[1]):
        chunk //= 2
    return ChunkLayout(layout, chunk)


# (masks, S, queries [b, H, L, X], keys [b, h, n, C, X] of each further input) -> (outputs [b, H, L, width], next S)
Segment = Callable[..., tuple[Tensor, Tensor]]


class ChunkRecurrence(Body):
    """Compute each segment by `segment`, which returns its outputs and the S of the next segment."""

    def __init__(self, slots: ChunkLayout, span: Span, q: Tensor, S: Tensor, segment: Segment) -> None:
        group, scores = q.shape[1] // S.shape[1], BLOCK_SCORES[kind(S.device)]
        at_once = scores // (group * slots.chunk**2)
        max_chunks = max(MIN_CHUNKS_PER_BLOCK, at_once // (S.shape[0] * S.shape[1]))
        self.grid = Grid(slots, S.shape[:2], group, at_once, max_chunks, delay=span.linear_delay)
        self.segment, self.sinks, self.dtype, self.terrace = segment, span.sinks, S.dtype, None
        if isinstance(span, TerracedSpan):
            begins = (self.grid.position >= 0) & (self.grid.position % span.window_size == 0)
            self.terrace = F.pad(begins.cumsum(1), (1, 0))

    def masks(self, batch: slice, start: int, stop: int) -> Masks:
        grid = self.grid
        position, document, owner = grid.around(batch, start, stop)
        near = document.queries[..., None] == document.keys[:, :, None]
        reads, enters = document.queries == owner[:, :-1, None], document.keys == owner[:, 1:, None]
        keeps, catches_up = owner[:, :-1] == owner[:, 1:], None
        if self.terrace is None:
            reads, enters = reads[..., None], enters[..., None]
        else:
            terrace = pick(self.terrace, batch)[:, start : stop + 1]
            bounds, terrace = terrace[:, :: grid.chunk], terrace[:, 1:].unflatten(1, (-1, grid.chunk))
            near &= terrace[:, :, None] < terrace[..., None]
            began_before = terrace == bounds[:, :-1, None]
            reads = torch.stack([reads & ~began_before, reads & began_before], dim=-1)
            enters = torch.stack([enters, enters & (terrace < bounds[:, 1:, None])], dim=-1)
            catches_up = (bounds[:, 1:] > bounds[:, :-1])[:, None]
        query, key = position.queries >= 0, position.keys >= self.sinks
        numbers = query[..., None], key[..., None], near, reads, enters, keeps[..., None]
        query, key, near, reads, enters, keeps = (x[:, None].to(self.dtype) for x in numbers)
        return Masks(query, key, near, reads, enters, keeps, catches_up)

    def forward(self, args: BlockArgs, outputs: Tensors) -> Tensors:
        y, S = self.segment(args.block.masks, *args.state, *self._of_block(args))
        self.grid.query_rows(outputs[0], args.block).copy_(y)
        return (S,)

    def backward(self, args: BlockArgs, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        block, (S, *leaves) = args.block, [x.detach() for x in (*args.state, *self._of_block(args))]
        wanted = [S, *(x for x, grad in zip(leaves, grads, strict=True) if grad is not None)]
        for x in wanted:
            x.requires_grad_()
        with torch.enable_grad():
            outputs = self.segment(args.block.masks, S, *leaves)
        grad_y = self.grid.query_rows(grad_outputs[0], block)
        grad_S, *found = torch.autograd.grad(outputs, wanted, (grad_y, *grad_after))
        if grads[0] is not None:
            self.grid.query_rows(grads[0], block).copy_(found.pop(0))
        for grad, g in zip((x for x in grads[1:] if x is not None), found, strict=True):
            self.grid.add_keys(grad, block, g)
        return (grad_S,)

    def _of_block(self, args: BlockArgs) -> list[Tensor]:
        queries, *keys = args.inputs
        return [self.grid.query_rows(queries, args.block), *(self.grid.keys(x, args.block) for x in keys)]


# --- the delta rule ---------------------------------------------------------------------------------------------------


def delta_values(x: LinearInputs) -> Float[Tensor, "B Hk K D"]:
    """Return u_j = beta_j (v_j - (D_k S)^T phi_k(j)), as `reference.delta_values`.

    Keys are written in order, regardless of the window: only the sinks of the span matter here.
    """
    assert x.beta is not None
    dtype, slots = accumulation_dtype(x.v.dtype), power_of_two_chunks(x.layout)
    batch, heads, _, features = x.phi_k.shape
    beta = x.beta * (x.layout.key_position >= x.span.sinks)[:, None, :, None]
    tensors = [slots.spread(tensor.to(dtype)) for tensor in (x.phi_k, repeat_kv(x.v, heads), beta)]
    if x.log_decay_k is not None:
        log_decay = masked_log_decay(x.log_decay_k.to(dtype), x.span, x.layout)
        tensors.append(slots.spread(log_decay.expand(batch, -1, -1, -1)))
    width = x.v.shape[3]
    S = x.v.new_zeros(batch, heads, features, width, dtype=dtype) if x.state is None else x.state.S.to(dtype)
    body = ChunkRecurrence(slots, NoSpan(), tensors[0], S, _delta_segment)
    (u,) = scan(body, (width,), (S,), *tensors)
    return slots.collect(u, slots.length)


def _delta_segment(
    masks: Masks,
    S: Float[Tensor, "b h F D"],
    k: Float[Tensor, "b h L F"],
    v: Float[Tensor, "b h n C D"],
    beta: Float[Tensor, "b h n C 1"],
    log_decay: Float[Tensor, "b h n C X"] | None = None,
) -> tuple[Float[Tensor, "b h L D"], Float[Tensor, "b h F D"]]:
    """Return u of n chunks of C slots, and the next S.

    Within a chunk u solves a triangular system (the UT transform):
    u_i + beta_i sum_{j < i} (k_i . e^{G_i - G_j} k_j) u_j = beta_i (v_i - (e^{G_i} S)^T k_i).
    """
    k, beta = k.unflatten(2, v.shape[2:4]), beta * masks.key
    overlaps, reading, entering, kept = decayed_scores(k[..., None, :], k, log_decay)
    overlaps = _flush(overlaps.squeeze(-2) * masks.near * beta)
    identity = torch.eye(k.shape[3], dtype=k.dtype, device=k.device).expand_as(overlaps)
    inverse = _flush(torch.linalg.solve_triangular(overlaps, identity, upper=False, unitriangular=True)) * beta.mT
    written, erasing = inverse @ v, _flush(inverse @ (reading.squeeze(-2) * masks.reads))
    entering, kept, u = (entering * masks.enters).mT, (kept * masks.keeps)[..., None], []
    for c in range(k.shape[2]):
        u.append(written[:, :, c] - erasing[:, :, c] @ S)
        S = S * kept[:, :, c] + entering[:, :, c] @ u[-1]
    return torch.cat(u, dim=2), S


def _flush(x: Tensor) -> Tensor:
    """Replace numbers whose products would be denormal by 0: denormal arithmetic is up to a hundred times slower."""
    return torch.nn.functional.hardshrink(x, torch.finfo(x.dtype).tiny * 1e8)


# --- features or values that decay each at their own rate -------------------------------------------------------------


def vector_decay_scan(x: LinearInputs) -> Partial:
    """Return the linear part (`reference.linear_scan`) with decays on the feature axis, the value axis, or both.

    A query reads the state from before its window, decayed by the steps of the window. So keys are delayed by the
    window and queries are multiplied by the decays of these steps. The rest is a scan without a window.
    """
    dtype, slots, span, layout = accumulation_dtype(x.v.dtype), power_of_two_chunks(x.layout), x.span, x.layout
    batch, heads, _, features = x.phi_k.shape
    q, k, v = (slots.spread(tensor.to(dtype)) for tensor in (x.queries(), x.phi_k, repeat_kv(x.v, heads)))
    decays, skipped = {}, {}
    lag = min(span.linear_delay, q.shape[2])
    for name, log_decay in (("log_decay_k", x.log_decay_k), ("log_decay_v", x.log_decay_v)):
        if log_decay is not None:
            decays[name] = slots.spread(masked_log_decay(log_decay.to(dtype), span, layout).expand(batch, -1, -1, -1))
            if lag:
                skipped[name] = decay_factor(repeat_kv(_last(decays[name], lag, slots.chunk), q.shape[1]))
    if "log_decay_k" in skipped:
        q = q * skipped["log_decay_k"]
    if x.state is None:
        S = x.phi_k.new_zeros(batch, heads, features, v.shape[3] + 1, dtype=dtype)
    else:
        S = torch.cat([x.state.S, x.state.z[..., None]], dim=-1).to(dtype)

    S = S[:, :, None].expand(-1, -1, 1 + isinstance(span, TerracedSpan), -1, -1)
    body = ChunkRecurrence(slots, span, q, S, partial(_decay_segment, tuple(decays)))
    (out,) = scan(body, S.shape[-1:], (S,), q, k, v, *decays.values())
    num, den = out[..., :-1], out[..., -1:]
    if "log_decay_v" in skipped:
        num = num * skipped["log_decay_v"]
    den = slots.collect(den, layout.length).squeeze(-1)
    return Partial(slots.collect(num, layout.length), den, torch.zeros_like(den))


def _last(steps: Float[Tensor, "B h P X"], count: int, chunk: int) -> Float[Tensor, "B h P X"]:
    """Return the sum of the last `count` steps at each slot, by products with 0 and 1: faster than a running sum."""
    chunks, slot = steps.unflatten(2, (-1, chunk)), torch.arange(chunk, device=steps.device)
    n, whole = chunks.shape[2], count // chunk
    # Whole chunks between the slot's own chunk and those that may hold the first step. Differences need float64.
    before = torch.nn.functional.pad(chunks.sum(3).double().cumsum(2), (0, 0, 1, 0))[:, :, :n]
    last = before - torch.nn.functional.pad(before, (0, 0, max(whole - 1, 0), 0))[:, :, :n]
    last = last.to(steps.dtype)[:, :, :, None]
    for back in sorted({0, whole, whole + 1}):
        distance = slot[:, None] - slot + back * chunk
        inside = ((distance >= 0) & (distance < count)).to(steps.dtype)
        last = last + torch.nn.functional.pad(inside @ chunks, (0, 0, 0, 0, back, 0))[:, :, :n]
    return last.flatten(2, 3)


def _decay_segment(
    names: tuple[str, ...],
    masks: Masks,
    S: Float[Tensor, "b h R F E"],
    q: Float[Tensor, "b H L F"],
    k: Float[Tensor, "b h n C F"],
    v: Float[Tensor, "b h n C D"],
    *decays: Float[Tensor, "b h n C _"],
) -> tuple[Float[Tensor, "b H L E"], Float[Tensor, "b h R F E"]]:
    """Return num and den concatenated, E = D + 1, and the next S. den is the num of a constant 1 that never decays.

    `names` has one of "log_decay_k", "log_decay_v" for each of `decays`. Axes: n chunks of C slots, g = H / h query
    heads per key head, R registers.
    """
    (heads, n, chunk), (registers, features) = k.shape[1:4], S.shape[2:4]
    of_axes = dict(zip(names, decays, strict=True))
    log_decay_k, log_decay_v = of_axes.get("log_decay_k"), of_axes.get("log_decay_v")
    q = q.unflatten(2, (n, chunk)).unflatten(1, (heads, -1)).movedim(2, 4) * masks.query[..., None]
    v = torch.nn.functional.pad(v, (0, 1), value=1)
    scores, q, k, kept = decayed_scores(q, k * masks.key, log_decay_k)
    scores, kept = scores * masks.near[:, :, :, :, None], (kept * masks.keeps)[..., None]
    if log_decay_v is None:
        near, into = (scores.flatten(3, 4) @ v).unflatten(3, (chunk, -1)), None
    else:
        near, into, v, kept_v = decayed_sums(scores, v, torch.nn.functional.pad(log_decay_v, (0, 1)))
        kept = kept * kept_v[..., None, :]

    entering = (k[..., None, :] * masks.enters[..., None]).flatten(4)
    added, states = (entering.mT @ v).unflatten(3, (registers, features)), []
    for c in range(n):
        states.append(S)
        if masks.catches_up is not None:
            S = torch.where(masks.catches_up[:, :, c, None, None, None], S[:, :, :1], S)
        S = torch.addcmul(added[:, :, c], S, kept[:, :, c, None])
    reading = (q[..., None, :] * masks.reads[:, :, :, :, None, :, None]).flatten(5).flatten(3, 4)
    far = (reading @ torch.stack(states, dim=2).flatten(3, 4)).unflatten(3, (chunk, -1))
    out = near + (far if into is None else far * into[..., None, :])
    return out.movedim(4, 2).flatten(3, 4).flatten(1, 2), S
