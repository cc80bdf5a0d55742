"""Softmax over a window and sinks in linear time and memory, any length: scores by chunks, forward and backward.

The backward pass computes a block's scores again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.configs.spans import Span
from linearize.ops.grid import (
    Body,
    ChunkLayout,
    Given,
    Grads,
    Grid,
    Tensors,
    chunks_back,
    make_grid,
    pick,
    scan,
)
from linearize.ops.inputs import SoftmaxInputs
from linearize.ops.partial import Partial, accumulation_dtype

WINDOW_CHUNK = 32  # shorter than those of the linear part: fewer of the near keys' scores are masked
LOG2_E = math.log2(math.e)


def window_softmax(x: SoftmaxInputs) -> Partial:
    """The softmax part (`reference.window_softmax`) in O(T w) time and O(T) memory, forward and backward."""
    span, layout, dtype = x.span, x.layout, accumulation_dtype(x.v.dtype)
    slots = ChunkLayout(layout, min(WINDOW_CHUNK, max(16, span.max_lag)))
    q, k, v = (slots.spread(tensor.to(dtype)) for tensor in (x.q, x.k, x.v))
    first = min(chunks_back(slots, span.max_lag), slots.num_chunks - 1)
    grid = make_grid(slots, q, k, first)
    slot, sinks_seen = _far_sinks(grid, slots, span)
    sink_k, sink_v = (_take(tensor, slot) for tensor in (k, v))
    body = _WindowSoftmax(grid, span, x.scaling, x.softcap, sinks_seen, dtype)
    num, rest = scan(body, (v.shape[3], 2), (), q, k, v, sink_k, sink_v)
    return Partial(slots.collect(num, layout.length), *slots.collect(rest, layout.length).unbind(-1))


def _far_sinks(grid: Grid, slots: ChunkLayout, span: Span) -> tuple[Int[Tensor, "#B N s"], Bool[Tensor, "#B N s"]]:
    """Slots of the sinks that lie below the near keys of each chunk, and which of them there are.

    They belong to one document, that of the slot before: the others that a chunk holds begin among its near keys.
    """
    owner = grid.owner[:, :-1, None].long()
    start = (torch.arange(slots.num_chunks, device=owner.device)[:, None] - grid.first) * slots.chunk
    before = F.pad(grid.position, (1, 0), value=-1)[:, : slots.num_chunks * slots.chunk : slots.chunk]
    sink = torch.arange(span.sinks, device=owner.device)
    slot = start - 1 - before[..., None] + sink
    if slots.layout.sink_slots:
        moved = (slots.position[:, None, : span.sinks] == sink) & (owner == 0)
        slot = torch.where(moved, sink, slot)
    there = (slot >= 0) & (slot < start)
    slot = torch.where(there, slot, 0)
    position, document = (x.gather(1, slot.flatten(1)).view_as(slot) for x in (slots.position, slots.document))
    return slot, there & (position == sink) & (document == owner)


def _take(x: Float[Tensor, "B G P D"], slot: Int[Tensor, "#B N s"]) -> Float[Tensor, "B G N s D"]:
    index = slot.flatten(1)[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3])
    return x.gather(2, index).unflatten(2, slot.shape[1:])


@dataclass(frozen=True)
class _WindowSoftmax(Body):
    """num, and den beside log_scale, of the inputs q, k, v and the far sinks of k and v; there is no state."""

    grid: Grid
    span: Span
    scaling: float
    softcap: float | None
    sinks_seen: Bool[Tensor, "#B N s"]  # of the far sinks
    dtype: torch.dtype

    def masks(self, batch: slice, start: int, stop: int) -> Float[Tensor, "b 1 n gC Ws"]:
        """0 where a query sees a near key or a far sink, -inf elsewhere."""
        grid, span = self.grid, self.span
        position, document, owner = grid.around(batch, start, stop)
        query, near = position.queries[..., None], position.near[:, :, None]
        seen = (near >= span.lo(query).clamp_min(0)) & (near <= query)
        if span.sinks:
            seen |= (near >= 0) & (near < span.sinks) & (near <= query)
        seen &= document.near[:, :, None] == document.queries[..., None]
        if span.sinks:
            sinks = pick(self.sinks_seen, batch)[:, start // grid.chunk : stop // grid.chunk, None]
            reads = (document.queries == owner[:, :-1, None])[..., None] & (query >= 0)
            seen = torch.cat([seen, reads & sinks], dim=3)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return grid.repeat_queries(bias[:, None])

    def forward(self, given: Given, outputs: Tensors) -> Tensors:
        (num, rest), block, x = outputs, given.block, _WindowBlock(self, given)
        weights = x.below_top.exp2_()
        self.grid.put_product(num, block, weights, x.v)
        self.grid.put_queries(rest, block, torch.cat([weights.sum(-1, keepdim=True), x.log_scale], dim=-1))
        return ()

    def backward(self, given: Given, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        grid, block, x = self.grid, given.block, _WindowBlock(self, given)
        is_top, equals = _largest(x.below_top)
        weights = x.below_top.exp2_()
        g_num, g_rest = (grid.queries(g, block) for g in grad_outputs)
        g_den, g_log_scale = g_rest.split(1, dim=-1)
        g_scores = (g_num @ x.v.mT).add_(g_den).mul_(weights)
        share = (g_log_scale - g_scores.sum(-1, keepdim=True)) / equals
        g_scores.addcmul_(is_top, share)
        if x.slope is not None:
            g_scores.mul_(x.slope)
        grad_q, grad_k, grad_v, grad_sink_k, grad_sink_v = grads
        if grad_q is not None:
            grid.put_queries(grad_q, block, (g_scores @ x.k).mul_(self.scaling))
        g_keys, g_values = (g_scores.mT @ x.q).mul_(self.scaling), weights.mT @ g_num
        near = (grid.first + 1) * grid.chunk
        for grad, grad_sink, g in ((grad_k, grad_sink_k, g_keys), (grad_v, grad_sink_v, g_values)):
            if grad is not None and grad_sink is not None:
                grid.add_keys(grad, block, grid.fold(g[:, :, :, :near]))
                grad_sink[block.rows][:, :, x.chunks] = g[:, :, :, near:]
        return ()


def _largest(below_top: Float[Tensor, "*rows W"]) -> tuple[Float[Tensor, "*rows W"], Float[Tensor, "*rows 1"]]:
    """1 where a score is the largest, and how many are.

    The largest one is log_scale, and is taken off all others. Equals share its gradient, as in amax.
    """
    is_top = (below_top == 0).to(below_top.dtype)
    return is_top, is_top.sum(-1, keepdim=True).clamp_min(1)


class _WindowBlock:
    """Scores, which forward and backward share: logarithms to base 2, whose powers take a fourth of the time of e's."""

    def __init__(self, window: _WindowSoftmax, given: Given) -> None:
        block, _, (q, k, v, sink_k, sink_v) = given
        bias, grid, softcap = block.masks, window.grid, window.softcap
        self.chunks = slice(block.start // grid.chunk, block.stop // grid.chunk)
        self.k, self.v = grid.near(grid.keys(k, block)), grid.near(grid.keys(v, block))
        if sink_k.shape[3]:
            self.k = torch.cat([self.k, sink_k[block.rows][:, :, self.chunks]], dim=3)
            self.v = torch.cat([self.v, sink_v[block.rows][:, :, self.chunks]], dim=3)
        unit = LOG2_E if softcap is None else 1 / softcap
        self.q = grid.queries(q, block)
        scores = torch.baddbmm(
            bias.expand(*self.q.shape[:2], -1, -1, -1).flatten(0, 2) if softcap is None else bias.new_zeros(()),
            self.q.flatten(0, 2),
            self.k.flatten(0, 2).mT,
            alpha=window.scaling * unit,
        ).unflatten(0, self.q.shape[:3])
        self.slope = None
        if softcap is not None:
            scores.tanh_()
            self.slope = 1 - scores.square()
            scores.mul_(softcap * LOG2_E).add_(bias)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        self.below_top = scores.sub_(top)  # of which the weights are powers of 2
        self.log_scale = top.div_(LOG2_E)
