"""Linear time and memory, any length: softmax scores and linear scores by chunks, the linear state carried between.

Linear keys lie as late as the first query that reads them, so a window costs the scan nothing: each query reads its own
chunk through masked scores and all chunks before through the state (a terrace is read as a whole, so there are some
more chunks of scores). The backward passes compute a block's scores and states again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops import vector
from linearize.ops.blockwise import Block, Grid, pick
from linearize.ops.decay import ticking
from linearize.ops.layout import Layout
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.slots import Slots
from linearize.ops.span import Span
from linearize.ops.state import LinearState, expand_heads

CHUNK = 64
WINDOW_CHUNK = 32  # shorter: fewer of the near keys' scores are masked
# Scores per block: large enough to fill the device, small enough on a CPU to stay in cache and off fresh pages.
BLOCK_SCORES = {"cpu": 2**18, "cuda": 2**26}
MAX_CHUNKS_PER_BLOCK = 64  # carrying the state from chunk to chunk costs the square of their number
# Decays of less than e to this are 0: arithmetic with denormal numbers, which their products are, takes twice the time.
NEGLIGIBLE = {torch.float32: -80.0, torch.float64: -700.0}
LOG2_E = math.log2(math.e)


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """The linear part (`reference.linear_scan`) in O(T) time and memory, forward and backward."""
    if log_decay_v is not None or (log_decay_k is not None and log_decay_k.shape[-1] > 1):
        decays = {"log_decay_k": log_decay_k, "log_decay_v": log_decay_v}
        return vector.linear_scan(phi_q, phi_k, v, **decays, span=span, layout=layout, state=state)
    dtype, slots = accumulation_dtype(v.dtype), Slots(layout, CHUNK)
    sums = None
    if log_decay_k is not None:
        ticks = slots.spread(ticking(log_decay_k, span, layout).expand(len(phi_k), -1, -1, -1))
        sums = ticks.squeeze(-1).double().cumsum(-1)
    phi_q, phi_k, v = (slots.spread(x.to(dtype)) for x in (phi_q, phi_k, expand_heads(v, phi_k.shape[1])))
    # Keys lie beside the first query that reads them, at the latest. Of query chunk c, keys in chunks c - first .. c
    # are read through scores, all before through the state.
    first = min(_chunks_back(slots, span.max_lag - span.fold_lag), slots.num_chunks - 1)
    grid = _grid(slots, phi_q, phi_k, first, delay=min(span.fold_lag, slots.num_chunks * slots.chunk))
    S = v.new_zeros(*phi_k.shape[:2], phi_k.shape[3], v.shape[3]) if state is None else state.S.to(dtype)
    z = v.new_zeros(*phi_k.shape[:2], phi_k.shape[3]) if state is None else state.z.to(dtype)
    num, den = _LinearScan.apply(grid, partial(_linear_masks, grid, span, dtype), sums, phi_q, phi_k, v, S, z)
    den = slots.collect(den).squeeze(-1)
    return Partial(slots.collect(num), den, torch.zeros_like(den))


def window_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    scaling: float,
    softcap: float | None = None,
    layout: Layout,
) -> Partial:
    """The softmax part (`reference.window_softmax`) in O(T w) time and O(T) memory, forward and backward."""
    dtype, slots = accumulation_dtype(v.dtype), Slots(layout, min(WINDOW_CHUNK, max(16, span.max_lag)))
    q, k, v = (slots.spread(x.to(dtype)) for x in (q, k, v))
    first = min(_chunks_back(slots, span.max_lag), slots.num_chunks - 1)
    grid = _grid(slots, q, k, first)
    slot, sinks_seen = _far_sinks(grid, slots, span)
    sink_k, sink_v = (_take(x, slot) for x in (k, v))
    bias = partial(_window_bias, grid, span, sinks_seen, dtype)
    num, rest = _WindowSoftmax.apply(grid, bias, scaling, softcap, q, k, v, sink_k, sink_v)
    return Partial(slots.collect(num), *slots.collect(rest).unbind(-1))


def _chunks_back(slots: Slots, max_lag: int) -> int:
    """What lies less than `max_lag` slots before a query is at most that many chunks before its own."""
    return -((1 - max(1, max_lag)) // slots.chunk)


def _grid(slots: Slots, q: Tensor, k: Tensor, first: int, delay: int = 0) -> Grid:
    max_scores = BLOCK_SCORES["cpu" if q.device.type == "cpu" else "cuda"]
    rows, group = (k.shape[0], k.shape[1]), q.shape[1] // k.shape[1]
    return Grid(slots, rows, group, first, first + 1, max_scores, MAX_CHUNKS_PER_BLOCK, delay)


class _LinearMasks(NamedTuple):
    """0 where something does not count; 1, or what its decays leave of it, where it does. None: everything counts.

    y is h, or 1 where there are no decays, and all heads share the masks.
    """

    near: Float[Tensor, "b y n gC W"]  # a query reads a near key
    reads: Float[Tensor, "b y n gC 1"] | None  # a query reads the state before its chunk's near keys
    enters: Float[Tensor, "b y n C 1"] | None  # a key enters the state
    into: Float[Tensor, "b y N1 N1"]  # what an old chunk adds (first: the carried state) is in the state of a chunk


def _linear_masks(grid: Grid, span: Span, dtype: torch.dtype, batch: slice, start: int, stop: int) -> _LinearMasks:
    q_position, near_position, k_position = grid.around(grid.query_position, grid.position, batch, start, stop)
    q_document, near_document, k_document = grid.around(grid.query_document, grid.document, batch, start, stop)
    near = near_position[:, :, None] < span.lo(q_position)[..., None]
    near &= (near_position >= span.sinks)[:, :, None]
    near &= near_document[:, :, None] == q_document[..., None]
    near = grid.per_query_head(near.to(dtype))
    # The document of the slot before a chunk's near keys owns the state there, which holds its keys and no others.
    owner = pick(grid.owner, batch)[:, start // grid.chunk : stop // grid.chunk + 1]
    into = (owner[:, :, None] == owner[:, None, :]).tril().to(dtype)[:, None]
    if grid.uniform and not span.sinks:
        return _LinearMasks(near, None, None, into)
    n = q_position.shape[1]
    reads = (q_document == owner[:, :n, None]) & (q_position >= 0)
    enters = (k_document[:, :n] == owner[:, 1:, None]) & (k_position[:, :n] >= span.sinks)
    return _LinearMasks(
        near, grid.per_query_head(reads[..., None].to(dtype)), enters[:, None, ..., None].to(dtype), into
    )


def _decayed(
    masks: _LinearMasks, grid: Grid, block: Block, sums: Float[Tensor, "B Hk P"], key_sums: Float[Tensor, "B Hk Q"]
) -> _LinearMasks:
    """The masks with the decays between the step that writes and the step that reads.

    `sums` are those of the log decays up to each slot, `key_sums` the same where the keys lie, behind one more 0.
    Differences of sums are taken in float64, and no exponent is positive where something counts.
    """
    dtype, chunk, first = masks.near.dtype, grid.chunk, grid.first * grid.chunk
    queries = sums[block.rows][..., block.start : block.stop].unflatten(2, (-1, chunk))
    rows = key_sums[block.rows][..., block.start : block.stop + first + 1]
    n = (block.stop - block.start) // chunk
    boundary = rows[..., : (n + 1) * chunk : chunk]  # before the near keys of each chunk, and of the one after the last
    rows = rows[..., 1:]
    old = rows[..., : n * chunk].unflatten(2, (-1, chunk))

    def left(later: Tensor, earlier: Tensor) -> Tensor:
        exponent = (later - earlier).clamp_max_(0).to(dtype)
        return torch.threshold_(exponent, NEGLIGIBLE[dtype], -torch.inf).exp_()

    keys = rows.unfold(2, grid.count * chunk, chunk)[:, :, :n]
    near = left(queries[..., None], keys[:, :, :, None])
    reads = grid.repeat_queries(left(queries, boundary[..., :n, None])[..., None])
    enters = left(boundary[..., 1:, None], old)[..., None]
    return _LinearMasks(
        grid.repeat_queries(near).mul_(masks.near),
        reads if masks.reads is None else reads.mul_(masks.reads),
        enters if masks.enters is None else enters.mul_(masks.enters),
        left(boundary[..., None], boundary[:, :, None]).mul_(masks.into),
    )


def _key_sums(grid: Grid, sums: Float[Tensor, "B Hk P"]) -> Float[Tensor, "B Hk Q"]:
    return F.pad(grid.lay_keys(sums, empty=0), (1, 0))


def _times(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


class _LinearBlock:
    """What forward and backward of a block share."""

    def __init__(self, grid: Grid, block: Block, masks: _LinearMasks, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> None:
        self.into = masks.into
        keys, values = grid.keys(phi_k, block), grid.keys(v, block)
        self.q, self.near_k, self.near_v = grid.queries(phi_q, block), grid.near(keys), grid.near(values)
        self.scores = (self.q @ self.near_k.mT).mul_(masks.near)
        n = self.q.shape[2]
        self.old_k, self.old_v = _times(keys[:, :, :n], masks.enters), values[:, :, :n]
        self.reads = _times(self.q, masks.reads)

    def states(
        self, S: Float[Tensor, "b h F D"], z: Float[Tensor, "b h F"]
    ) -> tuple[Float[Tensor, "b h N1 F D"], Float[Tensor, "b h N1 F"]]:
        """The state before the near keys of each chunk, and of the chunk after the last; S, z is that of the first."""
        b, h, n = self.old_k.shape[:3]
        all_S, all_z = S.new_empty(b, h, n + 1, *S.shape[2:]), z.new_empty(b, h, n + 1, z.shape[2])
        all_S[:, :, 0], all_z[:, :, 0] = S, z
        if b * h == 1:  # into its place: memory that is touched once costs as much as the product
            torch.bmm(self.old_k[0, 0].mT, self.old_v[0, 0], out=all_S[0, 0, 1:])
        else:
            all_S[:, :, 1:] = self.old_k.mT @ self.old_v
        torch.sum(self.old_k, -2, out=all_z[:, :, 1:])
        return (self.into @ all_S.flatten(3)).view_as(all_S), self.into @ all_z


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grid: Grid,
        masks: Callable[[slice, int, int], _LinearMasks],
        sums: Float[Tensor, "B Hk P"] | None,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        S: Tensor,
        z: Tensor,
    ) -> tuple[Float[Tensor, "B H P D"], Float[Tensor, "B H P 1"]]:
        num, den = v.new_empty(*phi_q.shape[:3], v.shape[3]), v.new_empty(*phi_q.shape[:3], 1)
        # The state before each stretch of slots.
        all_S, all_z = (x.expand(grid.num_stretches + 1, *x.shape).clone() for x in (S, z))
        key_sums = None if sums is None else _key_sums(grid, sums)
        for block, mask in grid.blocks(masks):
            mask = mask if sums is None or key_sums is None else _decayed(mask, grid, block, sums, key_sums)
            x = _LinearBlock(grid, block, mask, phi_q, phi_k, v)
            S, z = x.states(all_S[block.index][block.rows], all_z[block.index][block.rows])
            all_S[block.index + 1][block.rows], all_z[block.index + 1][block.rows] = S[:, :, -1], z[:, :, -1]
            from_state = (x.reads * z[:, :, :-1, None]).sum(-1, keepdim=True)
            grid.put_queries(den, block, from_state.add_(x.scores.sum(-1, keepdim=True)))
            grid.put_product(num, block, x.reads, S[:, :, :-1], added=(x.scores, x.near_v))
        ctx.save_for_backward(sums, phi_q, phi_k, v, all_S, all_z)
        ctx.grid, ctx.masks = grid, masks
        return num, den

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_num: Tensor, grad_den: Tensor) -> tuple[Tensor | None, ...]:
        sums, phi_q, phi_k, v, all_S, all_z = ctx.saved_tensors
        grid: Grid = ctx.grid
        grad_q, grad_k, grad_S, grad_z = torch.empty_like(phi_q), *map(torch.zeros_like, (phi_k, all_S[0], all_z[0]))
        # Attention transfer trains nothing but the features.
        grad_v = torch.zeros_like(v) if ctx.needs_input_grad[5] else None
        key_sums = None if sums is None else _key_sums(grid, sums)
        for block, mask in grid.blocks(ctx.masks, reverse=True):
            mask = mask if sums is None or key_sums is None else _decayed(mask, grid, block, sums, key_sums)
            x, n = _LinearBlock(grid, block, mask, phi_q, phi_k, v), (block.stop - block.start) // grid.chunk
            S, z = (y[:, :, :-1] for y in x.states(all_S[block.index][block.rows], all_z[block.index][block.rows]))
            g_num, g_den = grid.queries(grad_num, block), grid.queries(grad_den, block)
            # Of the states: a chunk's own reads, and what comes back from the slots behind; then of what they sum.
            g_S = torch.cat([x.reads.mT @ g_num, grad_S[block.rows][:, :, None]], dim=2)
            g_z = torch.cat([(x.reads * g_den).sum(-2), grad_z[block.rows][:, :, None]], dim=2)
            g_S, g_z = (mask.into.mT @ g_S.flatten(3)).view_as(g_S), mask.into.mT @ g_z
            grad_S[block.rows], grad_z[block.rows] = g_S[:, :, 0], g_z[:, :, 0]
            g_S, g_z = g_S[:, :, 1:], g_z[:, :, 1:, None]

            g_scores = (g_num @ x.near_v.mT).add_(g_den).mul_(mask.near)
            g_reads = _times((g_num @ S.mT).addcmul_(g_den, z[:, :, :, None]), mask.reads)
            grid.put_queries(grad_q, block, g_reads.add_(g_scores @ x.near_k))
            g_keys = grid.fold(g_scores.mT @ x.q)
            g_keys[:, :, :n] += _times((x.old_v @ g_S.mT).add_(g_z), mask.enters)
            grid.add_keys(grad_k, block, g_keys)
            if grad_v is not None:
                g_values = grid.fold(x.scores.mT @ g_num)
                g_values[:, :, :n] += x.old_k @ g_S
                grid.add_keys(grad_v, block, g_values)
        grad_sums = None
        if sums is not None and ctx.needs_input_grad[2]:
            # The sum G_n appears as e^{G_n} phi_q(n) and e^{-G_n} phi_k(n) only.
            reads = (phi_q * grad_q).sum(-1).unflatten(1, (-1, grid.group)).sum(2)
            grad_sums = reads.double() - (phi_k * grad_k).sum(-1)
        return None, None, grad_sums, grad_q, grad_k, grad_v, grad_S, grad_z


def _far_sinks(grid: Grid, slots: Slots, span: Span) -> tuple[Int[Tensor, "#B N s"], Bool[Tensor, "#B N s"]]:
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


def _window_bias(
    grid: Grid, span: Span, sinks_seen: Bool[Tensor, "#B N s"], dtype: torch.dtype, batch: slice, start: int, stop: int
) -> Float[Tensor, "b 1 n gC Ws"]:
    """0 where a query sees a near key or a far sink, -inf elsewhere."""
    position, near_position, _ = grid.around(grid.query_position, grid.position, batch, start, stop)
    document, near_document, _ = grid.around(grid.query_document, grid.document, batch, start, stop)
    position, near_position = position[..., None], near_position[:, :, None]
    seen = (near_position >= span.lo(position).clamp_min(0)) & (near_position <= position)
    if span.sinks:
        seen |= (near_position >= 0) & (near_position < span.sinks) & (near_position <= position)
    seen &= near_document[:, :, None] == document[..., None]
    if span.sinks:
        chunks = slice(start // grid.chunk, stop // grid.chunk)
        reads = (document == pick(grid.owner, batch)[:, chunks, None])[..., None] & (position >= 0)
        seen = torch.cat([seen, reads & pick(sinks_seen, batch)[:, chunks, None]], dim=3)
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    return grid.per_query_head(bias)


class _WindowBlock:
    """What forward and backward of a block share; in powers of 2, which take a fourth of the time of those of e."""

    def __init__(
        self,
        grid: Grid,
        block: Block,
        bias: Float[Tensor, "b 1 n gC Ws"],
        scaling: float,
        softcap: float | None,
        *tensors: Tensor,
    ) -> None:
        q, k, v, sink_k, sink_v = tensors
        self.chunks = slice(block.start // grid.chunk, block.stop // grid.chunk)
        self.k, self.v = grid.near(grid.keys(k, block)), grid.near(grid.keys(v, block))
        if sink_k.shape[3]:
            self.k = torch.cat([self.k, sink_k[block.rows][:, :, self.chunks]], dim=3)
            self.v = torch.cat([self.v, sink_v[block.rows][:, :, self.chunks]], dim=3)
        self.unit = LOG2_E if softcap is None else 1 / softcap
        self.q = grid.queries(q, block)
        scores = torch.baddbmm(
            bias.expand(*self.q.shape[:2], -1, -1, -1).flatten(0, 2) if softcap is None else bias.new_zeros(()),
            self.q.flatten(0, 2),
            self.k.flatten(0, 2).mT,
            alpha=scaling * self.unit,
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


class _WindowSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grid: Grid,
        bias: Callable[[slice, int, int], Float[Tensor, "b 1 n gC Ws"]],
        scaling: float,
        softcap: float | None,
        *tensors: Tensor,
    ) -> tuple[Float[Tensor, "B H P D"], Float[Tensor, "B H P 2"]]:
        """num, and den beside log_scale, of the tensors q, k, v and the far sinks of k and v."""
        q, _, v, *_ = tensors
        num, rest = v.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(*q.shape[:3], 2)
        for block, mask in grid.blocks(bias):
            x = _WindowBlock(grid, block, mask, scaling, softcap, *tensors)
            weights = x.below_top.exp2_()
            grid.put_product(num, block, weights, x.v)
            grid.put_queries(rest, block, torch.cat([weights.sum(-1, keepdim=True), x.log_scale], dim=-1))
        ctx.save_for_backward(*tensors)
        ctx.grid, ctx.bias, ctx.scaling, ctx.softcap = grid, bias, scaling, softcap
        return num, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_num: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
        tensors, grid = ctx.saved_tensors, ctx.grid
        grad_q, *grad_keys = torch.empty_like(tensors[0]), *(torch.zeros_like(x) for x in tensors[1:])
        grad_k, grad_v, grad_sink_k, grad_sink_v = grad_keys
        for block, mask in grid.blocks(ctx.bias, reverse=True):
            x = _WindowBlock(grid, block, mask, ctx.scaling, ctx.softcap, *tensors)
            # The largest score is log_scale and is taken off all others; equals share, as in amax.
            is_top = (x.below_top == 0).to(grad_num.dtype)
            weights = x.below_top.exp2_()
            g_num = grid.queries(grad_num, block)
            g_den, g_log_scale = grid.queries(grad_rest, block).split(1, dim=-1)
            g_values = weights.mT @ g_num
            g_scores = (g_num @ x.v.mT).add_(g_den).mul_(weights)
            share = (g_log_scale - g_scores.sum(-1, keepdim=True)) / is_top.sum(-1, keepdim=True).clamp_min(1)
            g_scores.addcmul_(is_top, share)
            if x.slope is not None:
                g_scores.mul_(x.slope)
            grid.put_queries(grad_q, block, (g_scores @ x.k).mul_(ctx.scaling))
            g_keys = (g_scores.mT @ x.q).mul_(ctx.scaling)
            near = grid.count * grid.chunk
            for grad, grad_sink, g in ((grad_k, grad_sink_k, g_keys), (grad_v, grad_sink_v, g_values)):
                grid.add_keys(grad, block, grid.fold(g[:, :, :, :near]))
                grad_sink[block.rows][:, :, x.chunks] = g[:, :, :, near:]
        return None, None, None, None, grad_q, grad_k, grad_v, grad_sink_k, grad_sink_v
