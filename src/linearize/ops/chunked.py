"""Compute both parts for rows of any length in linear time and memory: scores within chunks, a state between them.

Softmax reads a window and sinks. Linear keys are moved to the slot of the first query that reads them, so a window adds
no work to the scan: each query reads its own chunk through masked scores and all earlier chunks through the state.
Terraces are read as a whole and need more chunks of scores. The backward passes recompute a block's scores and states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.configs.spans import Span
from linearize.ops.chunk_recurrence import delta_values, vector_decay_scan
from linearize.ops.decays import masked_log_decay
from linearize.ops.grid import (
    Block,
    BlockArgs,
    Body,
    ChunkLayout,
    Grads,
    Grid,
    Tensors,
    chunks_back,
    make_grid,
    pick,
    scan,
)
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.kernel import Kernel
from linearize.ops.partial import LOG2_E, Partial, accumulation_dtype

__all__ = ["delta_values", "linear_scan", "window_softmax"]

CHUNK = 64
MAX_CHUNK = 256  # with a kernel: scores cost little compared with states, which grow with the input width
WINDOW_CHUNK = 32  # shorter than those of the linear part: fewer of the near keys' scores are masked
# Log decays below this count as a decay of 0: their products would be denormal, which takes twice the time.
NEGLIGIBLE = {torch.float32: -80.0, torch.float64: -700.0}

# --- softmax over a window and sinks ----------------------------------------------------------------------------------


def window_softmax(x: SoftmaxInputs) -> Partial:
    """Return the softmax part (`reference.window_softmax`) in O(T w) time and O(T) memory, forward and backward."""
    span, layout, dtype = x.span, x.layout, accumulation_dtype(x.v.dtype)
    slots = ChunkLayout(layout, min(WINDOW_CHUNK, max(16, span.max_softmax_keys)))
    q, k, v = (slots.spread(tensor.to(dtype)) for tensor in (x.q, x.k, x.v))
    first = min(chunks_back(slots, span.max_softmax_keys), slots.num_chunks - 1)
    grid = make_grid(slots, q, k, first)
    slot, sinks_seen = _far_sinks(grid, slots, span)
    sink_k, sink_v = (_take(tensor, slot) for tensor in (k, v))
    body = _WindowSoftmax(grid, span, x.scaling, x.softcap, sinks_seen, dtype)
    num, rest = scan(body, (v.shape[3], 2), (), q, k, v, sink_k, sink_v)
    return Partial(slots.collect(num, layout.length), *slots.collect(rest, layout.length).unbind(-1))


def _far_sinks(grid: Grid, slots: ChunkLayout, span: Span) -> tuple[Int[Tensor, "#B N s"], Bool[Tensor, "#B N s"]]:
    """Return the slots of the sinks that lie before the near keys of each chunk, and which of these sinks exist.

    They belong to the document of the slot before the near keys: other documents of the chunk begin among these keys.
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
    """Compute num, and den with log_scale, from q, k, v and the far sinks of k and v; there is no state."""

    grid: Grid
    span: Span
    scaling: float
    softcap: float | None
    sinks_seen: Bool[Tensor, "#B N s"]  # of the far sinks
    dtype: torch.dtype

    def masks(self, batch: slice, start: int, stop: int) -> Float[Tensor, "b 1 n gC Ws"]:
        """Return a bias: 0 where a query sees a near key or a far sink, -inf elsewhere."""
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

    def forward(self, args: BlockArgs, outputs: Tensors) -> Tensors:
        (num, rest), block, x = outputs, args.block, _WindowBlock(self, args)
        weights = x.below_top.exp2_()
        self.grid.put_product(num, block, weights, x.v)
        self.grid.put_queries(rest, block, torch.cat([weights.sum(-1, keepdim=True), x.log_scale], dim=-1))
        return ()

    def backward(self, args: BlockArgs, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        grid, block, x = self.grid, args.block, _WindowBlock(self, args)
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
    """Return 1 where a score is the largest of its row, 0 elsewhere, and the number of largest scores.

    The largest score is log_scale, which was subtracted from all scores. Equal ones share its gradient, as in amax.
    """
    is_top = (below_top == 0).to(below_top.dtype)
    return is_top, is_top.sum(-1, keepdim=True).clamp_min(1)


class _WindowBlock:
    """Compute the scores that forward and backward share, to base 2: exp2 takes a fourth of the time of exp."""

    def __init__(self, window: _WindowSoftmax, args: BlockArgs) -> None:
        block, _, (q, k, v, sink_k, sink_v) = args
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
        self.below_top = scores.sub_(top)  # the weights are 2 to this power
        self.log_scale = top.div_(LOG2_E)


# --- the linear part --------------------------------------------------------------------------------------------------


def linear_scan(x: LinearInputs) -> Partial:
    """Return the linear part (`reference.linear_scan`) in O(T) time and memory, forward and backward."""
    assert x.kernel is None or (x.log_decay_k is None and x.log_decay_v is None)
    if x.vector_decays:
        return vector_decay_scan(x)
    span, layout, kernel, state, phi_k = x.span, x.layout, x.kernel, x.state, x.phi_k
    chunk = CHUNK if kernel is None else min(max(CHUNK, 4 * phi_k.shape[3]), MAX_CHUNK)
    dtype, slots = accumulation_dtype(x.v.dtype), ChunkLayout(layout, chunk)
    sums = None
    if x.log_decay_k is not None:
        log_decay = slots.spread(masked_log_decay(x.log_decay_k, span, layout).expand(len(phi_k), -1, -1, -1))
        sums = log_decay.double().cumsum(2)
    tensors = x.queries(), phi_k, repeat_kv(x.v, phi_k.shape[1])
    phi_q, phi_k, v = (slots.spread(tensor.to(dtype)) for tensor in tensors)
    # Keys lie no later than the first query that reads them. Query chunk c reads the keys in chunks c - first .. c
    # through scores and all earlier ones through the state.
    first = min(chunks_back(slots, span.max_softmax_keys - span.linear_delay), slots.num_chunks - 1)
    carried = ()
    if state is not None:
        carried = state.S.to(dtype), state.z.to(dtype)
    elif slots.num_chunks > first + 1:  # else all keys are near, and no query reads a state
        z = _features(kernel, torch.zeros_like(phi_k[:, :, 0])).zero_()
        carried = v.new_zeros(*z.shape, v.shape[3]), z
    features = carried[1].shape[2] if carried and kernel is not None else 0
    grid = make_grid(slots, phi_q, phi_k, first, span.linear_delay, features)
    body = _LinearScan(grid, span, kernel, dtype, sums)
    num, den = scan(body, (v.shape[3], 1), carried, phi_q, phi_k, v, *(() if sums is None else (sums,)))
    den = slots.collect(den, layout.length).squeeze(-1)
    return Partial(slots.collect(num, layout.length), den, torch.zeros_like(den))


class _LinearMasks(NamedTuple):
    """Masks of a block: 0 where a key or state does not count, else 1 or the product of its decays.

    None: everything counts. Axis y is h, or 1 without decays, where all heads share the masks.
    """

    near: Float[Tensor, "b y n gC W"]  # a query reads a near key
    reads: Float[Tensor, "b y n gC 1"] | None  # a query reads the state before its chunk's near keys
    enters: Float[Tensor, "b y n C 1"] | None  # a key enters the state
    into: Float[Tensor, "b y N1 N1"]  # the sums of an old chunk (first: the carried state) are in a chunk's state


def _times(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _features(kernel: Kernel | None, x: Float[Tensor, "*shape X"]) -> Float[Tensor, "*shape F"]:
    return x if kernel is None else kernel.features(x)


def _features_grad(
    kernel: Kernel | None, x: Float[Tensor, "*shape X"], grad: Float[Tensor, "*shape F"]
) -> Float[Tensor, "*shape X"]:
    return grad if kernel is None else kernel.features_grad(x, grad)


class _LinearScan(Body):
    """Compute scores of near keys and a state of all others.

    `sums` are the cumulative log decays of each head, None without decays. The docstring of `grid` says why the
    backward pass is written out.
    """

    def __init__(
        self, grid: Grid, span: Span, kernel: Kernel | None, dtype: torch.dtype, sums: Float[Tensor, "B Hk P 1"] | None
    ) -> None:
        self.grid, self.span, self.kernel, self.dtype, self.sums = grid, span, kernel, dtype, None
        if sums is not None:
            self.sums = sums.detach().squeeze(-1)
            self.key_sums = F.pad(grid.lay_keys(self.sums, empty=0), (1, 0))  # at the keys' slots, after one more 0

    def masks(self, batch: slice, start: int, stop: int) -> _LinearMasks:
        grid, span = self.grid, self.span
        position, document, owner = grid.around(batch, start, stop)
        near = position.near[:, :, None] < span.lo(position.queries)[..., None]
        near &= (position.near >= span.sinks)[:, :, None]
        near &= document.near[:, :, None] == document.queries[..., None]
        near = grid.repeat_queries(near[:, None].to(self.dtype))
        # The state before a chunk's near keys has the keys of the owner alone.
        into = (owner[:, :, None] == owner[:, None, :]).tril().to(self.dtype)[:, None]
        # A kernel returns features other than 0 even for slots without a key.
        if grid.uniform and not span.sinks and self.kernel is None:
            return _LinearMasks(near, None, None, into)
        n = position.queries.shape[1]
        reads = (document.queries == owner[:, :n, None]) & (position.queries >= 0)
        enters = (document.keys[:, :n] == owner[:, 1:, None]) & (position.keys[:, :n] >= span.sinks)
        reads, enters = (y[:, None, ..., None].to(self.dtype) for y in (reads, enters))
        return _LinearMasks(near, grid.repeat_queries(reads), enters, into)

    def decayed(self, block: Block, masks: _LinearMasks) -> _LinearMasks:
        """Return the masks times the decays between the step that writes and the step that reads.

        Differences of sums are computed in float64. No exponent is positive where the mask is not 0.
        """
        if self.sums is None:
            return masks
        grid, dtype, chunk, first = self.grid, self.dtype, self.grid.chunk, self.grid.first * self.grid.chunk
        queries = self.sums[block.rows][..., block.start : block.stop].unflatten(2, (-1, chunk))
        rows = self.key_sums[block.rows][..., block.start : block.stop + first + 1]
        n = (block.stop - block.start) // chunk
        boundary = rows[..., : (n + 1) * chunk : chunk]  # before the near keys of each chunk and of the next one
        rows = rows[..., 1:]
        old = rows[..., : n * chunk].unflatten(2, (-1, chunk))

        keys = rows.unfold(2, first + chunk, chunk)[:, :, :n]
        near = _decay(queries[..., None], keys[:, :, :, None], dtype)
        reads = grid.repeat_queries(_decay(queries, boundary[..., :n, None], dtype)[..., None])
        enters = _decay(boundary[..., 1:, None], old, dtype)[..., None]
        return _LinearMasks(
            grid.repeat_queries(near).mul_(masks.near),
            reads if masks.reads is None else reads.mul_(masks.reads),
            enters if masks.enters is None else enters.mul_(masks.enters),
            _decay(boundary[..., None], boundary[:, :, None], dtype).mul_(masks.into),
        )

    def forward(self, args: BlockArgs, outputs: Tensors) -> Tensors:
        (num, den), grid, block, x = outputs, self.grid, args.block, _LinearBlock(self, args)
        near = x.scores.sum(-1, keepdim=True)
        if not args.state:
            grid.put_queries(den, block, near)
            grid.put_product(num, block, x.scores, x.near_v)
            return ()
        S, z = x.states(*args.state)
        from_state = (x.reads * z[:, :, :-1, None]).sum(-1, keepdim=True)
        grid.put_queries(den, block, from_state.add_(near))
        grid.put_product(num, block, x.reads, S[:, :, :-1], added=(x.scores, x.near_v))
        return S[:, :, -1], z[:, :, -1]

    def backward(self, args: BlockArgs, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        grid, kernel, block, x = self.grid, self.kernel, args.block, _LinearBlock(self, args)
        grad_q, grad_k, grad_v, *grad_sums = grads
        g_num, g_den = (grid.queries(g, block) for g in grad_outputs)
        g_products = (g_num @ x.near_v.mT).add_(g_den).mul_(x.masks.near)
        if kernel is not None:
            g_products.mul_(kernel.slope(x.products))
        g_q, g_keys = g_products @ x.near_k, grid.fold(g_products.mT @ x.q)
        # Attention transfer trains the features alone, so values may need no gradient.
        g_values = None if grad_v is None else grid.fold(x.scores.mT @ g_num)
        grad_before = ()
        if args.state:
            n, into = x.q.shape[2], x.masks.into.mT
            S, z = (y[:, :, :-1] for y in x.states(*args.state))
            # The gradient of the states, from a chunk's own reads and from later slots; then that of their summands.
            g_S = torch.cat([x.reads.mT @ g_num, grad_after[0][:, :, None]], dim=2)
            g_z = torch.cat([(x.reads * g_den).sum(-2), grad_after[1][:, :, None]], dim=2)
            g_S, g_z = (into @ g_S.flatten(3)).view_as(g_S), into @ g_z
            grad_before = g_S[:, :, 0], g_z[:, :, 0]
            g_S, g_z = g_S[:, :, 1:], g_z[:, :, 1:, None]
            g_reads = _times((g_num @ S.mT).addcmul_(g_den, z[:, :, :, None]), x.masks.reads)
            g_q += _features_grad(kernel, x.q, g_reads)
            g_old = _times((x.old_v @ g_S.mT).add_(g_z), x.masks.enters)
            g_keys[:, :, :n] += _features_grad(kernel, x.old_x, g_old)
            if g_values is not None:
                g_values[:, :, :n] += x.old_k @ g_S
        if grad_q is not None:
            grid.put_queries(grad_q, block, g_q)
        for grad, g in ((grad_k, g_keys), (grad_v, g_values)):
            if grad is not None and g is not None:
                grid.add_keys(grad, block, g)
        for grad in grad_sums:
            if grad is not None:
                # The sum G_n appears as e^{G_n} phi_q(n) and e^{-G_n} phi_k(n) only.
                reads = (x.q * g_q).sum(-1).unflatten(3, (grid.group, -1)).sum(3)
                grad[block.rows][:, :, block.start : block.stop, 0] += reads.flatten(2)
                # The gradient of a feature that underflowed to 0 may overflow this dtype.
                written = torch.where(x.keys == 0, 0, x.keys * g_keys)
                grid.add_keys(grad, block, -written.sum(-1, keepdim=True).double())
        return grad_before


def _decay(later: Tensor, earlier: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e^(later - earlier) of sums of log decays, 0 where it is negligible."""
    exponent = (later - earlier).clamp_max_(0).to(dtype)
    return torch.threshold_(exponent, NEGLIGIBLE[dtype], -torch.inf).exp_()


class _LinearBlock:
    """Compute the tensors of a block that forward and backward share."""

    def __init__(self, scan: _LinearScan, args: BlockArgs) -> None:
        (q, k, v, *_), grid, kernel, block = args.inputs, scan.grid, scan.kernel, args.block
        self.masks, self.kernel = scan.decayed(block, block.masks), kernel
        self.keys, values = grid.keys(k, block), grid.keys(v, block)
        self.q, self.near_k, self.near_v = grid.queries(q, block), grid.near(self.keys), grid.near(values)
        self.products = self.q @ self.near_k.mT
        self.scores = (self.products if kernel is None else kernel.scores(self.products)).mul_(self.masks.near)
        n = self.q.shape[2]
        self.old_x, self.old_v = self.keys[:, :, :n], values[:, :, :n]

    @cached_property
    def reads(self) -> Float[Tensor, "b h n gC F"]:
        return _times(_features(self.kernel, self.q), self.masks.reads)

    @cached_property
    def old_k(self) -> Float[Tensor, "b h n C F"]:
        return _times(_features(self.kernel, self.old_x), self.masks.enters)

    def states(
        self, S: Float[Tensor, "b h F D"], z: Float[Tensor, "b h F"]
    ) -> tuple[Float[Tensor, "b h N1 F D"], Float[Tensor, "b h N1 F"]]:
        """Return the states before the near keys of each chunk and of the next one after them; S, z is the first."""
        b, h, n = self.old_k.shape[:3]
        all_S, all_z = S.new_empty(b, h, n + 1, *S.shape[2:]), z.new_empty(b, h, n + 1, z.shape[2])
        all_S[:, :, 0], all_z[:, :, 0] = S, z
        if b * h == 1:  # written in place: a first write to fresh memory costs as much as the product
            torch.bmm(self.old_k[0, 0].mT, self.old_v[0, 0], out=all_S[0, 0, 1:])
        else:
            all_S[:, :, 1:] = self.old_k.mT @ self.old_v
        torch.sum(self.old_k, -2, out=all_z[:, :, 1:])
        into = self.masks.into
        return (into @ all_S.flatten(3)).view_as(all_S), into @ all_z
