"""A recurrence over chunks, a segment of them at a time, in linear memory.

Forward keeps the inputs and the state before each segment. Backward computes each segment again, with autograd, from
the last one to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops.chunk_layout import ChunkLayout
from linearize.ops.grid import Block, Grid, pick
from linearize.ops.layout import Layout
from linearize.ops.span import Span, TerracedSpan

CHUNK = 64
# Scores per block: on a CPU, most of the dozen or two tensors of that size should stay in cache.
BLOCK_SCORES = {"cpu": 2**17, "cuda": 2**23}
# A block has all heads rather than more chunks (heads go side by side, chunks one after the other), but a state is kept
# for each segment.
MIN_CHUNKS_PER_BLOCK = 4


class Masks(NamedTuple):
    """1 (or true) where something counts, 0 elsewhere.

    The state has R registers: one with all keys so far, and for terraced spans a second one with those of them that
    stand before the current terrace, which are the ones that its queries read.
    """

    query: Float[Tensor, "b 1 n C 1"]
    key: Float[Tensor, "b 1 n C 1"]  # there is a linear key, so its step decays too
    near: Float[Tensor, "b 1 n C C"]  # a query reads a key of its chunk, if it is not a later one
    reads: Float[Tensor, "b 1 n C R"]  # a query reads a register as it stands before the chunk
    enters: Float[Tensor, "b 1 n C R"]  # a key enters a register by the end of the chunk
    keeps: Float[Tensor, "b 1 n 1"]  # what the registers hold is kept through the chunk
    catches_up: Bool[Tensor, "b 1 n"] | None  # a terrace begins in the chunk: the second register starts from the first


class DelayedChunkLayout(ChunkLayout):
    """Slots where each key stands `span.fold_lag` slots late.

    That is beside the first query that reads it, or for terraced spans, whose terraces are read as a whole, less than
    `window_size` slots before. `position` and `document` are those of the keys where they stand now.
    """

    def __init__(self, layout: Layout, span: Span) -> None:
        chunk = CHUNK
        while chunk > max(16, layout.key_position.shape[1]):
            chunk //= 2
        super().__init__(layout, chunk)
        slots = self.position.shape[1]
        self.query_position, self.query_document, self.sinks = self.position, self.document, span.sinks
        # Behind the last slot no query reads it anyway.
        self.lag = min(span.fold_lag, slots)
        self.position = F.pad(self.position, (self.lag, 0), value=-1)[:, :slots]
        self.document = F.pad(self.document, (self.lag, 0))[:, :slots]
        self.terrace = None
        if isinstance(span, TerracedSpan):
            begins = (self.position >= 0) & (self.position % span.window_size == 0)
            self.terrace = F.pad(begins.cumsum(1), (1, 0))

    @property
    def registers(self) -> int:
        return 1 if self.terrace is None else 2

    def delay(self, x: Float[Tensor, "B h P X"]) -> Float[Tensor, "B h P X"]:
        """From the keys' own slots to the delayed ones."""
        return F.pad(x, (0, 0, self.lag, 0))[:, :, : x.shape[2]] if self.lag else x

    def collect_keys(self, x: Float[Tensor, "B h P X"]) -> Float[Tensor, "B h K X"]:
        """The inverse of `spread` for keys."""
        x = x[:, :, : self.length]
        if self.layout.compaction is None:
            return x
        back = self.layout.compaction.argsort(1)[:, None, :, None]
        return x.gather(2, back.expand(-1, x.shape[1], -1, x.shape[3]))

    def masks(self, grid: Grid, dtype: torch.dtype, batch: slice, start: int, stop: int) -> Masks:
        def chunks(x: Tensor) -> Tensor:
            return pick(x, batch)[:, start:stop].unflatten(1, (-1, self.chunk))

        owner = pick(grid.owner, batch)[:, start // self.chunk : stop // self.chunk + 1]
        query, key = chunks(self.query_position) >= 0, chunks(self.position) >= self.sinks
        query_document, document = chunks(self.query_document), chunks(self.document)
        near = query_document[..., None] == document[:, :, None]
        reads, enters = query_document == owner[:, :-1, None], document == owner[:, 1:, None]
        keeps, catches_up = owner[:, :-1] == owner[:, 1:], None
        if self.terrace is None:
            reads, enters = reads[..., None], enters[..., None]
        else:
            terrace = chunks(self.terrace[:, 1:])
            bounds = pick(self.terrace, batch)[:, start : stop + 1 : self.chunk]
            near &= terrace[:, :, None] < terrace[..., None]
            began_before = terrace == bounds[:, :-1, None]
            reads = torch.stack([reads & ~began_before, reads & began_before], dim=-1)
            enters = torch.stack([enters, enters & (terrace < bounds[:, 1:, None])], dim=-1)
            catches_up = (bounds[:, 1:] > bounds[:, :-1])[:, None]
        numbers = query[..., None], key[..., None], near, reads, enters, keeps[..., None]
        query, key, near, reads, enters, keeps = (x[:, None].to(dtype) for x in numbers)
        return Masks(query, key, near, reads, enters, keeps, catches_up)

    def grid(self, rows: tuple[int, int], group: int, device: torch.device) -> Grid:
        max_scores = BLOCK_SCORES["cpu" if device.type == "cpu" else "cuda"]
        at_once = max_scores // (group * self.chunk**2)
        max_chunks = max(MIN_CHUNKS_PER_BLOCK, at_once // (rows[0] * rows[1]))
        return Grid(self, rows, group, 0, 1, at_once, max_chunks)


Body = Callable[..., tuple[Tensor, Tensor]]


def scan(slots: DelayedChunkLayout, body: Body, width: int, S: Tensor, *tensors: Tensor) -> Float[Tensor, "B h P X"]:
    """What `body(masks, S, *tensors)` gives for each segment: outputs [b, h, slots, width], and the next segment's S.

    Tensors are [B, Hk or H, P, X], the outputs have as many heads as the first of them; S is [B, Hk, ...].
    """
    grid = slots.grid((S.shape[0], S.shape[1]), tensors[0].shape[1] // S.shape[1], S.device)
    return _Scan.apply(grid, partial(slots.masks, grid, S.dtype), body, width, S, *tensors)


def _take(x: Tensor, block: Block, key_heads: int) -> Tensor:
    """A block's view of a tensor with as many heads as the keys, or a multiple of them."""
    ratio = x.shape[1] // key_heads
    return x[block.batch, block.heads.start * ratio : block.heads.stop * ratio, block.start : block.stop]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grid: Grid,
        masks: Callable[[slice, int, int], Masks],
        body: Body,
        width: int,
        S: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        heads = S.shape[1]
        out = tensors[0].new_empty(*tensors[0].shape[:3], width)
        all_S = S.expand(grid.num_segments + 1, *S.shape).clone()
        for block, mask in grid.blocks(masks):
            inputs = (_take(x, block, heads) for x in tensors)
            y, all_S[block.index + 1][block.rows] = body(mask, all_S[block.index][block.rows], *inputs)
            _take(out, block, heads).copy_(y)
        ctx.save_for_backward(all_S, *tensors)
        ctx.grid, ctx.masks, ctx.body = grid, masks, body
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        all_S, *tensors = ctx.saved_tensors
        needed, heads, grad_S = ctx.needs_input_grad[5:], all_S.shape[2], torch.zeros_like(all_S[0])
        grads = [torch.empty_like(x) if need else None for x, need in zip(tensors, needed, strict=True)]
        for block, mask in ctx.grid.blocks(ctx.masks, reverse=True):
            S = all_S[block.index][block.rows].detach().requires_grad_()
            inputs = [
                _take(x, block, heads).detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)
            ]
            with torch.enable_grad():
                outputs = ctx.body(mask, S, *inputs)
            wanted = [S, *(x for x in inputs if x.requires_grad)]
            grad_outputs = _take(grad_out, block, heads), grad_S[block.rows]
            grad_S[block.rows], *found = torch.autograd.grad(outputs, wanted, grad_outputs)
            for grad, g in zip((x for x in grads if x is not None), found, strict=True):
                _take(grad, block, heads).copy_(g)
        return None, None, None, None, grad_S, *grads
