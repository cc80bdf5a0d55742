"""Linear time and memory, any length: scores by chunks, the linear state carried between.

Linear keys lie as late as the first query that reads them, so a window costs the scan nothing: each query reads its own
chunk through masked scores and all chunks before through the state (a terrace is read as a whole, so there are some
more chunks of scores). The backward passes compute a block's scores and states again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops import vector_decay
from linearize.ops.chunk_layout import ChunkLayout
from linearize.ops.decay import ticking
from linearize.ops.grid import Block, Grid, chunks_back, make_grid, pick
from linearize.ops.heads import repeat_kv
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout
from linearize.ops.linear_state import LinearState
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.span import Span
from linearize.ops.window import window_softmax

__all__ = ["linear_scan", "window_softmax"]

CHUNK = 64
MAX_CHUNK = 256  # with a kernel: scores are cheap beside states, the more so the wider its inputs
# Decays of less than e to this are 0: arithmetic with denormal numbers, which their products are, takes twice the time.
NEGLIGIBLE = {torch.float32: -80.0, torch.float64: -700.0}


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """The linear part (`reference.linear_scan`) in O(T) time and memory, forward and backward."""
    assert kernel is None or (log_decay_k is None and log_decay_v is None)
    if log_decay_v is not None or (log_decay_k is not None and log_decay_k.shape[-1] > 1):
        decays = {"log_decay_k": log_decay_k, "log_decay_v": log_decay_v}
        return vector_decay.linear_scan(phi_q, phi_k, v, **decays, span=span, layout=layout, state=state)
    chunk = CHUNK if kernel is None else min(max(CHUNK, 4 * phi_k.shape[3]), MAX_CHUNK)
    dtype, slots = accumulation_dtype(v.dtype), ChunkLayout(layout, chunk)
    sums = None
    if log_decay_k is not None:
        ticks = slots.spread(ticking(log_decay_k, span, layout).expand(len(phi_k), -1, -1, -1))
        sums = ticks.squeeze(-1).double().cumsum(-1)
    phi_q, phi_k, v = (slots.spread(x.to(dtype)) for x in (phi_q, phi_k, repeat_kv(v, phi_k.shape[1])))
    # Keys lie beside the first query that reads them, at the latest. Of query chunk c, keys in chunks c - first .. c
    # are read through scores, all before through the state.
    first = min(chunks_back(slots, span.max_lag - span.fold_lag), slots.num_chunks - 1)
    S = z = None
    if state is not None:
        S, z = state.S.to(dtype), state.z.to(dtype)
    elif slots.num_chunks > first + 1:  # else all keys that there are lie near
        z = _features(kernel, torch.zeros_like(phi_k[:, :, 0])).zero_()
        S = v.new_zeros(*z.shape, v.shape[3])
    features = 0 if kernel is None or z is None else z.shape[2]
    grid = make_grid(slots, phi_q, phi_k, first, min(span.fold_lag, slots.num_chunks * slots.chunk), features)
    masks = partial(_linear_masks, grid, span, dtype, kernel is not None)
    num, den = _LinearScan.apply(grid, masks, kernel, sums, phi_q, phi_k, v, S, z)
    den = slots.collect(den).squeeze(-1)
    return Partial(slots.collect(num), den, torch.zeros_like(den))


class _LinearMasks(NamedTuple):
    """0 where something does not count; 1, or what its decays leave of it, where it does. None: everything counts.

    y is h, or 1 where there are no decays, and all heads share the masks.
    """

    near: Float[Tensor, "b y n gC W"]  # a query reads a near key
    reads: Float[Tensor, "b y n gC 1"] | None  # a query reads the state before its chunk's near keys
    enters: Float[Tensor, "b y n C 1"] | None  # a key enters the state
    into: Float[Tensor, "b y N1 N1"]  # what an old chunk adds (first: the carried state) is in the state of a chunk


def _linear_masks(
    grid: Grid, span: Span, dtype: torch.dtype, explicit: bool, batch: slice, start: int, stop: int
) -> _LinearMasks:
    """`explicit`: slots without a key have features all the same, which are not 0."""
    q_position, near_position, k_position = grid.around(grid.query_position, grid.position, batch, start, stop)
    q_document, near_document, k_document = grid.around(grid.query_document, grid.document, batch, start, stop)
    near = near_position[:, :, None] < span.lo(q_position)[..., None]
    near &= (near_position >= span.sinks)[:, :, None]
    near &= near_document[:, :, None] == q_document[..., None]
    near = grid.per_query_head(near.to(dtype))
    # The document of the slot before a chunk's near keys owns the state there, which holds its keys and no others.
    owner = pick(grid.owner, batch)[:, start // grid.chunk : stop // grid.chunk + 1]
    into = (owner[:, :, None] == owner[:, None, :]).tril().to(dtype)[:, None]
    if grid.uniform and not span.sinks and not explicit:
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


def _features(kernel: Kernel | None, x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape F"]:
    return x if kernel is None else kernel.features(x)


def _features_grad(
    kernel: Kernel | None, x: Float[Tensor, "*shape X"], grad: Float[Tensor, "*shape F"]
) -> Float[Tensor, "*shape X"]:
    return grad if kernel is None else kernel.features_grad(x, grad)


class _LinearBlock:
    """What forward and backward of a block share."""

    def __init__(
        self,
        grid: Grid,
        block: Block,
        masks: _LinearMasks,
        kernel: Kernel | None,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
    ) -> None:
        self.masks, self.kernel = masks, kernel
        keys, values = grid.keys(phi_k, block), grid.keys(v, block)
        self.q, self.near_k, self.near_v = grid.queries(phi_q, block), grid.near(keys), grid.near(values)
        self.products = self.q @ self.near_k.mT
        self.scores = (self.products if kernel is None else kernel.scores(self.products)).mul_(masks.near)
        n = self.q.shape[2]
        self.old_x, self.old_v = keys[:, :, :n], values[:, :, :n]

    @cached_property
    def reads(self) -> Float[Tensor, "b h n gC F"]:
        return _times(_features(self.kernel, self.q), self.masks.reads)

    @cached_property
    def old_k(self) -> Float[Tensor, "b h n C F"]:
        return _times(_features(self.kernel, self.old_x), self.masks.enters)

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
        into = self.masks.into
        return (into @ all_S.flatten(3)).view_as(all_S), into @ all_z


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grid: Grid,
        masks: Callable[[slice, int, int], _LinearMasks],
        kernel: Kernel | None,
        sums: Float[Tensor, "B Hk P"] | None,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        S: Tensor | None,
        z: Tensor | None,
    ) -> tuple[Float[Tensor, "B H P D"], Float[Tensor, "B H P 1"]]:
        num, den = v.new_empty(*phi_q.shape[:3], v.shape[3]), v.new_empty(*phi_q.shape[:3], 1)
        # The state before each segment of slots, which backward needs, or before the next; None: no query reads one.
        kept = grid.num_segments if any(ctx.needs_input_grad) else 0
        all_S, all_z = (None if x is None else x.expand(kept + 1, *x.shape).clone() for x in (S, z))
        key_sums = None if sums is None else _key_sums(grid, sums)
        for block, mask in grid.blocks(masks):
            mask = mask if sums is None or key_sums is None else _decayed(mask, grid, block, sums, key_sums)
            x = _LinearBlock(grid, block, mask, kernel, phi_q, phi_k, v)
            near = x.scores.sum(-1, keepdim=True)
            if all_S is None or all_z is None:
                grid.put_queries(den, block, near)
                grid.put_product(num, block, x.scores, x.near_v)
                continue
            before, after = (block.index, block.index + 1) if kept else (0, 0)
            S, z = x.states(all_S[before][block.rows], all_z[before][block.rows])
            all_S[after][block.rows], all_z[after][block.rows] = S[:, :, -1], z[:, :, -1]
            from_state = (x.reads * z[:, :, :-1, None]).sum(-1, keepdim=True)
            grid.put_queries(den, block, from_state.add_(near))
            grid.put_product(num, block, x.reads, S[:, :, :-1], added=(x.scores, x.near_v))
        ctx.save_for_backward(sums, phi_q, phi_k, v, all_S, all_z)
        ctx.grid, ctx.masks, ctx.kernel = grid, masks, kernel
        return num, den

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_num: Tensor, grad_den: Tensor) -> tuple[Tensor | None, ...]:
        sums, phi_q, phi_k, v, all_S, all_z = ctx.saved_tensors
        grid: Grid = ctx.grid
        kernel: Kernel | None = ctx.kernel
        grad_q, grad_k = torch.empty_like(phi_q), torch.zeros_like(phi_k)
        grad_S, grad_z = (None if x is None else torch.zeros_like(x[0]) for x in (all_S, all_z))
        # Attention transfer trains nothing but the features.
        grad_v = torch.zeros_like(v) if ctx.needs_input_grad[6] else None
        key_sums = None if sums is None else _key_sums(grid, sums)
        for block, mask in grid.blocks(ctx.masks, reverse=True):
            mask = mask if sums is None or key_sums is None else _decayed(mask, grid, block, sums, key_sums)
            x, n = _LinearBlock(grid, block, mask, kernel, phi_q, phi_k, v), (block.stop - block.start) // grid.chunk
            g_num, g_den = grid.queries(grad_num, block), grid.queries(grad_den, block)
            g_products = (g_num @ x.near_v.mT).add_(g_den).mul_(mask.near)
            if kernel is not None:
                g_products.mul_(kernel.slope(x.products))
            g_q, g_keys = g_products @ x.near_k, grid.fold(g_products.mT @ x.q)
            g_values = None if grad_v is None else grid.fold(x.scores.mT @ g_num)
            if grad_S is not None and grad_z is not None:
                S, z = (y[:, :, :-1] for y in x.states(all_S[block.index][block.rows], all_z[block.index][block.rows]))
                # Of the states: a chunk's own reads, and what comes back from the slots behind; then of what they sum.
                g_S = torch.cat([x.reads.mT @ g_num, grad_S[block.rows][:, :, None]], dim=2)
                g_z = torch.cat([(x.reads * g_den).sum(-2), grad_z[block.rows][:, :, None]], dim=2)
                g_S, g_z = (mask.into.mT @ g_S.flatten(3)).view_as(g_S), mask.into.mT @ g_z
                grad_S[block.rows], grad_z[block.rows] = g_S[:, :, 0], g_z[:, :, 0]
                g_S, g_z = g_S[:, :, 1:], g_z[:, :, 1:, None]
                g_reads = _times((g_num @ S.mT).addcmul_(g_den, z[:, :, :, None]), mask.reads)
                g_q += _features_grad(kernel, x.q, g_reads)
                g_old = _times((x.old_v @ g_S.mT).add_(g_z), mask.enters)
                g_keys[:, :, :n] += _features_grad(kernel, x.old_x, g_old)
                if g_values is not None:
                    g_values[:, :, :n] += x.old_k @ g_S
            grid.put_queries(grad_q, block, g_q)
            grid.add_keys(grad_k, block, g_keys)
            if grad_v is not None and g_values is not None:
                grid.add_keys(grad_v, block, g_values)
        grad_sums = None
        if sums is not None and ctx.needs_input_grad[3]:
            # The sum G_n appears as e^{G_n} phi_q(n) and e^{-G_n} phi_k(n) only.
            reads = (phi_q * grad_q).sum(-1).unflatten(1, (-1, grid.group)).sum(2)
            grad_sums = reads.double() - (phi_k * grad_k).sum(-1)
        return None, None, None, grad_sums, grad_q, grad_k, grad_v, grad_S, grad_z
